"""What the forward pass tells the step: a loss that is NaN, buffers it wrote."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from support.graphs import kernels
from support.helpers import INF, NAN, Mlp, Traced, batch, bits, mse, same

from mlx_gradscale import GradScaler, GuardedOptimizer, LossScaleOptimizer
from mlx_gradscale.diagnostics import SkipAlarm, SkippedStepsWarning

pytestmark = pytest.mark.core

MODES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


class Normed(nn.Module):
    """A model with running statistics, and a buffer of its own kind."""

    def __init__(self, dtype=mx.float32):
        super().__init__()
        self.layers = [nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 1)]
        self.codes = {"count": mx.zeros(8)}
        self.freeze(keys=["codes"])
        self.frozen = nn.Linear(8, 8)
        self.frozen.freeze()
        self.set_dtype(dtype)

    def __call__(self, x):
        hidden = self.layers[1](self.layers[0](x))
        self.codes["count"] = self.codes["count"] + mx.mean(hidden, 0)
        return self.layers[2](nn.relu(hidden))


def buffers(model):
    norm = model.layers[1]
    return [norm.running_mean, norm.running_var, model.codes["count"]]


class Run:
    """A model trained by one of the ways, compiled or not."""

    def __init__(self, way, compiled, accumulate=False, dtype=mx.float32, **settings):
        mx.random.seed(2)
        self.model = Normed(dtype)
        scaler = GradScaler(1024.0, **settings)
        self.optimizer = LossScaleOptimizer(optim.AdamW(1e-2), scaler)
        self.scaler = scaler
        inner = optim.AdamW(1e-2)
        model, optimizer = self.model, self.optimizer
        if way == "GradScaler":
            self.optimizer = inner
            loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
        elif way == "value_and_grad":
            loss_and_grad = optimizer.value_and_grad(model, mse(model), mx.float16)
        else:
            loss_fn = optimizer.scale_loss(lambda model, x, y: mse(model)(x, y))
            of_model = nn.value_and_grad(model, loss_fn)

            def loss_and_grad(x, y):
                return of_model(model, x, y)

        self.optimizer.init(model.trainable_parameters())

        def step(x, y, previous, do_update):
            loss, grads = loss_and_grad(x, y)
            if previous is not None:
                grads = tree_map(mx.add, grads, previous)
            if not do_update:
                return loss, grads
            if way == "GradScaler":
                scaler.minimize(self.optimizer, model, grads)
            else:
                optimizer.update(model, grads)
            return loss, None

        self.traced = Traced(step)
        self.state = [model.state, self.optimizer.state, scaler.state]
        self.call = self.traced
        if compiled:
            self.call = mx.compile(self.traced, inputs=self.state, outputs=self.state)

    def step(self, *batches):
        """One step from the given batches, accumulated if there are several."""
        grads = None
        for i, (x, y) in enumerate(batches):
            loss, grads = self.call(x, y, grads, i == len(batches) - 1)
        mx.eval(loss, self.state)
        return loss


WAYS = pytest.mark.parametrize("way", ["GradScaler", "value_and_grad", "scale_loss"])


def good(seed=0):
    return batch(seed)


def overflowing(seed=0):
    """Its gradients overflow, its loss does not."""
    x, y = batch(seed)
    return x, y * 3000


@MODES
@WAYS
@pytest.mark.parametrize("bad", ["forward", "backward"])
def test_a_skipped_step_takes_back_what_the_forward_pass_wrote(way, compiled, bad):
    run = Run(way, compiled)
    run.step(good(0))
    before, moved = bits(run.model.parameters()), bits(buffers(run.model))
    x, y = good(1)
    run.step((x * INF, y) if bad == "forward" else (x, y * NAN))
    assert run.scaler.skipped_steps.item() == 1
    assert bits(run.model.parameters()) == before
    assert bits(buffers(run.model)) == moved
    run.step(good(2))
    assert bits(buffers(run.model)) != moved
    assert all(mx.all(mx.isfinite(x)).item() for x in buffers(run.model))
    # One trace more, because the buffer of its own kind is found only in the first.
    assert not compiled or run.traced.count == 2


@MODES
@WAYS
def test_buffers_go_back_to_before_the_first_of_several_forward_passes(way, compiled):
    run = Run(way, compiled)
    run.step(good(0), good(1))
    before = bits(buffers(run.model))
    x, y = good(3)
    run.step(good(2), (x * INF, y), good(4))
    assert bits(buffers(run.model)) == before
    run.step(good(5), good(6))
    assert bits(buffers(run.model)) != before


def test_a_buffer_that_the_user_sets_between_steps_is_not_undone():
    run = Run("value_and_grad", True)
    run.step(good(0))
    run.model.layers[1].running_mean = mx.full((8,), 7.0)
    x, y = good(1)
    run.step((x * INF, y))
    assert run.model.layers[1].running_mean.tolist() == [7.0] * 8


@MODES
def test_parts_of_a_model_that_are_stepped_apart_are_taken_back_too(compiled):
    mx.random.seed(2)
    model, scaler = Normed(), GradScaler(16.0)
    optimizers = [optim.SGD(0.1), optim.SGD(0.1)]
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    for optimizer, i in zip(optimizers, (0, 2), strict=True):
        optimizer.init(model.layers[i].trainable_parameters())

    def step(x, y):
        _, grads = loss_and_grad(x, y)
        for optimizer, i in zip(optimizers, (0, 2), strict=True):
            scaler.step(optimizer, model.layers[i], grads["layers"][i])
        scaler.update()

    state = [model.state, scaler.state, *(each.state for each in optimizers)]
    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    step(*good())
    before = bits(buffers(model))
    x, y = good(1)
    step(x * INF, y)
    assert scaler.skipped_steps.item() == 2
    assert bits(buffers(model)) == before


@pytest.mark.filterwarnings("ignore:.*computes in float32")
@MODES
@pytest.mark.parametrize("cast", [None, mx.float16], ids=["own dtype", "float16"])
def test_a_checkpointed_layer_is_trained_and_not_taken_for_a_buffer(cast, compiled):
    found = []
    for checkpointed in (False, True):
        mx.random.seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 1))
        optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(16.0))
        first = model.layers[0]
        layer = nn.utils.checkpoint(first) if checkpointed else first

        def loss_fn(x, y, model=model, layer=layer):
            out = model.layers[2](model.layers[1](layer(x)))
            return mx.mean(mx.square(out.astype(mx.float32) - y))

        loss_and_grad = optimizer.value_and_grad(model, loss_fn, cast)
        optimizer.init(model.trainable_parameters())

        def step(x, y, model=model, optimizer=optimizer, f=loss_and_grad):
            optimizer.update(model, f(x, y)[1])

        state = [model.state, optimizer.state]
        step = mx.compile(step, inputs=state, outputs=state) if compiled else step
        for seed in range(3):
            step(*good(seed))
            mx.eval(state)
        kept = optimizer.scaler.state["buffers"]["0"]["before"]
        assert set(kept) == {"layers.1.running_mean", "layers.1.running_var"}
        assert optimizer.step.item() == 3
        found.append(model.parameters())
    for (path, a), (_, b) in zip(*map(tree_flatten, found), strict=True):
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-5).item(), path


def test_a_validation_loss_leaves_no_trace_of_itself():
    mx.random.seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm(8), nn.Linear(8, 1))
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(16.0))
    optimizer.init(model.trainable_parameters())
    loss_fn = optimizer.scale_loss(lambda model, x, y: mse(model)(x, y))
    loss_and_grad = nn.value_and_grad(model, loss_fn)
    state = [model.state, optimizer.state]

    def step(x, y):
        optimizer.update(model, loss_and_grad(model, x, y)[1])

    step = mx.compile(step, inputs=state, outputs=state)
    step(*good(0))
    model.eval()
    validate = mx.compile(lambda x, y: loss_fn(model, x, y), inputs=model.state)
    assert math.isfinite(validate(*good(1)).item())
    assert math.isfinite(loss_fn(model, *good(1)).item())
    model.train()
    model.layers[1].running_mean = mx.full((8,), 7.0)
    x, y = good(2)
    step(x * INF, y)
    assert optimizer.scaler.skipped_steps.item() == 1
    assert model.layers[1].running_mean.tolist() == [7.0] * 8


def test_a_gradient_function_compiled_alone_takes_buffers_back_by_itself():
    mx.random.seed(2)
    model = Normed()
    scaler, optimizer = GradScaler(16.0), optim.SGD(0.1)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    alone = mx.compile(loss_and_grad, inputs=model.state, outputs=model.state)
    with pytest.warns(UserWarning, match="compiled without the scaler's state"):
        _, grads = alone(*good())
    scaler.minimize(optimizer, model, grads)
    before = bits(buffers(model))
    x, y = good(1)
    _, grads = alone(x * INF, y)
    scaler.minimize(optimizer, model, grads)
    assert scaler.skipped_steps.item() == 1
    assert bits(buffers(model)) == before


@pytest.mark.filterwarnings("ignore:.*computes in float32")
def test_models_without_buffers_and_frozen_weights_cost_nothing():
    counts = {}
    for frozen in (False, True):
        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        if frozen:
            model.layers[0].freeze()
        optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
        loss_and_grad = optimizer.value_and_grad(model, mse(model), mx.float16)
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state]

        def step(x, y, m=model, o=optimizer, f=loss_and_grad):
            loss, grads = f(x, y)
            o.update(m, grads)
            return loss

        step = mx.compile(step, inputs=state, outputs=state)
        mx.eval(step(*good()), state)
        step(*good())
        assert "buffers" not in optimizer.scaler.state
        counts[frozen] = len(kernels(model.layers[0].weight))
    assert counts[True] == 0 < counts[False]


def test_two_losses_in_one_compiled_step_are_both_noted():
    # MLX forgets in mx.grad which arrays a compiled function is traced with.
    model, scaler, optimizer = Mlp(), GradScaler(64.0), optim.SGD(0.1)
    first = scaler.value_and_grad(model, mse(model), mx.float16)
    second = scaler.value_and_grad(model, mse(model), mx.float16)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]

    def step(x, y, factor):
        _, grads = first(x, y)
        _, more = second(x * factor, y)
        scaler.minimize(optimizer, model, tree_map(mx.add, grads, more))

    step = mx.compile(step, inputs=state, outputs=state)
    for factor in (1.0, NAN, NAN, 1.0):
        step(*good(), mx.array(factor))
    assert scaler.skipped_losses.item() == 2
    assert scaler.get_scale() == 64.0
    assert optimizer.step.item() == 2


# A loss that is not finite by itself


@MODES
@WAYS
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_loss_that_is_nan_by_itself_is_skipped_and_the_scale_stays(
    way, compiled, value
):
    run = Run(way, compiled, growth_interval=3)
    run.step(good(0))
    before = run.scaler.state_dict()
    x, y = good(1)
    for _ in range(5):
        assert not math.isfinite(run.step((x * value, y)).item())
    found = run.scaler.state_dict()
    for key in ("scale", "_growth_tracker"):
        assert found[key] == before[key]
    assert run.scaler.skipped_steps.item() == run.scaler.skipped_losses.item() == 5
    assert run.scaler.consecutive_skips.item() == 5
    run.step(good(2))
    assert run.scaler.last_step_applied.item()
    assert run.scaler.consecutive_skips.item() == 0


@pytest.mark.parametrize("way", ["GradScaler", "value_and_grad", "scale_loss"])
def test_a_batch_that_the_user_drops_costs_no_other_step(way):
    run = Run(way, False)
    x, y = good()
    run.call(x * NAN, y, None, False)  # looked at, and dropped
    run.step(good(1))
    assert run.scaler.last_step_applied.item()
    assert run.scaler.skipped_losses.item() == 0


def test_an_overflow_is_still_an_overflow():
    run = Run("value_and_grad", True)
    run.step(overflowing())
    assert run.scaler.skipped_steps.item() == 1
    assert run.scaler.skipped_losses.item() == 0
    assert run.scaler.get_scale() == 512.0


@MODES
@WAYS
def test_one_empty_micro_batch_skips_the_step_and_moves_nothing(way, compiled):
    run = Run(way, compiled)
    run.step(good(0), good(1))
    before = bits(run.model.trainable_parameters())
    x, y = good(2)
    run.step((x * NAN, y), good(3))
    run.step(good(2), (x * NAN, y))
    assert bits(run.model.trainable_parameters()) == before
    assert run.scaler.get_scale() == 1024.0
    assert run.scaler.skipped_losses.item() == 2
    # Micro-batches that are fine afterwards are not blamed for it.
    run.step(good(4), good(5))
    assert run.scaler.last_step_applied.item()


def test_the_alarm_counts_losses_too():
    run = Run("value_and_grad", True)
    run.scaler.skip_alarm = SkipAlarm(limit=5)
    x, y = good()
    for _ in range(5):
        run.step((x * NAN, y))
    with pytest.warns(SkippedStepsWarning, match="5 steps in a row"):
        run.scaler.get_scale()


def test_in_pytorchs_way_a_nan_loss_backs_off_as_it_does_there():
    scaler, optimizer = GradScaler(1024.0), optim.SGD(0.1)
    grads = {"w": scaler.scale(mx.array([NAN]))}
    scaler.apply_gradients(optimizer, grads, {"w": mx.ones(1)})
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert scaler.skipped_losses.item() == 0


def test_update_forgotten_in_a_compiled_step_sets_off_the_alarm():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(2.0**24)
    scaler.skip_alarm = SkipAlarm(limit=20)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]

    def step(x, y):
        return scaler.step(optimizer, model, loss_and_grad(x, y)[1])

    step = mx.compile(step, inputs=state, outputs=state)
    for _ in range(20):
        assert not step(*good()).item()
    with pytest.warns(SkippedStepsWarning, match=r"update\(\) was not called"):
        scaler.get_scale()


# Guarding without scaling


@MODES
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_guarding_needs_no_scaled_loss_and_skips_what_is_bad(value, dtype, compiled):
    mx.random.seed(1)
    model = Mlp(dtype=dtype)
    optimizer = GuardedOptimizer(optim.AdamW(1e-2), max_grad_norm=1.0)
    loss_and_grad = nn.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    x, y = batch(dtype=dtype)
    mx.eval(step(x, y), state)
    before = bits([model.parameters(), optimizer.optimizer.state])
    mx.eval(step(x * value, y), state)
    assert bits([model.parameters(), optimizer.optimizer.state]) == before
    assert optimizer.scaler.skipped_steps.item() == 1
    assert optimizer.scaler.get_scale() == 1.0
    mx.eval(step(x, y), state)
    assert optimizer.step.item() == 2
    assert optimizer.scaler.get_scale() == 1.0
    masters = set(optimizer.state["masters"])
    assert len(masters) == (0 if dtype == mx.float32 else 4)


def test_guarding_is_the_same_as_the_bare_optimizer_while_all_is_finite():
    models = []
    for guarded in (False, True):
        mx.random.seed(1)
        model = Mlp()
        optimizer = optim.AdamW(1e-2)
        optimizer = GuardedOptimizer(optimizer) if guarded else optimizer
        for seed in range(3):
            _, grads = nn.value_and_grad(model, mse(model))(*batch(seed))
            optimizer.update(model, grads)
        models.append(model.parameters())
    for a, b in zip(*(tree_flatten(m) for m in models), strict=True):
        assert mx.allclose(a[1], b[1], rtol=1e-6, atol=1e-7).item()


def test_a_scaler_that_is_told_to_scale_later_asks_for_a_scaled_loss():
    optimizer = optim.SGD(0.1)
    grads, weights = {"w": mx.ones(1)}, {"w": mx.ones(1)}
    for change in (
        lambda s: s.update(2.0),
        lambda s: s.update(mx.array(2.0)),
        lambda s: s.set_dynamic(True),
        lambda s: s.load_state_dict(GradScaler(8.0).state_dict()),
    ):
        scaler = GradScaler(1.0, dynamic=False)
        scaler.apply_gradients(optimizer, grads, weights)
        scaler.update()
        change(scaler)
        with pytest.raises(RuntimeError, match="never scaled a loss"):
            scaler.apply_gradients(optimizer, grads, weights)


def test_disabled_stays_a_pass_through():
    model = Mlp()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(enabled=False))
    _, grads = optimizer.value_and_grad(model, mse(model))(*good())
    expected = nn.value_and_grad(model, mse(model))(*good())[1]
    assert same(grads, expected)
    optimizer.update(model, grads)
    assert optimizer.step.item() == 1
