"""What the tests of ``GradScaler`` share."""

import warnings
from contextlib import contextmanager

import mlx.core as mx
from mlx.utils import tree_map

from mlx_gradscale import GradScaler


@contextmanager
def every_warning():
    """Record all warnings, also those that repeat."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def used(scaler=None):
    """A scaler that has scaled a loss, so that step() is allowed."""
    scaler = scaler or GradScaler()
    scaler.scale(mx.array(1.0))
    return scaler


def apply(scaler, optimizer, value, weights=None):
    weights = weights or {"w": mx.array([1.0])}
    gradients = {"w": scaler.scale(mx.array([value]))}
    return scaler.apply_gradients(optimizer, gradients, weights)


def guarded_apply(optimizer, gradients, weights, ok=True):
    """One step behind a scaler that scales nothing, skipped unless ``ok``."""
    scaler = GradScaler(1.0, dynamic=False)
    if not ok:
        gradients = tree_map(lambda g: g * float("nan"), gradients)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some parameters are float16")
        return scaler.apply_gradients(optimizer, gradients, weights)
