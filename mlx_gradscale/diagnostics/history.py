"""What happened at each step, read from the device once for many of them."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .alarm import alarm_of
from .reading import scaler_of
from .records import RecordFile, ScaleRecord, read_records, write_records


class ScaleHistory:
    """The loss scale, skipped steps, gradient norm and loss of a run.

    :meth:`record` only keeps the lazy arrays; every so many steps they are read
    from the device together, as one array. A loop that evaluates its own arrays
    (``mx.eval``) as usual never waits for this. At the end of a ``with`` block, or by
    :meth:`flush`, the last of them are read as well.

    Args:
        path (str, optional): A ``.csv`` or ``.jsonl`` file to add to whenever the
            records are read from the device. If it is there already, the run goes
            on in it, with the number after its last step. Give :meth:`record` an
            earlier ``step`` to go on from there: when the file is loaded, the records
            from that step on are those of the new run. One process at a time can
            write to it, and in a process the newest history. Default: ``None``.
        every (int): How many steps to read at a time. Default: ``50``.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import ScaleHistory
        >>> scaler, history = GradScaler(init_scale=8.0), ScaleHistory()
        >>> for loss in (0.5, 0.25):
        ...     history.record(scaler, loss=mx.array(loss))
        >>> len(history), history[-1].scale, history[-1].loss
        (2, 8.0, 0.25)
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, every: int = 50):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive integer, got {every!r}.")
        self._every = every
        self._records: list[ScaleRecord] = []
        self._pending: list[tuple[int, list[Any]]] = []
        self._step = 0
        self._streak = 0
        self._source: Any = None
        self._file = None if path is None else RecordFile(Path(path))
        if self._file is not None:
            self._step = self._file.last_step()

    def record(
        self,
        source: Any,
        *,
        loss: mx.array | float | None = None,
        grad_norm: mx.array | float | None = None,
        grads: Any = None,
        step: int | None = None,
    ) -> None:
        """Note one step, after the scaler's ``update()``, without reading anything.

        Args:
            source (GradScaler or LossScaleOptimizer): What has just stepped. The
                scale noted is that after the step.
            loss (array, optional): The true loss. Evaluate it with the step, as in
                ``mx.eval(loss, model.state, ...)``, or what it is computed from stays
                in memory until it is read here.
            grad_norm (array, optional): The norm of the true gradients, as
                ``clip_grad_norm`` returns it. A
                ``LossScaleOptimizer`` with ``max_grad_norm`` brings it itself.
            grads (Any, optional): The gradients, scaled or not. They are looked at
                only if too many steps were skipped, and not kept; no norm is computed
                from them.
            step (int, optional): The number of the step. Default: one more than
                the last, which may be in the file already.
        """
        scaler = scaler_of(source)
        if grad_norm is None:
            grad_norm = getattr(source, "grad_norm", None)
        for x in (grad_norm, loss):
            if isinstance(x, mx.array) and x.size != 1:
                raise ValueError(f"Expected one number per step, got shape {x.shape}.")
        self._source = scaler
        self._step = self._step + 1 if step is None else step
        state = scaler.state
        values = [state["scale"], state["last_step_applied"], grad_norm, loss]
        self._pending.append((self._step, values))
        if len(self._pending) >= self._every:
            self.flush(grads)

    def flush(self, grads: Any = None) -> None:
        """Read what was noted since the last time, in one transfer.

        This is also where too many skipped steps in a row are seen; see
        :class:`SkipAlarm`.

        Args:
            grads (Any, optional): The latest gradients, for the alarm's table.
        """
        if not self._pending:
            return
        new = list(_read(self._pending))
        if self._file is not None:
            self._file.append(new)
        self._pending.clear()
        self._records += new
        self._look_at(new, grads)

    def _look_at(self, new: list[ScaleRecord], grads: Any) -> None:
        longest = 0
        for record in new:
            self._streak = 0 if record.applied else self._streak + 1
            longest = max(longest, self._streak)
        alarm = alarm_of(self._source)
        if alarm is not None:
            alarm.check(longest, new[-1].scale, grads)

    def __enter__(self) -> "ScaleHistory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.flush()
        except Exception:
            # A run that failed says so itself; its last arrays may be what failed.
            if kind is None:
                raise

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all records to one ``.csv`` or ``.jsonl`` file, atomically."""
        write_records(Path(path), self.records)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ScaleHistory":
        """Read what :meth:`save`, or a history with a ``path``, wrote.

        Returns:
            ScaleHistory: With these records, and no file of its own.
        """
        history = cls()
        history._records = read_records(Path(path))
        if history._records:
            history._step = history._records[-1].step
        return history

    @property
    def records(self) -> list[ScaleRecord]:
        """All records so far; reads from the device what was not read yet."""
        self.flush()
        return self._records

    @property
    def skipped(self) -> list[int]:
        """The steps that were skipped."""
        return [record.step for record in self.records if not record.applied]

    def __len__(self) -> int:
        return len(self._records) + len(self._pending)

    def __iter__(self) -> Iterator[ScaleRecord]:
        return iter(self.records)

    def __getitem__(self, index: int) -> ScaleRecord:
        return self.records[index]


def _read(pending: list[tuple[int, list[Any]]]) -> Iterable[ScaleRecord]:
    lazy = [x for _, values in pending for x in values if isinstance(x, mx.array)]
    floats = [x.reshape(()).astype(mx.float32) for x in lazy]
    known = iter(np.array(mx.stack(floats)))

    def number(x: Any) -> Any:
        if isinstance(x, mx.array):
            # 0.1, not 0.10000000149011612: the shortest that is this float32.
            return float(str(next(known)))
        return None if x is None else float(x)

    for step, values in pending:
        scale, applied, grad_norm, loss = map(number, values)
        yield ScaleRecord(step, scale, bool(applied), grad_norm, loss)
