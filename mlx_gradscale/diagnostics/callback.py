"""A training callback for mlx-lm that adds what the scaler does to its reports."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..files.text import power
from .alarm import alarm_of
from .reading import scaler_of


class LossScaleCallback:
    """Add loss scale, skipped steps and gradient norm to mlx-lm's reports.

    Each training report gets the keys ``loss_scale``, ``skipped_steps``,
    ``consecutive_skips`` and, where the optimizer knows it, ``grad_norm``; it is
    drawn as one line, on the first of the ranks alone, and handed on to another
    callback. The numbers are read from the device once per report. Too many skipped
    steps in a row set off the scaler's :class:`SkipAlarm`.

    It has the methods of ``mlx_lm.tuner.callbacks.TrainingCallback``, which is all
    that mlx-lm asks for, and does not import mlx-lm.

    Args:
        optimizer (LossScaleOptimizer or GradScaler): What trains.
        wrapped_callback (TrainingCallback, optional): Gets each report as well,
            with the keys added: mlx-lm's ``WandBCallback``, ``SwanLabCallback`` or
            your own.
        write (Callable, optional): Is given each line; None draws nothing.
            Default: ``print``.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import LossScaleCallback
        >>> callback = LossScaleCallback(GradScaler())
        >>> callback.on_train_loss_report({"iteration": 10, "train_loss": 2.5})
        Iter 10: loss 2.500, scale 2^16, skipped 0
    """

    def __init__(
        self,
        optimizer: Any,
        wrapped_callback: Any = None,
        write: Callable[[str], Any] | None = print,
    ):
        scaler_of(optimizer)
        self._optimizer = optimizer
        self.wrapped_callback = wrapped_callback
        self._write = write
        self._skipped_before = 0

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Add to a training report, draw it and hand it on."""
        added = self._read()
        report = train_info | added
        # As mlx-lm, which calls this on every rank and prints on the first alone.
        if self._write is not None and mx.distributed.init().rank() == 0:
            self._write(self._line(report))
        if self.wrapped_callback is not None:
            self.wrapped_callback.on_train_loss_report(report)
        self._skipped_before = added["skipped_steps"]
        alarm = alarm_of(self._optimizer)
        if alarm is not None:
            alarm.check(added["consecutive_skips"], added["loss_scale"])

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Hand a validation report on as it is."""
        if self.wrapped_callback is not None:
            self.wrapped_callback.on_val_loss_report(val_info)

    def _read(self) -> dict[str, Any]:
        state = scaler_of(self._optimizer).state
        lazy = [state[k] for k in ("scale", "skipped_steps", "consecutive_skips")]
        norm = getattr(self._optimizer, "grad_norm", None)
        if norm is not None:
            lazy.append(mx.array(norm))
        # The counts as bits, or float32 would round those above 2**24.
        numbers = np.array(mx.stack([_bits(x) for x in lazy]))
        scale, skipped, consecutive, *norms = numbers
        report = {
            "loss_scale": float(scale.view(np.float32)),
            "skipped_steps": int(skipped),
            "consecutive_skips": int(consecutive),
        }
        if norms:
            report["grad_norm"] = float(norms[0].view(np.float32))
        return report

    def _line(self, report: dict[str, Any]) -> str:
        new = report["skipped_steps"] - self._skipped_before
        parts = [
            f"loss {report['train_loss']:.3f}" if "train_loss" in report else "",
            f"scale {power(report['loss_scale'])}",
            f"skipped {report['skipped_steps']}" + (f" ({new} new)" if new else ""),
            f"grad norm {report['grad_norm']:.3g}" if "grad_norm" in report else "",
        ]
        return f"Iter {report.get('iteration', '?')}: " + ", ".join(filter(None, parts))


def _bits(x: mx.array) -> mx.array:
    if mx.issubdtype(x.dtype, mx.floating):
        return x.reshape(()).astype(mx.float32).view(mx.uint32)
    return x.astype(mx.uint32)
