"""Several optimizers, wrapped or plain, share one scaler: step each, update once."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, bits, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core.masters import to_float32


class Pair:
    """Two float16 models, a wrapper for one and any optimizer for the other."""

    def __init__(self, compiled, second=LossScaleOptimizer, **arguments):
        self.scaler = GradScaler(2.0**10, growth_interval=4)
        self.models = [Mlp(dtype=mx.float16), Mlp(dtype=mx.float16)]
        first = LossScaleOptimizer(optim.Adam(1e-3), self.scaler, **arguments)
        self.optimizers = [first, second(optim.Adam(1e-3), self.scaler)]
        gradients = [self.scaler.value_and_grad(m, mse(m)) for m in self.models]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.init(model.trainable_parameters())

        def step(batches):
            parts = zip(self.models, self.optimizers, gradients, batches, strict=True)
            for model, optimizer, gradient, (x, y) in parts:
                self.scaler.step(optimizer, model, gradient(x, y)[1])
            self.scaler.update()

        state = [[m.state for m in self.models], [o.state for o in self.optimizers]]
        self.state = [*state, self.scaler.state]
        self.step = step
        if compiled:
            self.step = mx.compile(step, inputs=self.state, outputs=self.state)

    def run(self, pattern):
        for bad in pattern:
            pairs = [batch(dtype=mx.float16), batch(dtype=mx.float16)]
            self.step(
                [(x * (INF if i in bad else 1), y) for i, (x, y) in enumerate(pairs)]
            )
            mx.eval(self.state)


def plain(optimizer, scaler):
    return optimizer


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_two_wrappers_grow_the_scale_once_per_iteration(compiled):
    pair = Pair(compiled)
    pair.run([()] * 8)
    assert pair.scaler.get_scale() == 2.0**12
    pair.run([(0,)])
    assert pair.scaler.get_scale() == 2.0**11
    assert [optimizer.step.item() for optimizer in pair.optimizers] == [8, 9]


@pytest.mark.filterwarnings("ignore:Some parameters are float16")
@pytest.mark.parametrize("second", [LossScaleOptimizer, plain])
@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_of_one_optimizer_lowers_the_scale_that_it_shares(bad, second):
    pair = Pair(False, second)
    before = bits(pair.models[bad].parameters())
    pair.run([(bad,)] * 6)
    assert pair.scaler.get_scale() == 2.0**4
    assert pair.scaler.consecutive_skips.item() == 6
    assert bits(pair.models[bad].parameters()) == before
    assert pair.optimizers[1 - bad].step.item() == 6
    assert pair.optimizers[bad].step.item() == 0


def test_step_of_a_wrapper_uses_its_master_weights_and_clipping():
    weights, scaler = nn.Module(), GradScaler(8.0)
    weights.w = mx.array([1.0], mx.float16)
    optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler, max_grad_norm=1e-4)
    gradient = scaler.value_and_grad(weights, lambda: 5.0 * to_float32(weights.w).sum())
    for _ in range(2):
        scaler.step(optimizer, weights, gradient()[1])
        scaler.update()
    assert optimizer.grad_norm.item() == 5.0
    master = optimizer.masters(weights.parameters())["w"]
    assert master.item() == pytest.approx(1 - 2e-4, abs=1e-7)
    assert weights.w.item() == 1.0


@pytest.mark.filterwarnings("ignore:Some parameters are float16")
@pytest.mark.parametrize("second", [LossScaleOptimizer, plain])
def test_update_of_a_wrapper_is_refused_while_another_optimizer_shares_its_scaler(
    second,
):
    pair = Pair(False, second)
    pair.run([()] if second is plain else [])  # a plain one shares it from its step on
    model, optimizer = pair.models[0], pair.optimizers[0]
    loss_and_grad = pair.scaler.value_and_grad(model, mse(model))
    _, gradients = loss_and_grad(*batch(dtype=mx.float16))
    before = bits([model.parameters(), pair.state])
    with pytest.raises(RuntimeError, match=r"2 optimizers share.*scaler\.step"):
        optimizer.update(model, gradients)
    with pytest.raises(RuntimeError, match="2 optimizers share this scaler"):
        optimizer.apply_gradients(gradients, model)
    assert bits([model.parameters(), pair.state]) == before


def test_wrapper_may_update_by_itself_once_it_has_the_scaler_alone():
    pair = Pair(False)
    model, optimizer = pair.models[0], pair.optimizers[0]
    gradients = optimizer.value_and_grad(model, mse(model))(*batch(dtype=mx.float16))[1]
    del pair  # with the other optimizer, in a reference cycle
    optimizer.update(model, gradients)
    assert optimizer.step.item() == 1


def test_wrappers_of_parts_of_a_model_have_state_only_for_their_parts():
    model, scaler = Mlp(dtype=mx.float16), GradScaler(8.0)
    pair = [LossScaleOptimizer(optim.Adam(1e-3), scaler) for _ in range(2)]
    loss_and_grad = scaler.value_and_grad(model, mse(model))
    _, gradients = loss_and_grad(*batch(dtype=mx.float16))
    first, second = gradients["layers"]
    scaler.step(pair[0], model, {"layers": [first]})
    scaler.step(pair[1], model, {"layers": [{}, second]})
    scaler.update()
    for i, optimizer in enumerate(pair):
        owners = {path.split(".")[1] for path in optimizer.state["masters"]}
        assert owners == {str(i)}
        assert optimizer.step.item() == 1


def test_optimizer_inside_a_wrapper_is_refused_in_its_place():
    scaler, inner, weights = GradScaler(8.0), optim.SGD(0.1), {"w": mx.ones(1)}
    wrapper = LossScaleOptimizer(inner, scaler)
    for call in (scaler.unscale_, partial(scaler.apply_gradients, parameters=weights)):
        with pytest.raises(ValueError, match="Pass the LossScaleOptimizer instead"):
            call(inner, weights)
    del wrapper
    scaler.scale(mx.array(1.0))
    scaler.apply_gradients(inner, weights, weights)


def test_disabled_scaler_may_be_shared_by_wrappers_that_update_by_themselves():
    scaler, weights = GradScaler(enabled=False), {"w": mx.ones(1, mx.float16)}
    pair = [LossScaleOptimizer(optim.SGD(1e-4), scaler) for _ in range(2)]
    for optimizer in pair:
        for _ in range(2):
            optimizer.apply_gradients(weights, weights)
        assert optimizer.masters(weights)["w"].item() == pytest.approx(1 - 2e-4)
