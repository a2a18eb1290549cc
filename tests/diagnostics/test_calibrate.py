"""calibrate() finds a scale before the first step."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import Mlp, batch, bits, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import calibrate


@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e3, 1e6])
def test_calibrated_scale_is_the_largest_that_fits_with_headroom(weight):
    model, data = Mlp(dtype=mx.float16), batch(dtype=mx.float16)

    def loss_fn(x, y):
        return weight * mse(model)(x, y)

    optimizer = LossScaleOptimizer(optim.SGD(0.0), GradScaler(2.0**20))
    scale = calibrate(optimizer, model, loss_fn, *data)
    assert optimizer.scaler.get_scale() == scale
    loss_and_grad = optimizer.value_and_grad(model, loss_fn)

    def applied(scale):
        optimizer.scaler.update(scale)
        optimizer.update(model, loss_and_grad(*data)[1])
        return optimizer.scaler.last_step_applied.item()

    assert applied(scale)
    assert applied(2 * scale)  # the headroom
    assert not applied(4 * scale) or scale == 2.0**23


def test_calibrate_does_not_change_the_model_or_the_random_state():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm(16), nn.Dropout(0.5))
    model.set_dtype(mx.float16)
    before, key = bits(model.parameters()), mx.random.state[0].tolist()
    scaler = GradScaler()
    calibrate(scaler, model, mse(model), *batch(dtype=mx.float16), headroom=3)
    assert bits(model.parameters()) == before
    assert mx.random.state[0].tolist() == key
    assert scaler.skipped_steps.item() == 0
    # Both modes of the scaler are still available.
    scaler.scale(mx.array(1.0))


def test_calibrate_raises_if_a_batch_overflows_at_every_scale():
    model, (x, y) = Mlp(dtype=mx.float16), batch(dtype=mx.float16)
    scaler = GradScaler(8.0)
    with pytest.raises(ValueError, match="loss on this batch is nan at any loss scale"):
        calibrate(scaler, model, mse(model), x * float("nan"), y)
    with pytest.raises(ValueError, match="gradients on this batch are non-finite at"):
        calibrate(scaler, model, lambda x: mx.sqrt(model(x).sum() * 0), x)
    assert scaler.get_scale() == 8.0


def test_calibrated_scale_is_within_the_limits_of_the_scaler_and_one_if_disabled():
    model, data = Mlp(dtype=mx.float16), batch(dtype=mx.float16)
    scaler = GradScaler(8.0, max_scale=16.0)
    assert calibrate(scaler, model, mse(model), *data) == scaler.get_scale() == 16.0
    assert calibrate(GradScaler(enabled=False), None, None) == 1.0


def test_calibrate_casts_like_value_and_grad():
    model, scaler = Mlp(), GradScaler()

    def loss_fn(x, y):
        return 1e-6 * (model(x).astype(mx.float32) - y).square().mean()

    x, y = batch()
    x = x * 1e6
    options = {"compute_dtype": mx.float16, "keep": lambda path, _: "bias" in path}
    with pytest.raises(ValueError, match="loss on this batch is nan"):
        calibrate(scaler, model, loss_fn, x, y, **options)
    assert calibrate(scaler, model, loss_fn, x, y, cast_inputs=False, **options)
