"""Float16 with the wrapper trains as well as float32, and leaks nothing."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import Mlp, batch, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from tools.soak import soak

STEPS = 150


def train(dtype, optimizer, loss_scale=1.0, compute_dtype=None):
    """Return the last loss of a regression whose loss is ``loss_scale`` times smaller.

    A small loss has small gradients, which float16 cannot hold by itself.
    """
    mx.random.seed(0)
    model = Mlp(dtype=dtype)
    loss_fn = lambda x, y: mse(model)(x, y) * loss_scale  # noqa: E731
    if isinstance(optimizer, LossScaleOptimizer):
        loss_and_grad = optimizer.value_and_grad(model, loss_fn, compute_dtype)
    else:
        loss_and_grad = nn.value_and_grad(model, loss_fn)
    for step in range(STEPS):
        x, y = batch(step, n=64, dtype=dtype)
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        mx.eval(loss, model.state, optimizer.state)
    return loss.item() / loss_scale


@pytest.fixture(scope="module")
def expected():
    return train(mx.float32, optim.AdamW(3e-3, eps=1e-12), 1e-6)


@pytest.mark.parametrize("state_bits", [32, 16, 8])
def test_float16_with_the_wrapper_ends_near_float32(expected, state_bits):
    # It starts too high, so that it has to find its scale.
    optimizer = LossScaleOptimizer(
        optim.AdamW(3e-3, eps=1e-12), GradScaler(2.0**40), state_bits=state_bits
    )
    found = train(mx.float16, optimizer, 1e-6)
    assert expected < 0.3
    assert found == pytest.approx(expected, rel=0.1)
    assert optimizer.scaler.skipped_steps.item() > 0


def test_float32_parameters_computed_in_float16_end_near_float32(expected):
    optimizer = LossScaleOptimizer(optim.AdamW(3e-3, eps=1e-12), GradScaler(2.0**30))
    found = train(mx.float32, optimizer, 1e-6, mx.float16)
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.filterwarnings("ignore:Some parameters are float16, but no scale")
def test_master_weights_without_loss_scaling_lose_small_gradients(expected):
    found = train(mx.float16, MasterWeightOptimizer(optim.AdamW(3e-3, eps=1e-12)), 1e-6)
    assert found > 2 * expected


@pytest.mark.compiles
@pytest.mark.parametrize(("steps", "compiled"), [(1000, True), (300, False)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_long_training_leaks_no_memory_and_follows_the_scale_rule(steps, compiled):
    assert soak(steps, compiled, seed=1)
