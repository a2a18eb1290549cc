"""Record the history of a run in memory and in a CSV file."""

import math
import os
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..files.paths import open_file
from .reading import scale_array, scaler_of


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """One step in a :class:`ScaleHistory`.

    Attributes:
        step (int): The step number.
        scale (float): The loss scale after the step.
        applied (bool): False if the step was skipped.
        grad_norm (float or None): The norm of the unscaled gradients, if recorded.
        loss (float or None): The loss, if recorded.
    """

    step: int
    scale: float
    applied: bool
    grad_norm: float | None = None
    loss: float | None = None


_HEADER = ",".join(field.name for field in fields(ScaleRecord))
# More than enough for one line.
_TAIL = 1024


class ScaleHistory:
    """The loss scale, skipped steps, gradient norm and loss of a run.

    :meth:`record` only stores lazy arrays, which the history reads from the device once
    every ``every`` steps. If the loop evaluates its arrays in each step, reading them
    does not wait. :meth:`flush`, or the end of a ``with`` block, reads the last arrays.

    Args:
        path (str, optional): A ``.csv`` file to append to. If it exists, numbering
            continues after its last step, but only :meth:`load` returns its records. To
            resume from an earlier step, pass ``step`` to :meth:`record`; :meth:`load`
            then drops the older records from there on. If two histories write to one
            file, it contains the records of both, of which :meth:`load` drops some in
            the same way. Default: ``None``.
        every (int): The number of steps between reads from the device. Default: ``50``.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import ScaleHistory
        >>> scaler, history = GradScaler(init_scale=8.0), ScaleHistory()
        >>> for loss in (0.5, 0.25):
        ...     history.record(scaler, loss=mx.array(loss))
        >>> [(record.scale, record.loss) for record in history.records]
        [(8.0, 0.5), (8.0, 0.25)]
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, every: int = 50):
        self._every = every
        self._path = None if path is None else _check_path(path)
        self._records: list[ScaleRecord] = []
        self._pending: list[tuple[int, list[Any]]] = []
        self._step = 0
        if self._path is not None:
            records = _load(self._path) if self._path.exists() else []
            self._step = records[-1].step if records else 0
            _append(self._path, [])

    def record(
        self,
        source: Any,
        *,
        loss: mx.array | float | None = None,
        grad_norm: mx.array | float | None = None,
        step: int | None = None,
    ) -> None:
        """Record one step.

        Call this method after the ``update()`` of the scaler or optimizer.

        Args:
            source (GradScaler or LossScaleOptimizer): The scaler or optimizer that has
                just stepped.
            loss (array or float, optional): The loss. Evaluate it with the step, as in
                ``mx.eval(loss, model.state, ...)``; otherwise its graph stays in memory
                until the history reads it.
            grad_norm (array or float, optional): The norm of the unscaled gradients, as
                returned by ``clip_grad_norm``. Default: ``source.grad_norm``, if
                ``source`` is a ``LossScaleOptimizer`` with ``max_grad_norm``.
            step (int, optional): The step number. Default: the previous number plus 1.
        """
        scaler = scaler_of(source)
        if grad_norm is None:
            grad_norm = getattr(source, "grad_norm", None)
        for x in (grad_norm, loss):
            if isinstance(x, mx.array) and x.size != 1:
                raise ValueError(
                    "loss and grad_norm must be single numbers, got an array of shape "
                    f"{x.shape}."
                )
        self._step = self._step + 1 if step is None else int(step)
        applied = scaler.state["last_step_applied"]
        values = [scale_array(scaler), applied, grad_norm, loss]
        self._pending.append((self._step, values))
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Read pending steps from the device, and append them to the file, if any."""
        if not self._pending:
            return
        mx.eval([values for _, values in self._pending])
        new = []
        for step, values in self._pending:
            scale, applied, *numbers = values
            given = (None if x is None else float(x) for x in numbers)
            new.append(ScaleRecord(step, float(scale), bool(applied), *given))
        if self._path is not None:
            _append(self._path, new)
        self._pending.clear()
        self._records += new

    def __enter__(self) -> "ScaleHistory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.flush()
        except Exception:
            # Do not hide the run's own error, which its last arrays may raise again.
            if kind is None:
                raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ScaleHistory":
        """Read a history from a file.

        Args:
            path (str): The ``.csv`` file.

        Returns:
            ScaleHistory: The history. New records are not written to the file.

        Raises:
            ValueError: If the file is not a history.
        """
        history = cls()
        history._records = _load(_check_path(path))
        if history._records:
            history._step = history._records[-1].step
        return history

    @property
    def records(self) -> list[ScaleRecord]:
        """The steps that this object recorded or loaded. Reads pending steps first."""
        self.flush()
        return self._records

    @property
    def skipped(self) -> list[int]:
        """The step numbers of the skipped steps in :attr:`records`."""
        return [record.step for record in self.records if not record.applied]


def _check_path(path: str | os.PathLike[str]) -> Path:
    if Path(path).suffix != ".csv":
        raise ValueError(f"path must end in .csv, got {Path(path).name!r}.")
    return Path(path)


def _load(path: Path) -> list[ScaleRecord]:
    """Read a file; a record replaces earlier ones with the same or a later step."""
    with open(path, "rb", opener=open_file) as file:
        data = file.read()
    # Drop a last line that a crash cut off, unless it is the only line.
    text = data[: data.rfind(b"\n") + 1 or None].decode("utf-8", "replace")
    records: list[ScaleRecord] = []
    for i, line in enumerate(text.splitlines(), start=1):
        if line == _HEADER:
            continue
        try:
            record = _parse(line)
        except (ArithmeticError, ValueError):
            raise ValueError(
                f"{path} is not a history file (line {i} is {line[:100]!r}). Pass a "
                "file written by ScaleHistory or, for a new history, a new file name."
            ) from None
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return records


def _parse(line: str) -> ScaleRecord:
    step, scale, applied, *numbers = line.split(",")
    if len(numbers) != 2 or not 0 < float(scale) < math.inf:
        raise ValueError(line)
    given = (float(x) if x else None for x in numbers)
    return ScaleRecord(int(float(step)), float(scale), bool(int(applied)), *given)


def _append(path: Path, records: list[ScaleRecord]) -> None:
    """Append records to a file; a new file gets a header."""
    with open(path, "a+b") as file:
        size = file.tell()
        file.seek(max(size - _TAIL, 0))
        tail = file.read()
        end = size - len(tail) + tail.rfind(b"\n") + 1
        if end < size:
            # Remove a partial line that a crash or a full disk may have left. Never
            # remove more: another history may have appended whole lines.
            file.truncate(end)
        lines = [*([] if end else [_HEADER]), *map(_format, records)]
        file.write("".join(f"{line}\n" for line in lines).encode())


def _format(record: ScaleRecord) -> str:
    step, scale, applied, *numbers = astuple(record)
    cells = [step, scale, int(applied), *("" if x is None else x for x in numbers)]
    return ",".join(map(str, cells))
