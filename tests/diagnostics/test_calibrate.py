"""``calibrate`` and ``warm_start``: a scale before the first step."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import NAN, Mlp, batch, bits, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import ScaleHistory


class Normed(nn.Module):
    """A forward pass that writes to the model, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.BatchNorm(16), nn.Linear(16, 1)]
        self.dropout = nn.Dropout(0.5)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](self.dropout(nn.relu(x)))


@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e3, 1e6])
def test_no_step_is_lost_and_the_scale_is_as_large_as_can_be(weight):
    model, data = Mlp(dtype=mx.float16), batch(0, dtype=mx.float16)

    def loss_fn(x, y):
        return weight * mse(model)(x, y)

    optimizer = LossScaleOptimizer(optim.SGD(0.0), GradScaler(2.0**20))
    scale = optimizer.scaler.calibrate(model, loss_fn, *data)
    assert optimizer.scaler.get_scale() == scale
    loss_and_grad = optimizer.value_and_grad(model, loss_fn)

    def applied(scale):
        optimizer.scaler.update(scale)
        optimizer.update(model, loss_and_grad(*data)[1])
        return optimizer.scaler.last_step_applied.item()

    assert applied(scale)
    assert applied(2 * scale)  # the headroom
    assert not applied(4 * scale) or scale == 2.0**23


def test_nothing_else_changes():
    model, data = Normed(), batch(0, dtype=mx.float16)
    before, key = bits(model.parameters()), mx.array(mx.random.state[0])
    scaler = GradScaler()
    scaler.calibrate(model, mse(model), *data, headroom=3)
    assert bits(model.parameters()) == before
    assert mx.array_equal(mx.random.state[0], key)
    assert scaler.skipped_steps.item() == 0
    # And either way of the scaler is open still.
    scaler.scale(mx.array(1.0))


def test_what_no_scale_cures_is_said():
    model, (x, y) = Mlp(dtype=mx.float16), batch(0, dtype=mx.float16)
    scaler = GradScaler(8.0)
    with pytest.raises(ValueError, match="loss of this batch is not finite"):
        scaler.calibrate(model, mse(model), x * NAN, y)
    with pytest.raises(ValueError, match="not finite at any scale"):
        scaler.calibrate(model, lambda x: mx.sqrt(model(x).sum() * 0), x)
    assert scaler.get_scale() == 8.0


def test_an_earlier_run_knows_the_scale(tmp_path):
    history, scaler = ScaleHistory(tmp_path / "run.csv"), GradScaler(4096.0)
    history.record(scaler, loss=1.0)
    history.flush()
    assert GradScaler().warm_start(tmp_path / "run.csv") == 4096.0
    with pytest.raises(ValueError, match="The history is empty"):
        GradScaler().warm_start(ScaleHistory())
    assert GradScaler(enabled=False).calibrate(None, None) == 1.0
