"""Several optimizers, wrapped or plain, share one scaler: step each, update once."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, bits, mse
from support.optimizer_helpers import assert_near

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
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


def test_disabled_scaler_may_be_shared_by_wrappers_that_update_by_themselves():
    scaler, weights = GradScaler(enabled=False), {"w": mx.ones(1, mx.float16)}
    pair = [LossScaleOptimizer(optim.SGD(1e-4), scaler) for _ in range(2)]
    for optimizer in pair:
        for _ in range(2):
            optimizer.apply_gradients(weights, weights)
        assert optimizer.masters(weights)["w"].item() == pytest.approx(1 - 2e-4)


@pytest.mark.compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_two_wrappers_that_both_update_count_two_iterations_with_right_gradients(
    compiled,
):
    def train(is_shared):
        scalers = [GradScaler(2.0**10, growth_interval=1)]
        scalers += scalers if is_shared else [GradScaler(2.0**10, dynamic=False)]
        models, optimizers, parts = [], [], []
        for scaler in scalers:
            mx.random.seed(5)
            model = Mlp(dtype=mx.float16)
            loss = lambda x, y, s=scaler, m=model: s.scale(mse(m)(x, y))  # noqa: E731
            optimizer = LossScaleOptimizer(optim.SGD(0.1), scaler)
            optimizer.init(model.trainable_parameters())
            models.append(model)
            optimizers.append(optimizer)
            parts.append((model, optimizer, nn.value_and_grad(model, loss)))

        def step(x, y):
            # Both losses are scaled before the first update changes the scale.
            gradients = [gradient(x, y)[1] for _, _, gradient in parts]
            for (model, optimizer, _), grads in zip(parts, gradients, strict=True):
                optimizer.update(model, grads)

        state = [[x.state for x in (*models, *optimizers)], scalers[0].state]
        step = mx.compile(step, inputs=state, outputs=state) if compiled else step
        for seed in range(3):
            step(*batch(seed, dtype=mx.float16))
        return [model.parameters() for model in models], scalers[0].get_scale()

    (shared, scale), (apart, _) = train(True), train(False)
    assert_near(shared, apart, rtol=1e-2, atol=1e-2)
    assert scale == 2.0**16


def test_gradients_scaled_outside_of_a_compiled_step_follow_its_scale():
    model = nn.Module()
    model.w = mx.array([0.0])
    scaler, optimizer = GradScaler(8.0, growth_interval=1), optim.SGD(1.0)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]
    step = mx.compile(
        lambda g: scaler.minimize(optimizer, model, {"w": g}),
        inputs=state,
        outputs=state,
    )
    for i in range(4):
        step(scaler.scale(mx.ones(1)))
        assert model.w.item() == -1.0 - i


def test_repr_shows_the_scale_and_the_settings_that_are_not_defaults():
    scaler = GradScaler(8.0)
    assert repr(scaler) == "GradScaler(scale=8.0, skipped_steps=0)"
    assert repr(GradScaler(enabled=False)) == "GradScaler(enabled=False)"
    optimizer = MasterWeightOptimizer(optim.Lion(0.1))
    assert repr(optimizer) == "MasterWeightOptimizer(Lion)"
    optimizer = LossScaleOptimizer(
        optim.AdamW(0.1), scaler, max_grad_norm=1.0, state_bits=16
    )
    assert repr(optimizer) == (
        f"LossScaleOptimizer(AdamW, {scaler!r}, max_grad_norm=1.0, state_bits=16)"
    )
