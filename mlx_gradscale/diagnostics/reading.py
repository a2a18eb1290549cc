"""Read the loss scale from a scaler, an optimizer or a number."""

import math
from typing import Any

import mlx.core as mx


def scaler_of(source: Any, expected: str = "") -> Any:
    """Return the scaler of an optimizer, or ``source`` itself if it is a scaler."""
    scaler = getattr(source, "scaler", source)
    state = getattr(scaler, "state", None)
    if not isinstance(state, dict) or "consecutive_skips" not in state:
        expected += "a GradScaler or a LossScaleOptimizer"
        raise TypeError(f"Expected {expected}, got {source!r}.")
    return scaler


def scale_array(scaler: Any) -> mx.array:
    """Return the loss scale of a scaler as a lazy array; 1 if it is disabled."""
    return scaler.state["scale"] if scaler.is_enabled() else mx.array(1.0)


def scale_of(source: Any) -> float:
    """Read the loss scale from a number, a scaler or an optimizer."""
    if not isinstance(source, (int, float, mx.array)):
        source = scale_array(scaler_of(source, "a Python number, "))
    scale = float(source)
    if not 0 < scale < math.inf:
        raise ValueError(f"The loss scale must be positive and finite, got {scale}.")
    return scale
