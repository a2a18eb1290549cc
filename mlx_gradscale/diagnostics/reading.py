"""Read the state of whatever the user trains with."""

import math
from typing import Any

import mlx.core as mx


def scaler_of(source: Any) -> Any:
    """Return the ``GradScaler`` that ``source`` is, or has as its ``scaler``."""
    scaler = getattr(source, "scaler", source)
    state = getattr(scaler, "state", None)
    if not isinstance(state, dict) or "consecutive_skips" not in state:
        raise TypeError(
            f"Expected a GradScaler or a LossScaleOptimizer, got {source!r}."
        )
    return scaler


def scale_of(source: Any) -> float:
    """Return a loss scale, or that of a scaler; this reads from the device."""
    if isinstance(source, mx.array):
        source = source.item()
    elif not isinstance(source, (int, float)):
        scaler = scaler_of(source)
        source = scaler.state["scale"].item() if scaler.is_enabled() else 1.0
    if not (math.isfinite(source) and source > 0):
        raise ValueError(f"A loss scale is positive and finite, got {source}.")
    return float(source)
