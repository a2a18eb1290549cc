"""Read the scale from a scaler, an optimizer or a number."""

import math
from typing import Any

import mlx.core as mx


def scaler_of(source: Any) -> Any:
    """Return ``source`` if it is a ``GradScaler``, or else its ``scaler``."""
    scaler = getattr(source, "scaler", source)
    state = getattr(scaler, "state", None)
    if not isinstance(state, dict) or "consecutive_skips" not in state:
        raise TypeError(
            f"Expected a GradScaler or a LossScaleOptimizer, got {source!r}."
        )
    return scaler


def scale_of(source: Any) -> float:
    """Return a loss scale as is, or read that of a scaler from the device."""
    if isinstance(source, mx.array):
        source = source.item()
    elif not isinstance(source, (int, float)):
        scaler = scaler_of(source)
        source = scaler.state["scale"].item() if scaler.is_enabled() else 1.0
    if not (math.isfinite(source) and source > 0):
        raise ValueError(f"The loss scale must be positive and finite, got {source}.")
    return float(source)
