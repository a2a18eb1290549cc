"""What the tests of ``GradScaler`` share."""

import mlx.core as mx

from mlx_gradscale import GradScaler


def used(scaler=None):
    """A scaler that has scaled a loss, so that step() is allowed."""
    scaler = scaler or GradScaler()
    scaler.scale(mx.array(1.0))
    return scaler


def apply(scaler, optimizer, value, weights=None):
    weights = weights or {"w": mx.array([1.0])}
    gradients = {"w": scaler.scale(mx.array([value]))}
    return scaler.apply_gradients(optimizer, gradients, weights)
