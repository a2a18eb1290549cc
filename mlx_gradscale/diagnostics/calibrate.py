"""Find a loss scale on one batch, before the first step."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.forward import Casting
from ..float32.trial import Trial, preserved
from .reading import scaler_of

_ADVICE = (
    " at any loss scale. To find the cause, call "
    "mlx_gradscale.diagnostics.explain_overflow()."
)


class NoScaleFits(ValueError):
    """Raised by :func:`calibrate` if a batch overflows at every loss scale."""


def calibrate(
    source: Any,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *batch: Any,
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
    headroom: int = 1,
    group: mx.distributed.Group | None = None,
    **named: Any,
) -> float:
    """Find a loss scale on one batch, and set the scaler to this scale.

    The scale is the largest power of two, up to 2**24, at which no gradient overflows,
    divided by ``2**headroom``. Without calibration, a run may skip its first steps to
    find a scale. The model, the optimizer and the random state do not change. This
    function runs the batch about six times, so call it before training.

    Args:
        source (GradScaler or LossScaleOptimizer): The scaler or its optimizer.
        model (nn.Module): The model.
        loss_fn (Callable): Same as in ``value_and_grad``.
        *batch (Any): The arguments of ``loss_fn``.
        compute_dtype (Dtype, optional): Same as in ``value_and_grad``.
        keep (Callable, optional): Same as in ``value_and_grad``.
        cast_inputs (bool): Same as in ``value_and_grad``.
        headroom (int): How many times the gradients can double before they overflow.
            Default: ``1``.
        group (mx.distributed.Group, optional): The ranks that train together. Each must
            call this function with its own batch. Default: all ranks.
        **named (Any): Keyword arguments of ``loss_fn``.

    Returns:
        float: The new scale: the smallest found by any rank, within the scaler's
        limits. ``1.0`` if the scaler is disabled.

    Raises:
        ValueError: If the loss itself is non-finite, if the gradients are non-finite at
            every scale, or if this function failed on another rank.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import calibrate
        >>> model, scaler = nn.Linear(4, 1), GradScaler()
        >>> def loss_fn(x):
        ...     return model(x).astype(mx.float32).sum()
        >>> calibrate(scaler, model, loss_fn, mx.full((2, 4), 3.0),
        ...           compute_dtype=mx.float16)
        4096.0
    """
    scaler = scaler_of(source)
    if not scaler.is_enabled():
        return 1.0
    trial = Trial(
        model, loss_fn, batch, named, Casting(compute_dtype, keep, cast_inputs)
    )
    scale, problem = 0.0, None
    try:
        scale = _largest_scale(trial) * 2.0**-headroom
    except ValueError as error:
        problem = error
    group = mx.distributed.init() if group is None else group
    if group.size() > 1:
        # Raise only after this: if a single rank raised, the others would wait for it.
        scale = float(mx.distributed.all_min(mx.array(scale), group=group))
    if scale == 0.0:
        text = "calibrate() failed on another rank. See the error on that rank."
        raise problem or NoScaleFits(text)
    scaler.update(scale)
    return float(scaler.get_scale())  # within the scaler's limits


def _largest_scale(trial: Trial) -> float:
    with preserved(trial.model):
        loss = float(trial.differentiate()[0])
        if not math.isfinite(loss):
            raise NoScaleFits(f"The loss on this batch is {loss}{_ADVICE}")
    scale = trial.largest_scale()
    if scale is None:
        raise NoScaleFits(f"The gradients on this batch are non-finite{_ADVICE}")
    return scale
