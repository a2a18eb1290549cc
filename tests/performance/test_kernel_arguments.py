"""No fused kernel takes more buffers than Metal allows."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from support.graphs import most_buffers
from support.helpers import OPTIMIZERS, Mlp, batch, mse
from support.kernel_arguments import BOUND, counts, one_step

from mlx_gradscale import GradScaler


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_stays_below_the_bound(name):
    # Of ranks: test_distributed.py.
    found = counts(name)
    assert len(found) == 24
    for way, count in found.items():
        assert 10 < count <= 22 < BOUND, way


@pytest.mark.parametrize("compute_dtype", [None, mx.float16])
def test_so_does_a_whole_training_step(compute_dtype):
    model = Mlp(dtype=mx.float32 if compute_dtype else mx.float16)
    scaler, optimizer = GradScaler(), optim.AdamW(1e-2, bias_correction=True)
    loss_and_grad = scaler.value_and_grad(model, mse(model), compute_dtype)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]
    x, y = batch(dtype=mx.float32 if compute_dtype else mx.float16)

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        scaler.step(optimizer, model, grads)
        scaler.update()
        return loss

    mx.eval(state, x, y)
    before = tree_map(lambda x: x, [state, x, y])
    if compute_dtype is None:
        with pytest.warns(UserWarning, match="no float32 master"):
            loss = mx.compile(step, inputs=state, outputs=state)(x, y)
    else:
        loss = mx.compile(step, inputs=state, outputs=state)(x, y)
    assert most_buffers(before, [loss, state]) <= 22


class Moments(optim.Optimizer):
    """A user's own, with as many moments as one likes and two scalars for each."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.state["rates"] = [mx.array(0.1 * i) for i in range(count)]
        self.state["decays"] = [mx.array(1.0 - 0.05 * i) for i in range(count)]

    def init_single(self, parameter, state):
        state["moments"] = [mx.zeros_like(parameter) for _ in range(self.count)]

    def apply_single(self, gradient, parameter, state):
        for i, moment in enumerate(state["moments"]):
            gradient = self.state["decays"][i] * moment + gradient
            state["moments"][i] = gradient
        updates = zip(self.state["rates"], state["moments"], strict=True)
        return parameter - sum(rate * moment for rate, moment in updates)


@pytest.mark.parametrize("masters", ["float32", "remainder"])
@pytest.mark.parametrize("count", [4, 12])
def test_an_optimizer_of_many_moments_is_split_and_right(count, masters):
    before, after = one_step(lambda: Moments(count), mx.float16, masters=masters)
    # Together they are more than fit: weight, gradient, moments, scalars and new ones.
    assert (4 * count + 3 > BOUND) == (count == 12)
    assert 16 <= most_buffers(before, after) <= BOUND
    rates, decays = 0.1 * np.arange(count), 1.0 - 0.05 * np.arange(count)
    # All moments are the gradient in the first step: no decay yet.
    assert decays[0] == 1.0
    expected = np.full((4, 6), 1.0 - rates.sum() / 65536)
    np.testing.assert_allclose(np.array(after[0]["w"]), expected, rtol=1e-3)
    for moment in after[1]["optimizer"]["w"]["moments"]:
        np.testing.assert_array_equal(np.array(moment), np.full((4, 6), 2.0**-16))
