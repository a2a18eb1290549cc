"""Find a scale on the first batch, so that a short run loses no steps to the search."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..compile_step import remember
from ..core.scaler import GradScaler

# 65536 / 2**24 is below 1: what still overflows there does so at every scale.
_HALVINGS = 24
# Later gradients may be four times as large as those of the first batch.
_HEADROOM = 4.0


def find_scale(
    scaler: GradScaler, is_finite: Callable[[], mx.array], state: Any
) -> float:
    """Lower the scale until the gradients of a batch are finite, with some headroom.

    If they are finite at no scale, the scale stays as it was.

    Args:
        scaler (GradScaler): Its scale is set.
        is_finite (Callable): Computes the gradients with the current scale and returns
            whether all of them are finite.
        state (Any): The tree or model that this changes; it is restored.

    Returns:
        float: The scale.
    """
    start = scale = scaler.get_scale()
    restore = remember(state)
    for _ in range(_HALVINGS):
        scaler.update(scale)
        finite = is_finite().item()
        restore()
        if finite:
            scaler.update(scale / _HEADROOM)
            return scaler.get_scale()
        scale /= 2
    scaler.update(start)
    return start
