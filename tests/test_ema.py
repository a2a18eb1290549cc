"""EMA averages the master weights, over the applied steps only."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.helpers import INF, Mlp, Traced, batch, bits, mse

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    MasterWeightOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.core.masters import to_float32
from mlx_gradscale.ema import EMA

DECAY = 0.97


class Averaged:
    """A float16 run with an average, in one compiled step that sometimes overflows."""

    def __init__(self):
        self.model = Mlp(dtype=mx.float16)
        self.optimizer = LossScaleOptimizer(optim.SGD(1e-3), GradScaler(2.0**8))
        self.ema = EMA(self.model, self.optimizer, DECAY)
        value_and_grad = self.optimizer.value_and_grad(self.model, mse(self.model))
        self.optimizer.init(self.model.trainable_parameters())
        self.state = [self.model.state, self.optimizer.state, self.ema.state]

        def step(x, y):
            loss, grads = value_and_grad(x, y)
            self.optimizer.update(self.model, grads)
            self.ema.update(self.model)
            return loss

        self.traced = Traced(step)
        self.compiled = mx.compile(self.traced, inputs=self.state, outputs=self.state)

    def train(self, start, stop):
        for i in range(start, stop):
            x, y = batch(i, 8, mx.float16)
            self.compiled(x * (INF if i % 5 == 4 else 1), y)
            mx.eval(self.state)
            yield i


@pytest.mark.compiles
def test_master_weights_are_averaged_over_applied_steps_in_a_compiled_step():
    run = Averaged()
    masters = run.optimizer.masters(run.model.parameters())
    expected = {path: np.array(x, np.float64) for path, x in tree_flatten(masters)}
    rounded, before = dict(expected), bits(run.ema.state)
    for i in run.train(0, 20):
        applied = run.optimizer.scaler.last_step_applied.item()
        assert applied == (i % 5 != 4)
        if not applied:
            assert bits(run.ema.state) == before
            continue
        before = bits(run.ema.state)
        weights = dict(tree_flatten(run.model.parameters()))
        for path, x in run.optimizer.state["masters"].items():
            for average, value in ((expected, x), (rounded, weights[path])):
                new = (1 - DECAY) * np.array(value, np.float64)
                average[path] = DECAY * average[path] + new
    assert run.traced.count == 1
    found = run.ema.state["weights"]
    assert found.keys() == expected.keys()
    for path, x in found.items():
        assert x.dtype == mx.float32
        np.testing.assert_allclose(np.array(x), expected[path], rtol=1e-5, atol=1e-7)
    # The average of the float16 weights would be different.
    apart = max(np.abs(rounded[path] - expected[path]).max() for path in expected)
    assert apart > 1e-5


@pytest.mark.compiles
def test_ema_resumes_from_a_checkpoint_without_a_retrace(tmp_path):
    run = Averaged()
    list(run.train(0, 6))
    save_checkpoint(tmp_path / "run", run.model, run.optimizer, ema=run.ema.state)
    ends = []
    list(run.train(6, 12))
    for other in (run, Averaged()):
        extra = restore_checkpoint(tmp_path / "run", other.model, other.optimizer)
        state = extra["ema"]
        if other is not run:  # nested, as after tree_unflatten of a safetensors file
            state = tree_unflatten(tree_flatten(state))
        other.ema.state = state
        list(other.train(6, 12))
        assert other.traced.count == 1
        ends.append(bits(other.state))
    assert ends[0] == ends[1]


def test_ema_swap_is_undone_even_after_an_error():
    run = Averaged()
    list(run.train(0, 3))
    before = bits(run.state)
    average = run.ema.state["weights"]["layers.0.weight"]

    def fails():
        with run.ema.swapped_into(run.model):
            weight = run.model.layers[0].weight
            assert bits(weight) == bits(average.astype(mx.float16))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fails()
    assert bits(run.state) == before
    # The weights are the ones that the optimizer wrote, so their masters still count.
    masters = run.optimizer.masters(run.model.parameters())
    own = run.optimizer.state["masters"]["layers.0.weight"]
    assert bits(masters["layers"][0]["weight"]) == bits(own)


def test_master_weights_of_a_master_weight_optimizer_are_averaged():
    model = Mlp(dtype=mx.bfloat16)
    optimizer = MasterWeightOptimizer(optim.SGD(1e-6))
    ema = EMA(model, optimizer, decay=0.0)
    value_and_grad = optimizer.value_and_grad(model, mse(model))
    for gain in (1, INF):
        x, y = batch(0, 8, mx.bfloat16)
        optimizer.update(model, value_and_grad(x * gain, y)[1])
        ema.update(model)
        assert bits(ema.state["weights"]) == bits(optimizer.state["masters"])
    masters = optimizer.masters(model.parameters())
    assert bits(masters) != bits(tree_map(to_float32, model.parameters()))


def test_ema_ignores_a_step_that_a_scaler_skipped():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(2.0**8)
    ema = EMA(model, decay=0.5)
    value_and_grad = scaler.value_and_grad(model, mse(model))
    for gain in (1, INF):
        x, y = batch(0, 8)
        before = bits(ema.state)
        _, grads = value_and_grad(x * gain, y)
        ema.update(model, scaler.minimize(optimizer, model, grads))
        assert (bits(ema.state) == before) == (gain == INF)


def test_weight_changed_in_place_does_not_change_the_average():
    model = Mlp()
    ema = EMA(model)
    before = bits(ema.state)
    model.layers[0].weight += 1
    assert bits(ema.state) == before


def test_ema_ignores_frozen_layers_statistics_and_tuples():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 8))
    model.layers[0].freeze()
    ema = EMA(model)
    assert {path.split(".")[1] for path in ema.state["weights"]} == {"1", "2"}
    own = model.layers[2].weight = model.layers[2].weight + 1
    model.layers[2].both = (own, model.layers[2].bias)
    statistics = model.layers[1].running_mean
    model.freeze()  # for an evaluation
    with ema.swapped_into(model):
        assert not mx.array_equal(model.layers[2].weight, own)
        assert model.layers[1].running_mean is statistics
    assert model.layers[2].weight is own


def test_ema_rejects_bad_decays_changed_models_and_foreign_states():
    model = Mlp()
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            EMA(model, decay=decay)
    with pytest.raises(TypeError, match=r"Pass the decay by name"):
        EMA(model, 0.5)
    ema = EMA(model)
    model.layers[0].freeze()
    with pytest.raises(ValueError, match="create a new EMA"):
        ema.update(model)
    before = bits(ema.state)
    for state in (EMA(model).state, EMA(Mlp(width=3)).state):
        with pytest.raises(ValueError, match="but the loaded state has"):
            ema.state = state
    with pytest.raises(ValueError, match="but the model has"):
        ema.update(Mlp(width=3))
    for other in (Mlp(width=3), nn.ReLU()):
        with (
            pytest.raises(ValueError, match="but the model has"),
            ema.swapped_into(other),
        ):
            pass
    assert bits(ema.state) == before
