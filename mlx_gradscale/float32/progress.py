"""Show the progress of a diagnostic that runs a batch many times."""

import sys
import time

# Seconds before progress is printed: shorter work ends before anyone wonders.
_DELAY = 3.0


class Progress:
    """Count the trial runs of a diagnostic, and print them if it takes long."""

    def __init__(self, name: str):
        self._name, self._count, self._start = name, 0, time.monotonic()

    def show(self, run: str) -> None:
        """Report the run that is about to start."""
        self._count += 1
        if time.monotonic() - self._start >= _DELAY:
            text = f"{self._name}, run {self._count}: {run}"
            print(text, file=sys.stderr, flush=True)
