"""One line per step in CSV or JSON Lines files that a crash cannot spoil."""

import json
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..files.atomic import atomic_write, naming
from ..files.locks import is_there, lock, open_file


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """One step of a run.

    Attributes:
        step (int): Its number.
        scale (float): The loss scale after it.
        applied (bool): False if it was skipped.
        grad_norm (float or None): The norm of the unscaled gradients, or None.
        loss (float or None): The true loss, or None.

    Example:
        >>> from mlx_gradscale.diagnostics import ScaleRecord
        >>> ScaleRecord(step=1, scale=65536.0, applied=True, loss=0.5)
        ScaleRecord(step=1, scale=65536.0, applied=True, grad_norm=None, loss=0.5)
    """

    step: int
    scale: float
    applied: bool
    grad_norm: float | None = None
    loss: float | None = None


# A line has five numbers, some 100 bytes: a whole one ends in so much of a file.
_TAIL = 4096
_NAMES = [f.name for f in fields(ScaleRecord)]


def write_records(path: Path, records: list[ScaleRecord]) -> None:
    """Write a whole file in the format of its suffix, or leave it as it was."""
    header, line, _ = _format(path)
    text = header + "".join(map(line, records))
    with atomic_write(path) as file:
        file.write(text.encode())


class RecordFile:
    """A file that one history adds to, made if need be.

    It is locked until the object is gone: lines of two runs would replace each other
    when they are read. In one process a new object takes the file over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header, self._line, self._parse = _format(path)
        self._descriptor: int | None = None
        self._process: int | None = None
        self._is_taken = False
        self.append([])

    def last_step(self) -> int:
        """Return the number of the last step in the file, or 0."""
        with open(self._path, "rb", opener=open_file) as file:
            descriptor = file.fileno()
            end = _whole_lines(descriptor)
            start = max(0, end - _TAIL)
            lines = _read_at(descriptor, start)[: end - start].splitlines()
        if not lines or (start == 0 and len(lines) == bool(self._header)):
            return 0
        return _parsed(
            self._path, "the last line", lines[-1].decode(), self._parse
        ).step

    def append(self, records: list[ScaleRecord]) -> None:
        """Add lines; one that a crash has cut off at the end is taken away first."""
        descriptor = self._open()
        _check_start(self._path, _read_at(descriptor, 0))
        with naming(self._path):
            whole = _whole_lines(descriptor)
            os.ftruncate(descriptor, whole)
            text = ("" if whole else self._header) + "".join(map(self._line, records))
            data = memoryview(text.encode())
            while data:  # one write, unless the disk is full
                data = data[os.write(descriptor, data) :]

    def _open(self) -> int:
        if self._is_taken:
            raise RuntimeError(
                f"{self._path} is written to by a newer ScaleHistory: record with that "
                "one, or give this one a file of its own."
            )
        # A child process has its parent's file, and the file may have been replaced.
        if self._descriptor is not None and self._process == os.getpid():
            if is_there(self._path, self._descriptor):
                return self._descriptor
            self._close()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        descriptor = open_file(self._path, flags)
        try:
            _check_start(self._path, _read_at(descriptor, 0))
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._process = descriptor, os.getpid()
        self._close: Callable[[], object]
        self._close = weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _take(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        key = (os.getpid(), state.st_dev, state.st_ino)
        older = _OPEN.get(key)
        if older is not None:
            older._is_taken = True
            older._close()
        if lock(descriptor, wait=False) is False:
            raise OSError(
                f"{self._path} is written to by another process: give this history a "
                "file of its own."
            )
        _OPEN[key] = self


# (process, device, file) -> who writes to it.
_OPEN: "weakref.WeakValueDictionary[tuple[int, int, int], RecordFile]" = (
    weakref.WeakValueDictionary()
)


def read_records(path: Path) -> list[ScaleRecord]:
    """Read a file; where steps come twice, as after a resume, the latter count."""
    header, _, parse = _format(path)
    with open(path, "rb", opener=open_file) as file:
        text = file.read()
    _check_start(path, text)
    lines = text[: text.rfind(b"\n") + 1].decode().splitlines()
    records: list[ScaleRecord] = []
    for number, row in enumerate(lines[bool(header) :], start=1 + bool(header)):
        record = _parsed(path, f"line {number}", row, parse)
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return records


def _parsed(
    path: Path, place: str, row: str, parse: Callable[[str], ScaleRecord]
) -> ScaleRecord:
    try:
        return parse(row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        shown = f"{row[:100]!r}{'...' if len(row) > 100 else ''}"
        raise ValueError(f"{path}, {place}, is no record: {shown}") from error


def _check_start(path: Path, text: bytes) -> None:
    """Raise unless a file is empty or begins as a history does, cut off or not."""
    start = _format(path)[0].encode() or b'{"step": '
    if not start.startswith(text[: len(start)]):
        raise ValueError(
            f"{path} does not begin as a history does, with {start.decode()!r}: "
            "give another file name."
        )


def _whole_lines(descriptor: int) -> int:
    """Return where the last whole line of a history ends."""
    end = os.fstat(descriptor).st_size
    start = max(0, end - _TAIL)
    return start + _read_at(descriptor, start).rfind(b"\n") + 1


def _read_at(descriptor: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, _TAIL)


def _csv_line(record: ScaleRecord) -> str:
    row = asdict(record) | {"applied": int(record.applied)}
    return ",".join("" if x is None else str(x) for x in row.values()) + "\n"


def _from_csv(row: str) -> ScaleRecord:
    cells = row.split(",")
    if len(cells) != len(_NAMES):
        raise ValueError(f"{len(cells)} cells")
    step, scale, applied, *rest = cells
    if applied not in ("0", "1"):
        raise ValueError(applied)
    numbers = [float(cell) if cell else None for cell in rest]
    return ScaleRecord(_step(int(step)), float(scale), applied == "1", *numbers)


def _json_line(record: ScaleRecord) -> str:
    # JSON has no inf and no NaN; as strings any reader can take them.
    row = {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in asdict(record).items()
    }
    return json.dumps(row, allow_nan=False) + "\n"


def _from_json(row: str) -> ScaleRecord:
    found = json.loads(row)
    rest = [found.get(name) for name in _NAMES[3:]]
    if type(found["step"]) is not int or type(found["applied"]) is not bool:
        raise ValueError(row)
    numbers = [None if x is None else float(x) for x in rest]
    step, scale = _step(found["step"]), float(found["scale"])
    return ScaleRecord(step, scale, found["applied"], *numbers)


def _step(number: int) -> int:
    if abs(number) >= 2**63:  # nothing could be drawn with it
        raise ValueError(number)
    return number


_FORMATS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    ".csv": (",".join(_NAMES) + "\n", _csv_line, _from_csv),
    ".jsonl": ("", _json_line, _from_json),
}


def _format(path: Path) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    try:
        return _FORMATS[path.suffix]
    except KeyError:
        raise ValueError(
            f"Cannot tell the format of {path.name!r}: use .csv or .jsonl."
        ) from None
