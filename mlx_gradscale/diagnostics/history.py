"""Record the history of a run in memory and in a CSV file."""

import csv
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..files.disk import open_file
from .reading import scale_array, scaler_of


class ScaleRecord(NamedTuple):
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


class ScaleHistory:
    """The loss scale, skipped steps, gradient norm and loss of a run.

    :meth:`record` only stores lazy arrays, which the history reads from the device once
    every ``every`` steps. If the loop evaluates its arrays in each step, reading them
    does not wait. :meth:`flush`, or the end of a ``with`` block, reads the last arrays.

    Args:
        path (str, optional): A ``.csv`` file to append to. If it exists, numbering
            continues after its last step, but only :meth:`load` returns its records. To
            resume from an earlier step, pass ``step`` to :meth:`record`; :meth:`load`
            then drops the older records from there on. Default: ``None``.
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
        self._pending: list[list[Any]] = []
        self._step = 0
        if self._path is not None:
            if self._path.exists():
                self._step = ScaleHistory.load(self._path)._step
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
        self._step = self._step + 1 if step is None else int(step)
        applied = scaler.state["last_step_applied"]
        self._pending.append(
            [self._step, scale_array(scaler), applied, grad_norm, loss]
        )
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Read pending steps from the device, and append them to the file, if any."""
        mx.eval(self._pending)
        new = [_read(*values) for values in self._pending]
        if self._path is not None and new:
            _append(self._path, new)
        self._pending.clear()
        self._records += new

    def __enter__(self) -> "ScaleHistory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Do not hide the run's own error, which its last arrays may raise again.
        with suppress(Exception) if kind else nullcontext():
            self.flush()

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
        with open(_check_path(path), newline="", opener=open_file) as file:
            try:
                header, *rows = csv.reader(file)
                if tuple(header) != ScaleRecord._fields:
                    raise ValueError(header)
                records = [_read(*(x or None for x in row)) for row in rows]
            except (TypeError, ValueError, csv.Error) as error:
                raise ValueError(
                    f"{path} is not a history file. Pass a file written by "
                    "ScaleHistory or, for a new history, a new file name."
                ) from error
        for record in records:
            while history._records and history._records[-1].step >= record.step:
                history._records.pop()
            history._records.append(record)
            history._step = record.step
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


def _read(step: Any, scale: Any, applied: Any, *numbers: Any) -> ScaleRecord:
    """Convert the text or the arrays of a step; raise if that is impossible."""
    grad_norm, loss = (None if x is None else float(x) for x in numbers)
    return ScaleRecord(int(step), float(scale), bool(int(applied)), grad_norm, loss)


def _append(path: Path, records: list[ScaleRecord]) -> None:
    """Append whole lines to a file; a new file gets a header."""
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(ScaleRecord._fields)
        for step, scale, applied, *numbers in records:
            writer.writerow([step, scale, int(applied), *numbers])  # None becomes ""
