"""Several optimizers, wrapped or plain, share one scaler: step each, update once."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import INF, Mlp, batch, bits, compiled_if, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer

each_mode = pytest.mark.parametrize("compiled", [False, True])


@pytest.mark.filterwarnings("ignore:Some parameters are float16")
@pytest.mark.compiles
@pytest.mark.parametrize("second", ["wrapper", "plain"])
@each_mode
def test_shared_scale_moves_once_per_iteration_and_only_the_bad_step_is_skipped(
    second, compiled
):
    scaler = GradScaler(2.0**10, growth_interval=4)
    models = [Mlp(dtype=mx.float16), Mlp(dtype=mx.float16)]
    optimizers = [LossScaleOptimizer(optim.Adam(1e-3), scaler) for _ in models]
    if second == "plain":
        optimizers[1] = optimizers[1].optimizer
    gradients = [scaler.value_and_grad(model, mse(model)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.init(model.trainable_parameters())

    def step(factors):
        x, y = batch(dtype=mx.float16)
        for i, factor in enumerate(factors):
            _, grads = gradients[i](x * factor, y)
            scaler.step(optimizers[i], models[i], grads)
        scaler.update()

    state = [models, [optimizer.state for optimizer in optimizers], scaler.state]
    step = compiled_if(compiled, step, *state)

    def run(count, bad=None):
        factors = [mx.array(INF if i == bad else 1, mx.float16) for i in range(2)]
        for _ in range(count):
            step(factors)

    run(8)
    assert scaler.get_scale() == 2.0**12
    for bad in (0, 1):
        before = bits(models[bad].parameters())
        run(3, bad)
        assert bits(models[bad].parameters()) == before
        assert scaler.consecutive_skips.item() == 3 * (bad + 1)
    assert scaler.get_scale() == 2.0**6
    assert [optimizer.step.item() for optimizer in optimizers] == [11, 11]


def test_step_of_a_wrapper_uses_its_master_weights_and_clipping():
    model, scaler = nn.Module(), GradScaler(8.0)
    model.w = mx.array([1.0], mx.float16)
    optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler, max_grad_norm=1e-4)
    loss_fn = lambda: 5.0 * model.w.astype(mx.float32).sum()  # noqa: E731
    gradient = scaler.value_and_grad(model, loss_fn)
    for _ in range(2):
        scaler.step(optimizer, model, gradient()[1])
        scaler.update()
    assert optimizer.grad_norm.item() == 5.0
    master = optimizer.masters(model.parameters())["w"]
    assert master.item() == pytest.approx(1 - 2e-4, abs=1e-7)
    assert model.w.item() == 1.0


def test_parts_of_a_model_are_stepped_by_wrappers_that_know_only_their_part():
    model, scaler = Mlp(dtype=mx.float16), GradScaler(8.0)
    pair = [LossScaleOptimizer(optim.Adam(1e-3), scaler) for _ in range(2)]
    _, grads = scaler.value_and_grad(model, mse(model))(*batch(dtype=mx.float16))
    first, second = grads["layers"]
    before = [bits(layer.parameters()) for layer in model.layers]
    scaler.step(pair[0], model, {"layers": [first]})
    assert bits(model.layers[1].parameters()) == before[1]
    scaler.step(pair[1], model.layers[1], second)  # or the submodule itself
    scaler.update()
    assert set(pair[0].state["masters"]) == {"layers.0.weight", "layers.0.bias"}
    assert set(pair[1].state["masters"]) == {"weight", "bias"}
    for layer, old in zip(model.layers, before, strict=True):
        assert bits(layer.parameters()) != old


@pytest.mark.compiles
@each_mode
def test_two_wrappers_that_both_update_count_two_iterations_with_right_gradients(
    compiled,
):
    scaler, weights = GradScaler(8.0, growth_interval=1), [{"w": mx.zeros(1)}] * 2
    pair = [LossScaleOptimizer(optim.SGD(1.0), scaler) for _ in range(2)]
    for optimizer in pair:
        optimizer.init(weights[0])

    def step(g):
        # Both losses are scaled before the first update changes the scale.
        scaled = [{"w": scaler.scale(g)} for _ in pair]
        for i, optimizer in enumerate(pair):
            weights[i] = optimizer.apply_gradients(scaled[i], weights[i])

    step = compiled_if(compiled, step, weights, *(each.state for each in pair))
    for i in range(3):
        step(mx.ones(1))
        assert [tree["w"].item() for tree in weights] == [-1.0 - i] * 2
    assert scaler.get_scale() == 8.0 * 2**6


def test_gradients_scaled_outside_of_a_compiled_step_follow_its_scale():
    model = nn.Module()
    model.w = mx.array([0.0])
    scaler, optimizer = GradScaler(8.0, growth_interval=1), optim.SGD(1.0)
    optimizer.init(model.trainable_parameters())
    step = lambda g: scaler.minimize(optimizer, model, {"w": g})  # noqa: E731
    step = compiled_if(True, step, model.state, optimizer.state, scaler.state)
    for i in range(4):
        step(scaler.scale(mx.ones(1)))
        assert model.w.item() == -1.0 - i
