"""One line per step in CSV or JSON Lines files that a crash cannot spoil."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from ..torch_checkpoint.atomic import atomic_write


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """One step of a run.

    Attributes:
        step: its number.
        scale: the loss scale after it.
        applied: False if it was skipped.
        grad_norm: the norm of the unscaled gradients, or None.
        loss: the true loss, or None.

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


_NAMES = [f.name for f in fields(ScaleRecord)]


def write_records(path: Path, records: list[ScaleRecord]) -> None:
    """Write a whole file in the format of its suffix, or leave it as it was."""
    header, line, _ = _format(path)
    text = header + "".join(map(line, records))
    with atomic_write(path) as file:
        file.write(text.encode())


def append_records(path: Path, records: list[ScaleRecord]) -> None:
    """Add lines to a file, which is made if need be.

    A line that a crash has cut off at its end is taken away first.
    """
    header, line, _ = _format(path)
    with open(path, "ab+") as file:
        _check_start(path, file)
        whole = _whole_lines(file)
        file.truncate(whole)
        text = ("" if whole else header) + "".join(map(line, records))
        # One write: lines of a killed process are all there or cut at the end.
        file.write(text.encode())


def read_records(path: Path) -> list[ScaleRecord]:
    """Read a file; where steps come twice, as after a resume, the latter count."""
    header, _, parse = _format(path)
    with open(path, "rb") as file:
        _check_start(path, file)
        file.seek(0)
        text = file.read()
    lines = text[: text.rfind(b"\n") + 1].decode().splitlines()
    records: list[ScaleRecord] = []
    for number, row in enumerate(lines[bool(header) :], start=1 + bool(header)):
        try:
            record = parse(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no record: {row!r}") from error
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return records


def _check_start(path: Path, file: BinaryIO) -> None:
    """Raise unless a file is empty or begins as a history does, cut off or not."""
    start = _format(path)[0].encode() or b'{"step": '
    file.seek(0)
    found = file.read(len(start))
    if not start.startswith(found):
        raise ValueError(
            f"{path} does not begin as a history does, with {start.decode()!r}: "
            "give another file name."
        )


def _whole_lines(file: BinaryIO) -> int:
    """Return where the last whole line of a history ends."""
    end = file.seek(0, os.SEEK_END)
    # A line has five numbers, some 100 bytes.
    start = file.seek(max(0, end - 4096))
    return start + file.read().rfind(b"\n") + 1


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
    return ScaleRecord(int(step), float(scale), applied == "1", *numbers)


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
    return ScaleRecord(found["step"], float(found["scale"]), found["applied"], *numbers)


_FORMATS: dict[str, tuple[str, Callable, Callable]] = {
    ".csv": (",".join(_NAMES) + "\n", _csv_line, _from_csv),
    ".jsonl": ("", _json_line, _from_json),
}


def _format(path: Path) -> tuple[str, Callable, Callable]:
    try:
        return _FORMATS[path.suffix]
    except KeyError:
        raise ValueError(
            f"Cannot tell the format of {path.name!r}: use .csv or .jsonl."
        ) from None
