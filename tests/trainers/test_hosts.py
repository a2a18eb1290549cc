"""Wrapped optimizers in loops that read and set their state, as other trainers do."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.helpers import Mlp, batch, bits, each_mode, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer

HALF = mx.float16


def loop(model, optimizer, gradient, steps):
    for i in range(steps):
        loss, grads = gradient(*batch(i, dtype=HALF))
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters(), optimizer.state)
    return loss.item()


def make(scale=1024.0):
    mx.random.seed(0)
    model = Mlp(dtype=HALF)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(scale))
    return model, optimizer, optimizer.value_and_grad(model, mse(model))


@each_mode
def test_rate_and_step_set_in_the_state_take_effect(compiled):
    model, optimizer, gradient = make()
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = gradient(x, y)
        optimizer.update(model, grads)
        return loss

    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    run(*batch(0, dtype=HALF))
    optimizer.state["learning_rate"] = mx.array(0.0)
    optimizer.state["step"] = mx.array(7, mx.uint64)
    mx.eval(state)
    before = bits(model.parameters())
    run(*batch(1, dtype=HALF))
    assert bits(model.parameters()) == before
    assert optimizer.step.item() == 8


def test_host_that_replaces_nan_gradients_by_zero_never_breaks_the_weights():
    model, optimizer, gradient = make(2.0**40)
    start = mse(model)(*batch(0, dtype=HALF)).item()

    def gradient_without_nan(x, y):
        loss, grads = gradient(x, y)
        return loss, tree_map(lambda g: mx.nan_to_num(g, 0.0, 0.0, 0.0), grads)

    assert loop(model, optimizer, gradient_without_nan, 10) < 2 * start


@pytest.mark.compiles
@pytest.mark.parametrize("follows", [True, False], ids=["both states", "the model's"])
def test_gradient_function_compiled_over_some_state_breaks_no_weight(follows):
    model, optimizer, gradient = make(2.0**40)
    before, start = bits(model.parameters()), mse(model)(*batch(0, dtype=HALF)).item()
    state = [model.state, optimizer.state] if follows else model.state
    compiled = mx.compile(gradient, inputs=state, outputs=state)
    loss = loop(model, optimizer, compiled, 60 if follows else 20)
    if follows:
        assert optimizer.scaler.get_scale() < 2.0**20
        assert loss < 0.05 * start
    else:  # with the first scale, which overflows
        assert optimizer.scaler.skipped_steps.item() == 20
        assert bits(model.parameters()) == before
