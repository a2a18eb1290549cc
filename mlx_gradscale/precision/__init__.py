"""Differentiate a model in a compute dtype: the true loss, and true gradients."""

from .differentiation import (
    is_leaf,
    true_gradients,
    value_and_grad,
    with_scaled_gradient,
)

__all__ = ["is_leaf", "true_gradients", "value_and_grad", "with_scaled_gradient"]
