"""One line on a terminal that says what a search does."""

import sys


class Progress:
    """A line that is written over; nothing where there is no terminal."""

    def __init__(self, shown: bool | None = None):
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._batch = ""
        self._width = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def batch(self, number: int, total: int) -> None:
        """Note which batch is tried, for the lines that follow."""
        done = "#" * (20 * (number - 1) // total)
        self._batch = f"[{done:20}] batch {number} of {total}, "

    def run(self, number: int, islands: int) -> None:
        """Write which run it is, and with how many layers."""
        self._write(f"{self._batch}run {number}, {islands} float32 layers")

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write("\r" + text.ljust(self._width))
            sys.stderr.flush()
            self._width = len(text)
