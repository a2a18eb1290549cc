"""A training callback that adds the loss scale to mlx-lm's reports."""

from typing import Any

import mlx.core as mx

from ..files.text import power
from .reading import scale_array, scaler_of


class LossScaleCallback:
    """Add the loss scale, skipped steps and gradient norm to mlx-lm's reports.

    Each training report gets the keys ``loss_scale``, ``skipped_steps``,
    ``consecutive_skips`` and, for an optimizer with ``max_grad_norm``, ``grad_norm``.
    Rank 0 prints a one-line summary, and every rank passes the report on to
    ``wrapped_callback``. The values are read from the device once per report.

    This class has the methods of ``mlx_lm.tuner.callbacks.TrainingCallback`` but does
    not derive from it, so you can import it without mlx-lm.

    Args:
        optimizer (LossScaleOptimizer or GradScaler): The optimizer or scaler in use.
        wrapped_callback (TrainingCallback, optional): A callback that receives every
            report, such as mlx-lm's ``WandBCallback`` or ``SwanLabCallback``.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import LossScaleCallback
        >>> callback = LossScaleCallback(GradScaler())
        >>> callback.on_train_loss_report({"iteration": 10, "train_loss": 2.5})
        Iter 10: scale 2^16, skipped 0
    """

    def __init__(self, optimizer: Any, wrapped_callback: Any = None):
        self._scaler = scaler_of(optimizer)
        self._optimizer = optimizer
        self.wrapped_callback = wrapped_callback
        self._skipped_before = 0

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Extend a report, print a summary on rank 0, and pass the report on."""
        state, norm = self._scaler.state, getattr(self._optimizer, "grad_norm", None)
        lazy = {"loss_scale": scale_array(self._scaler)}
        lazy |= {name: state[name] for name in ("skipped_steps", "consecutive_skips")}
        lazy |= {} if norm is None else {"grad_norm": norm}
        mx.eval(lazy)
        found: dict[str, Any] = {name: x.item() for name, x in lazy.items()}
        scale, skipped = found["loss_scale"], found["skipped_steps"]
        new = skipped - self._skipped_before
        self._skipped_before = skipped
        parts = [f"scale {power(scale)}"] if scale != 1 else []
        parts.append(f"skipped {skipped}" + (f" ({new} new)" if new else ""))
        if norm is not None:
            parts.append(f"grad norm {found['grad_norm']:.3g}")
        # mlx-lm calls this on every rank, but prints only on rank 0.
        if mx.distributed.init().rank() == 0:
            print(f"Iter {train_info.get('iteration', '?')}: {', '.join(parts)}")
        if self.wrapped_callback is not None:
            self.wrapped_callback.on_train_loss_report(train_info | found)

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Pass on a validation report unchanged."""
        if self.wrapped_callback is not None:
            self.wrapped_callback.on_val_loss_report(val_info)
