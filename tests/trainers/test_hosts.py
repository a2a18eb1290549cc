"""Loops as people write them, inside of ``everywhere()``: near float32, or reported.

Each test is a host that failed once (mlx-examples, nanoGPT ports, PPO, GRPO, mflux).
"""

import contextlib
import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Mlp, batch, bits, mse
from mlx.utils import tree_map

from mlx_gradscale import GradScaler, everywhere

INF = float("inf")
# Made before anything else, as a default argument of a class is.
AT_IMPORT = {dtype: optim.Adam(1e-2) for dtype in (mx.float32, mx.float16)}


def follows_float32(train, rel=0.02):
    """Return what ``everywhere()`` reports about a host that follows float32."""
    mx.random.seed(1)
    wanted = train(mx.float32)
    mx.random.seed(1)
    with everywhere() as here:
        found = train(mx.float16)
    assert found == pytest.approx(wanted, rel=rel)
    return here.report()


def loop(model, step, dtype, steps=30):
    for i in range(steps):
        loss = step(*batch(i, dtype=dtype))
        mx.eval(loss, model.parameters())
    return loss.item()


def test_a_step_compiled_over_the_model_alone_as_in_mlx_examples_mnist():
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.SGD(0.02)
        loss_and_grad = nn.value_and_grad(model, mse(model))

        @partial(mx.compile, inputs=model.state, outputs=model.state)
        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            optimizer.update(model, grads)
            return loss

        @partial(mx.compile, inputs=model.state)
        def evaluate(x, y):
            return mse(model)(x, y)

        loop(model, step, dtype)
        return evaluate(*batch(99, dtype=dtype)).item()

    assert follows_float32(train)[1] == "SGD: 30 steps applied, 0 skipped"


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "in a compiled step"])
def test_a_gradient_that_is_compiled_alone_follows_the_scale(inner):
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))
        gradient = mx.compile(loss_and_grad, inputs=model.state, outputs=model.state)

        def step(x, y):
            loss, grads = gradient(x, y)
            optimizer.update(model, grads)
            return loss

        if inner:
            state = [model.state, optimizer.state]
            step = mx.compile(step, inputs=state, outputs=state)
        return loop(model, step, dtype)

    assert follows_float32(train)[1] == "AdamW: 30 steps applied, 0 skipped"
    with everywhere(lambda: GradScaler(2.0**40)) as here:
        train(mx.float16)
    # It had to fall by about 2**24.
    assert here.scalers[0].get_scale() < 2.0**20


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_optimizers_on_one_model_as_with_muon_and_adam(compiled):
    def train(dtype):
        model = Mlp(dtype=dtype)
        muon, adam = optim.Muon(1e-2), optim.Adam(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            for optimizer, is_chosen in ((muon, lambda g: g.ndim == 2), (adam, None)):
                chosen = [
                    {k: g for k, g in layer.items() if (g.ndim == 2) == bool(is_chosen)}
                    for layer in grads["layers"]
                ]
                optimizer.update(model, {"layers": chosen})
            return loss

        if compiled:
            state = [model.state, muon.state, adam.state]
            step = mx.compile(step, inputs=state, outputs=state)
        loss = loop(model, step, dtype)
        assert "bias" not in muon.state["layers"][0]
        return loss

    report = follows_float32(train)
    assert report[1:] == [
        "Muon: 30 steps applied, 0 skipped",
        "Adam: 30 steps applied, 0 skipped",
    ]


def test_two_models_with_two_optimizers_in_the_order_of_ppo():
    def train(dtype):
        actor, critic = Mlp(dtype=dtype), Mlp(dtype=dtype)
        optimizers = optim.Adam(1e-2), optim.Adam(3e-3)
        gradients = [nn.value_and_grad(model, mse(model)) for model in (actor, critic)]

        def step(x, y):
            # Both gradients first, then both updates.
            (one, first), (other, second) = (gradient(x, y) for gradient in gradients)
            optimizers[1].update(critic, second)
            optimizers[0].update(actor, first)
            return one + other

        return loop(critic, step, dtype)

    report = follows_float32(train)
    assert len([line for line in report if line.startswith("loss scale")]) == 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_second_phase_with_a_new_optimizer_while_the_old_one_lives(compiled):
    def train(dtype):
        model, optimizers = Mlp(dtype=dtype), []
        loss_and_grad = nn.value_and_grad(model, mse(model))
        for rate in (1e-2, 1e-3):
            optimizers.append(optim.AdamW(rate))

            def step(x, y):
                loss, grads = loss_and_grad(x, y)
                optimizers[-1].update(model, grads)
                return loss

            if compiled:
                state = [model.state, optimizers[-1].state]
                step = mx.compile(step, inputs=state, outputs=state)
            loss = loop(model, step, dtype, 15)
        return loss

    assert follows_float32(train)[1:] == ["AdamW: 15 steps applied, 0 skipped"] * 2


@pytest.mark.parametrize("empty", [{}, []], ids=["{}", "[]"])
def test_a_state_that_is_dropped_and_set_again_between_phases(empty):
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            optimizer.update(model, grads)
            return loss

        loop(model, step, dtype, 10)
        saved = optimizer.state
        optimizer.state = empty
        mse(model)(*batch(0, dtype=dtype))  # a preview, in the memory that is free now
        optimizer.state = saved
        return loop(model, step, dtype, 10)

    assert follows_float32(train)[1] == "AdamW: 20 steps applied, 0 skipped"


def test_an_empty_state_starts_the_optimizer_anew():
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            optimizer.update(model, grads)
            return loss

        loop(model, step, dtype, 10)
        rate = optimizer.learning_rate
        optimizer.state = {"step": mx.array(0, mx.uint64), "learning_rate": rate}
        loss = loop(model, step, dtype, 5)
        assert optimizer.step.item() == 5
        return loss

    follows_float32(train)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("has_value", [True, False], ids=["value_and_grad", "grad"])
def test_gradients_of_a_parameter_tree_as_in_functional_code(compiled, has_value):
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.Adam(1e-2)
        holder = {"parameters": model.trainable_parameters()}
        optimizer.init(holder["parameters"])

        def loss_fn(parameters, x, y):
            model.update(parameters)
            return mse(model)(x, y)

        def step(x, y):
            if has_value:
                loss, grads = mx.value_and_grad(loss_fn)(holder["parameters"], x, y)
            else:
                loss = mx.array(0.0)
                grads = mx.grad(loss_fn)(holder["parameters"], x, y)
            holder["parameters"] = optimizer.apply_gradients(
                grads, holder["parameters"]
            )
            return loss

        if compiled:
            state = [holder, optimizer.state]
            step = mx.compile(step, inputs=state, outputs=state)
        for i in range(30):
            step(*batch(i, dtype=dtype))
            mx.eval(holder, optimizer.state)
        assert holder["parameters"]["layers"][0]["weight"].dtype == dtype
        return loss_fn(holder["parameters"], *batch(99, dtype=dtype)).item()

    assert follows_float32(train)[1].startswith("Adam: 30 steps applied")


def test_an_optimizer_that_was_made_at_import_time():
    def train(dtype, optimizer=None):
        model, optimizer = Mlp(dtype=dtype), optimizer or AT_IMPORT[dtype]
        # In the dtype of the weights, as MLX does it.
        optimizer.init(model.trainable_parameters())
        loss_and_grad = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            optimizer.update(model, grads)
            return loss

        return loop(model, step, dtype)

    follows_float32(train)
    moments = AT_IMPORT[mx.float16].state["layers"][0]["weight"]
    assert {x.dtype for x in moments.values()} == {mx.float32}


def leave_out(optimizer, model, grads):
    if all(mx.isfinite(g).all().item() for g in grads["layers"][0].values()):
        optimizer.update(model, grads)


def raise_and_catch(optimizer, model, grads):
    with contextlib.suppress(ArithmeticError):
        if not mx.isfinite(grads["layers"][0]["weight"]).all().item():
            raise ArithmeticError
        optimizer.update(model, grads)


def hide(optimizer, model, grads):
    optimizer.update(model, tree_map(lambda g: mx.nan_to_num(g, 0.0, 0.0, 0.0), grads))


@pytest.mark.parametrize("guard", [leave_out, raise_and_catch, hide])
def test_a_host_that_leaves_out_bad_steps_itself_still_trains(guard):
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            guard(optimizer, model, grads)
            return loss

        start = mse(model)(*batch(0, dtype=dtype)).item()
        return loop(model, step, dtype, 60) / start

    with everywhere(lambda: GradScaler(2.0**30)) as here:
        assert train(mx.float16) < 0.05
    assert here.scalers[0].get_scale() < 2.0**20
    assert here.scalers[0].skipped_steps.item() >= 10


def test_no_step_is_lost_to_finding_the_scale():
    def train(dtype, gain=1e3):
        model, optimizer = Mlp(dtype=dtype), optim.Adam(1e-2)
        loss_and_grad = nn.value_and_grad(model, lambda x, y: gain * mse(model)(x, y))

        def step(x, y):
            loss, grads = loss_and_grad(x, y)
            optimizer.update(model, grads)
            return loss

        return loop(model, step, dtype, 10)

    scale, *rest = follows_float32(train)
    assert scale.endswith("0 of 10 gradients overflowed")
    assert rest == ["Adam: 10 steps applied, 0 skipped"]
    # From 65536, one halving per step is too slow for a run this short.
    with pytest.warns(UserWarning, match="all 10 steps"), everywhere(GradScaler):
        train(mx.float16)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_run_that_never_trains_warns_on_the_way_and_at_the_end(compiled):
    model, optimizer = Mlp(dtype=mx.float16), optim.AdamW(1e-2)
    before = bits(model.parameters())

    def step(x, y):
        loss_fn = lambda x, y: mse(model)(x, y) * INF  # noqa: E731
        _, grads = nn.value_and_grad(model, loss_fn)(x, y)
        optimizer.update(model, grads)

    def run(step):
        state = [model.state, optimizer.state]
        with everywhere() as here:
            if compiled:
                step = mx.compile(step, inputs=state, outputs=state)
            for i in range(120):
                step(*batch(i, dtype=mx.float16))
                mx.eval(state)
        assert here.report()[1] == "AdamW: 0 steps applied, 120 skipped"

    with pytest.warns(UserWarning, match="skipped") as warned:
        run(step)
    *on_the_way, last = (str(each.message) for each in warned)
    assert any("steps in a row were skipped" in text for text in on_the_way)
    assert last.startswith("Nothing was trained: all 120 steps of AdamW were")
    assert bits(model.parameters()) == before


def test_weights_that_no_optimizer_updates_are_reported():
    model = Mlp(dtype=mx.float16)

    def run():
        with everywhere():
            _, grads = nn.value_and_grad(model, mse(model))(*batch(0, dtype=mx.float16))
            new = tree_map(lambda p, g: p - 0.1 * g, model.parameters(), grads)
            model.update(new)

    with pytest.warns(UserWarning, match="no optimizer of mlx.optimizers took a step"):
        run()


def test_accumulated_gradients_and_the_hosts_own_clipping():
    def train(dtype):
        model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
        loss_and_grad = nn.value_and_grad(model, mse(model))
        state = [model.state, optimizer.state]

        @partial(mx.compile, inputs=state, outputs=state)
        def step(x, y, previous, is_update):
            loss, grads = loss_and_grad(x, y)
            if previous is not None:
                grads = tree_map(mx.add, grads, previous)
            if is_update:
                grads, _ = optim.clip_grad_norm(grads, 1.0)
                optimizer.update(model, grads)
                grads = None
            return loss, grads

        grads = None
        for i in range(40):
            loss, grads = step(*batch(i, dtype=dtype), grads, i % 4 == 3)
            mx.eval(loss, grads, state)
        return loss.item()

    assert follows_float32(train)[1] == "AdamW: 10 steps applied, 0 skipped"


def test_statistics_of_batch_norm_survive_an_overflow():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm(8)
            self.set_dtype(mx.float16)

        def __call__(self, x):
            return self.norm(self.first(x)).sum(axis=1, keepdims=True)

    model, optimizer = Normalized(), optim.Adam(1e-3)
    with everywhere():
        loss_and_grad = nn.value_and_grad(model, mse(model))
        for i in range(6):
            x, y = batch(i, dtype=mx.float16)
            _, grads = loss_and_grad(x * (INF if i == 3 else 1), y)
            optimizer.update(model, grads)
    assert math.isfinite(model.norm.running_mean.sum().item())
    assert optimizer.step.item() == 5
