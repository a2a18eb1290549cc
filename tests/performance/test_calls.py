"""How often an eager step calls Python functions for each leaf of the model."""

import os
import sys
from inspect import CO_GENERATOR
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx.utils
import pytest
from support.optimizer_helpers import loop_of

import mlx_gradscale
from mlx_gradscale import grad_checkpoint

# Calls for each leaf of one gradient and of one step, and for each layer that is
# recomputed, which has four modules and four parameters.
GRADIENT, STEP, RECOMPUTATION = 6, 6, 56
COUNTED = (str(Path(mlx_gradscale.__file__).parent) + os.sep, mlx.utils.__file__)


class Leaves(nn.Module):
    """A model of nothing but parameters, two in each layer."""

    def __init__(self, count):
        super().__init__()
        self.layers = [nn.Linear(1, 1) for _ in range(count // 2)]

    def __call__(self, x):
        return x * self.layers[0].weight


def calls(function):
    """Count the calls of functions of the package and of MLX's trees."""
    count = 0

    def see(frame, event, _):
        nonlocal count
        code = frame.f_code
        # A generator would count each time that it resumes.
        if event == "call" and not code.co_flags & CO_GENERATOR:
            count += code.co_filename.startswith(COUNTED)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def calls_of(kind, count):
    """Return the calls of one gradient and of one step with so many leaves."""
    model, x = Leaves(count), mx.ones((1, 1))
    _, loss_and_grad, update = loop_of(
        kind, model, optim.AdamW(1e-3), loss_fn=lambda x: model(x).sum()
    )
    # State, traces and warnings of the first steps do not count.
    for _ in range(2):
        update(model, loss_and_grad(x)[1])
    _, grads = loss_and_grad(x)
    return calls(lambda: loss_and_grad(x)), calls(lambda: update(model, grads))


@pytest.mark.parametrize("kind", ["scaler", "wrapper"])
def test_eager_step_calls_few_functions_per_leaf(kind):
    few, many = calls_of(kind, 100), calls_of(kind, 200)
    per_leaf = [(b - a) / 100 for a, b in zip(few, many, strict=True)]
    assert per_leaf[0] <= GRADIENT, per_leaf
    assert per_leaf[1] <= STEP, per_leaf


def test_recomputation_calls_few_functions_per_layer():
    counts = []
    for n in (4, 8):
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
                for _ in range(n)
            )
        )
        loss_and_grad = nn.value_and_grad(model, lambda x, m=model: m(x).sum())
        x = mx.ones((1, 4))
        plain = calls(lambda f=loss_and_grad, x=x: f(x))
        grad_checkpoint(model)
        counts.append(calls(lambda f=loss_and_grad, x=x: f(x)) - plain)
    per_layer = (counts[1] - counts[0]) / 4
    assert per_layer <= RECOMPUTATION, per_layer
