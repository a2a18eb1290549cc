"""The warnings of a scaler: their texts, when to show them, and at which line."""

import sys
import warnings
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .masters import HALF
from .trees import dtype_name, is_floating, leaves, read

# Packages whose frames may come between the user's line and a warning.
_BETWEEN = ("mlx_gradscale.", "mlx.", "functools.", "contextlib.")
# A run that skips this many steps in a row is not training.
_MANY = 50
# At this scale a gradient of 1e-3 is the smallest that float16 can represent.
LOW_SCALE = 2.0**-14

_TEXTS = {
    "float16 loss": "The loss is float16, so the backward pass overflows and steps are "
    "skipped while the scale is above 65504. Compute the loss in float32, for example "
    "from logits.astype(mx.float32).",
    "float32 inputs": "{model} has {dtype} parameters, but the first array argument is "
    "float32, so MLX may compute in float32. Cast the inputs, or pass "
    "compute_dtype=mx.{dtype}. To see the dtype of each layer, call mlx_gradscale."
    "diagnostics.compute_dtypes().",
    "unscaled float16": "Some parameters are float16, but no scale has entered their "
    "gradients, so small ones are zero. Use LossScaleOptimizer, and get the gradients "
    "from value_and_grad() or scale_loss().",
    "no master weights": "Some parameters are float16 or bfloat16 and have no master "
    "weights, so small updates are lost. Use LossScaleOptimizer, or keep the "
    "parameters in float32 and pass compute_dtype= to value_and_grad().",
    "no step": "The weights changed {many} times without a step of this scaler, so a "
    "gradient that overflows writes NaN into them. Instead of optimizer.update(), call "
    "scaler.step() and scaler.update(), or use a LossScaleOptimizer.",
    "stuck": "{what}, so the model is hardly training. To find the cause, call "
    "mlx_gradscale.diagnostics.explain_overflow(model, loss_fn, *batch), with the same "
    "compute_dtype as in training. Filter out batches whose loss is inf or NaN; a "
    "smaller scale does not help there. GradScaler(min_scale=1.0) keeps the scale from "
    "falling far, and scaler.update(65536.0) resets it.",
}


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, pointing to the nearest caller outside this package and MLX."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


class WarnOnce:
    """Show each of the texts above at most once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, key: str, **values: Any) -> None:
        """Warn at the user's line unless this warning has been shown."""
        if key not in self._shown:
            self._shown.add(key)
            warn_user(_TEXTS[key].format(many=_MANY, **values))


class SkipWatch:
    """Warn about 50 skipped steps in a row, or about a very small scale.

    The watch reads only values that are at least 50 updates old. MLX has normally
    evaluated them by then, so nothing waits for the device.
    """

    def __init__(self) -> None:
        self._earlier: list[mx.array] = []
        self._latest: list[mx.array] = []

    def look(self, state: dict[str, mx.array], warn_once: WarnOnce) -> None:
        """Record the skip counter and, every 50 updates, check earlier values."""
        self._latest.append(state["consecutive_skips"])
        if len(self._latest) < _MANY:
            return
        earlier, self._earlier = self._earlier, [*self._latest, state["scale"]]
        self._latest = []
        values = [read(x) for x in earlier]
        if not values or None in values:  # the first look, or tracers from mx.compile
            return
        *counts, scale = values
        if max(counts) >= _MANY:
            warn_once(
                "stuck",
                what=f"At least {_MANY} steps in a row were skipped because of "
                "non-finite gradients",
            )
        elif scale < LOW_SCALE:
            warn_once(
                "stuck",
                what=f"At a loss scale of {scale:.2g}, gradients below "
                f"{2.0**-25 / scale:.1g} underflow to zero in float16",
            )


class UpdateWatch:
    """Warn about updates of the weights that bypass the scaler.

    After such an update, the weights are new arrays, but the scale is still the same
    one. A step of the scaler replaces it, even by the same value.
    """

    def __init__(self) -> None:
        self._scale: mx.array | None = None
        self._weight_id = 0
        self._n_updates = 0

    def look(
        self, scale: mx.array, weights: list[mx.array], warn_once: WarnOnce
    ) -> None:
        """Compare the scale, and the id of one weight, with those of the last call."""
        weight_id = id(weights[0]) if weights else 0
        is_updated = weight_id != self._weight_id
        self._n_updates = self._n_updates + is_updated if scale is self._scale else 0
        self._scale, self._weight_id = scale, weight_id
        if self._n_updates == _MANY:
            warn_once("no step")


def check_loss(
    loss: mx.array, scale: mx.array, is_dynamic: bool, warn_once: WarnOnce
) -> None:
    """Warn if the loss is float16 and the scale does not fit into float16."""
    value = read(scale) if loss.dtype == mx.float16 else 0.0
    # Inside mx.compile, nothing is known but that the scale may grow.
    is_too_large = is_dynamic if value is None else value > 65504
    if is_too_large:
        warn_once("float16 loss")


def check_dtypes(model: nn.Module, args: tuple[Any, ...], warn_once: WarnOnce) -> None:
    """Warn if float32 inputs make MLX compute in float32."""
    first = next((x for x in args if isinstance(x, mx.array)), None)
    floating = [x for x in leaves(model.parameters()) if is_floating(x)]
    is_half = floating and all(x.dtype in HALF for x in floating)
    if is_half and first is not None and first.dtype == mx.float32:
        name = type(model).__name__
        warn_once("float32 inputs", model=name, dtype=dtype_name(floating[0]))
