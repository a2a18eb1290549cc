"""Read scales off whatever the user trains with."""

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
    """Return the loss scale that ``source`` is or has; this reads the device."""
    if isinstance(source, mx.array):
        source = source.item()
    elif not isinstance(source, (int, float)):
        scaler = scaler_of(source)
        source = scaler.state["scale"].item() if scaler.is_enabled() else 1.0
    if not (math.isfinite(source) and source > 0):
        raise ValueError(f"A loss scale is positive and finite, got {source}.")
    return float(source)


def power(value: float) -> str:
    """Write a number as people read loss scales: ``2^16``, else in four digits.

    >>> power(65536.0), power(0.5), power(1000.0)
    ('2^16', '2^-1', '1000')
    """
    if not math.isfinite(value) or value <= 0:
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:.4g}"


def percent(share: float) -> str:
    """Write a share so that only a true zero reads as zero.

    >>> percent(0.0), percent(1e-7), percent(0.5)
    ('0', '<0.01%', '50.00%')
    """
    if share == 0:
        return "0"
    return "<0.01%" if share < 1e-4 else f"{share:.2%}"
