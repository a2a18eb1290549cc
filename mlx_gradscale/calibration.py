"""Find a loss scale before the first step, on one batch or from an earlier run."""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from . import precision
from .diagnostics.history import ScaleHistory
from .finite import all_finite
from .precision.buffers import places
from .state_tree import at_once, writing

if TYPE_CHECKING:
    from .scaler import GradScaler

# Powers of two: above, a float32 loss needs no scale, and below none helps.
_LARGEST, _SMALLEST = 24, -24


def calibrate(
    self: "GradScaler",
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *batch: Any,
    compute_dtype: mx.Dtype | None = None,
    headroom: int = 1,
    group: mx.distributed.Group | None = None,
) -> float:
    """Set the scale to the largest that does not overflow on one batch.

    Without it a run finds its scale by skipping steps. Model, optimizer and random
    state stay as they are. It takes about seven forward and backward passes, and waits
    for each of them: call it before training, not in a step.

    Args:
        model (nn.Module): The model.
        loss_fn (Callable): As for :meth:`value_and_grad`.
        *batch (Any): The arguments of ``loss_fn``.
        compute_dtype (Dtype, optional): As for :meth:`value_and_grad`.
        headroom (int): How many powers of two to stay below, because other batches
            have larger gradients. Default: ``1``.
        group (mx.distributed.Group, optional): The ranks that train together, which
            all must call this, each with its own batch. Default: the scaler's, else
            all.

    Returns:
        float: The scale, the smallest that a rank found.

    Raises:
        ValueError: The loss itself is not finite, or no scale is small enough.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import GradScaler
        >>> model, scaler = nn.Linear(4, 1), GradScaler()
        >>> def loss_fn(x):
        ...     return model(x).astype(mx.float32).sum()
        >>> scaler.calibrate(model, loss_fn, mx.full((2, 4), 3.0),
        ...                  compute_dtype=mx.float16)
        4096.0
    """
    if not self.is_enabled():
        return 1.0
    scale, problem = 0.0, None
    try:
        scale = _largest(model, loss_fn, batch, compute_dtype) * 2.0**-headroom
    except ValueError as error:
        problem = error
    # Not only the scaler's own group: a LossScaleOptimizer around it has another.
    group = group or self.group or mx.distributed.init()
    if group.size() > 1:
        # A rank that raised alone would leave the others waiting.
        scale = float(mx.distributed.all_min(mx.array(scale), group=group))
    if problem is not None:
        raise problem
    if scale == 0.0:
        raise ValueError("calibrate() failed on another rank.")
    self.update(scale)
    return self.get_scale()


def warm_start(
    self: "GradScaler", history: ScaleHistory | str | os.PathLike[str]
) -> float:
    """Set the scale to that of an earlier run, at its end.

    Args:
        history (ScaleHistory or str): The run, or the file it was saved in.

    Returns:
        float: The scale.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import ScaleHistory
        >>> history = ScaleHistory()
        >>> history.record(GradScaler(512.0))
        >>> GradScaler().warm_start(history)
        512.0
    """
    if not isinstance(history, ScaleHistory):
        history = ScaleHistory.load(history)
    if not len(history):
        raise ValueError("The history is empty: calibrate() finds a scale without one.")
    self.update(history[-1].scale)
    return self.get_scale()


def _largest(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: tuple[Any, ...],
    compute_dtype: mx.Dtype | None,
) -> float:
    scale = mx.array(1.0)
    scaled = precision.with_scaled_gradient(loss_fn, lambda: scale)
    differentiate = precision.value_and_grad(model, scaled, compute_dtype)
    before = list(places(model).values())
    random_state: Any = mx.random.state
    first, second = random_state[0].tolist()

    def fits(power: int) -> bool:
        nonlocal scale
        scale = mx.array(2.0**power)
        # A key is its seed in two halves.
        seed = partial(mx.random.seed, first << 32 | second)
        put_back = at_once([writing(before), seed])
        try:
            value, gradients = differentiate(*batch)
            loss = value[0] if isinstance(value, tuple) else value
            if not mx.isfinite(loss).all().item():
                raise ValueError(
                    "The loss of this batch is not finite, which no scale cures. See "
                    "mlx_gradscale.diagnostics.explain_overflow for where it begins."
                )
            return bool(all_finite(gradients).item())
        finally:
            put_back()

    # What overflows at one scale does so at every larger one.
    low, high = _SMALLEST, _LARGEST
    if not fits(low):
        raise ValueError(
            "The gradients of this batch are not finite at any scale. See "
            "mlx_gradscale.diagnostics.explain_overflow for where they begin."
        )
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return 2.0**low
