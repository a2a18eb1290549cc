"""Loops as people write them, inside ``everywhere()``: near float32, or reported.

Each host failed once (mlx-examples, nanoGPT ports, PPO, GRPO, mflux).
"""

import contextlib
import os

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.helpers import INF, Mlp, batch, bits, each_mode, mse

from mlx_gradscale import everywhere

# Made before anything else, as a default argument of a class is.
AT_IMPORT = {dtype: optim.Adam(1e-2) for dtype in (mx.float32, mx.float16)}
HOSTS = []


def host(*lines, modes=(False, True)):
    """Make a test of a training function, which returns its last loss.

    ``lines`` are the optimizers in the report of ``everywhere()``.
    """

    def register(train):
        for compiled in modes:
            mode = "compiled" if compiled else "eager"
            marks = [pytest.mark.compiles, pytest.mark.many_kernels] * compiled
            name = f"{train.__name__}, {mode}"
            HOSTS.append(pytest.param(train, compiled, lines, id=name, marks=marks))
        return train

    return register


def follows_float32(train, *arguments):
    """Return the report about a host, after a comparison with float32."""
    mx.random.seed(1)
    mx.disable_compile()  # which the comparison does not need
    wanted = train(mx.float32, *arguments)
    if "MLX_DISABLE_COMPILE" not in os.environ:
        mx.enable_compile()
    mx.random.seed(1)
    with everywhere() as here:
        found = train(mx.float16, *arguments)
    assert found == pytest.approx(wanted, rel=0.02)
    return here.report()


def make_step(model, optimizer, loss_and_grad=None):
    """The step that most hosts have."""
    loss_and_grad = loss_and_grad or nn.value_and_grad(model, mse(model))

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    return step


def compile_over(state, step, compiled=True):
    return mx.compile(step, inputs=state, outputs=state) if compiled else step


def loop(model, step, dtype, steps=30):
    for i in range(steps):
        loss = step(*batch(i, dtype=dtype))
        mx.eval(loss, model.parameters())
    return loss.item()


@host("SGD: 30 steps applied, 0 skipped", modes=[True])
def step_compiled_over_a_state_of_the_model_alone_that_is_filled_later(dtype, _):
    model, state = Mlp(dtype=dtype), {}
    evaluate = mx.compile(mse(model), inputs=model.state)
    step = compile_over(state, make_step(model, optim.SGD(0.02)))
    state["model"] = model.state
    loop(model, step, dtype)
    return evaluate(*batch(99, dtype=dtype)).item()


@host("AdamW: 30 steps applied, 0 skipped")
def gradient_compiled_alone_or_in_a_compiled_step(dtype, compiled):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    gradient = compile_over(model.state, nn.value_and_grad(model, mse(model)))
    step = make_step(model, optimizer, gradient)
    state = [model.state, optimizer.state]
    return loop(model, compile_over(state, step, compiled), dtype)


@host("Muon: 30 steps applied, 0 skipped", "Adam: 30 steps applied, 0 skipped")
def two_optimizers_on_one_model(dtype, compiled):
    model = Mlp(dtype=dtype)
    muon, adam = optim.Muon(1e-2), optim.Adam(1e-2)
    loss_and_grad = nn.value_and_grad(model, mse(model))

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        for optimizer, ndim in ((muon, 2), (adam, 1)):
            chosen = [
                {k: g for k, g in layer.items() if g.ndim == ndim}
                for layer in grads["layers"]
            ]
            optimizer.update(model, {"layers": chosen})
        # For embeddings, which this model does not have.
        optim.SGD(0.1).update(model, {"layers": [{}, {}]})
        return loss

    state = [model.state, muon.state, adam.state]
    loss = loop(model, compile_over(state, step, compiled), dtype)
    assert "bias" not in muon.state["layers"][0]
    return loss


@host("MultiOptimizer: 30 steps applied, 0 skipped")
def multi_optimizer(dtype, compiled):
    model, groups = Mlp(dtype=dtype), [optim.AdamW(1e-2), optim.SGD(0.02)]
    optimizer = optim.MultiOptimizer(groups, [lambda path, x: "0" in path])
    state = [model.state, optimizer.state]
    step = compile_over(state, make_step(model, optimizer), compiled)
    loss = loop(model, step, dtype)
    assert [type(each) for each in optimizer.optimizers] == [optim.AdamW, optim.SGD]
    return loss


@host("Adam: 30 steps applied, 0 skipped", "Adam: 30 steps applied, 0 skipped")
def two_models_stepped_after_both_gradients(dtype, compiled):
    actor, critic = Mlp(dtype=dtype), Mlp(dtype=dtype)
    optimizers = optim.Adam(1e-2), optim.Adam(3e-3)
    gradients = [nn.value_and_grad(model, mse(model)) for model in (actor, critic)]

    def step(x, y):
        # Both gradients first, then both updates.
        (one, first), (other, second) = (gradient(x, y) for gradient in gradients)
        optimizers[1].update(critic, second)
        optimizers[0].update(actor, first)
        return one + other

    state = [part.state for part in (actor, critic, *optimizers)]
    return loop(critic, compile_over(state, step, compiled), dtype)


@host("AdamW: 15 steps applied, 0 skipped", "AdamW: 15 steps applied, 0 skipped")
def second_phase_with_a_new_optimizer(dtype, compiled):
    model, optimizers = Mlp(dtype=dtype), [optim.AdamW(1e-2), optim.AdamW(1e-3)]
    for optimizer in optimizers:
        state = [model.state, optimizer.state]
        step = compile_over(state, make_step(model, optimizer), compiled)
        loss = loop(model, step, dtype, 15)
    return loss


@host("AdamW: 25 steps applied, 0 skipped", modes=[False])
def state_dropped_and_set_again_and_then_started_anew(dtype, _):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    step = make_step(model, optimizer)
    for empty in ({}, []):
        loop(model, step, dtype, 10)
        saved, optimizer.state = optimizer.state, empty
        mse(model)(*batch(0, dtype=dtype))  # a preview, in the memory that is free now
        optimizer.state = saved
    rate = optimizer.learning_rate
    optimizer.state = {"step": mx.array(0, mx.uint64), "learning_rate": rate}
    loss = loop(model, step, dtype, 5)
    assert optimizer.step.item() == 5
    return loss


@host("Adam: 30 steps applied, 0 skipped")
def gradients_of_a_parameter_tree(dtype, compiled):
    model, optimizer = Mlp(dtype=dtype), optim.Adam(1e-2)
    holder = {"parameters": model.trainable_parameters()}
    optimizer.init(holder["parameters"])

    def loss_fn(parameters, x, y):
        model.update(parameters)
        return mse(model)(x, y)

    def step(x, y, has_value):
        before = holder["parameters"]
        if has_value:
            _, grads = mx.value_and_grad(loss_fn)(before, x, y)
        else:
            grads = mx.grad(loss_fn)(before, x, y)
        holder["parameters"] = optimizer.apply_gradients(grads, before)

    step = compile_over([holder, optimizer.state], step, compiled)
    for i in range(30):
        step(*batch(i, dtype=dtype), i % 2 == 0)
        mx.eval(holder, optimizer.state)
    assert holder["parameters"]["layers"][0]["weight"].dtype == dtype
    return loss_fn(holder["parameters"], *batch(99, dtype=dtype)).item()


@host("AdamW: 25 steps applied, 0 skipped", modes=[True])
def learning_rate_and_loaded_state_of_a_compiled_step(dtype, _):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    state = [model.state, optimizer.state]
    step = compile_over(state, make_step(model, optimizer))
    loop(model, step, dtype, 10)
    saved = tree_map(mx.array, optimizer.state)
    optimizer.state["learning_rate"] = mx.array(0.0)
    before = bits(model.parameters())
    loop(model, step, dtype, 5)
    assert bits(model.parameters()) == before
    # As a host resumes: the optimizer gets the dict that was saved after 10 steps.
    optimizer.state = state[1] = saved
    loss = loop(model, step, dtype, 10)
    assert optimizer.step.item() == 20
    return loss


@host("AdamW: 25 steps applied, 0 skipped")
def layer_unfrozen_during_the_run(dtype, compiled):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    state = [model.state, optimizer.state]
    step = compile_over(state, make_step(model, optimizer), compiled)
    model.layers[0].freeze()
    loop(model, step, dtype, 5)
    model.unfreeze()
    optimizer.init(model.trainable_parameters())
    return loop(model, step, dtype, 20)


@host("Adam: 30 steps applied, 0 skipped", modes=[False])
def optimizer_made_before_everywhere(dtype, _):
    model, optimizer = Mlp(dtype=dtype), AT_IMPORT[dtype]
    # In the dtype of the weights, as MLX does it.
    optimizer.init(model.trainable_parameters())
    loss = loop(model, make_step(model, optimizer), dtype)
    moments = optimizer.state["layers"][0]["weight"]
    assert {x.dtype for x in moments.values()} == {mx.float32}
    return loss


@host("AdamW: 30 steps applied, 0 skipped", modes=[False])
def float32_adapters_on_a_half_precision_model(dtype, _):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    model.layers[1].set_dtype(mx.float32)
    model.layers[0].freeze()
    loss_and_grad = nn.value_and_grad(model, mse(model))

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        # A tree without any half-precision parameter.
        model.update(optimizer.apply_gradients(grads, model.trainable_parameters()))
        return loss

    return loop(model, step, dtype)


@host("AdamW: 10 steps applied, 0 skipped", modes=[True])
def accumulated_and_clipped_gradients(dtype, _):
    model, optimizer = Mlp(dtype=dtype), optim.AdamW(1e-2)
    loss_and_grad = nn.value_and_grad(model, mse(model))

    def step(x, y, previous, is_update):
        loss, grads = loss_and_grad(x, y)
        if previous is not None:
            grads = tree_map(mx.add, grads, previous)
        if is_update:
            grads, _ = optim.clip_grad_norm(grads, 1.0)
            optimizer.update(model, grads)
            grads = None
        return loss, grads

    state, grads = [model.state, optimizer.state], None
    step = compile_over(state, step)
    for i in range(40):
        loss, grads = step(*batch(i, dtype=dtype), grads, i % 4 == 3)
        mx.eval(loss, grads, state)
    return loss.item()


@pytest.mark.parametrize(("train", "compiled", "lines"), HOSTS)
def test_trainer_inside_everywhere_follows_float32(train, compiled, lines):
    report = follows_float32(train, compiled)
    assert [line for line in report if "loss scale" not in line] == list(lines)
    n_models = 2 if train is two_models_stepped_after_both_gradients else 1
    assert len(report) == len(lines) + n_models


@pytest.mark.compiles
def test_gradient_function_compiled_alone_follows_the_scale():
    warns = pytest.warns(UserWarning, match="of 30 steps because.*omit init_scale=.$")
    with warns, everywhere(init_scale=2.0**40) as here:
        gradient_compiled_alone_or_in_a_compiled_step(mx.float16, False)
    # It had to fall by about 2**24.
    assert here.scalers[0].get_scale() < 2.0**20


def test_gradients_of_later_arguments_are_the_same_as_in_mlx():
    tree, x = {"w": mx.ones(2, mx.float16)}, mx.full(2, 3.0, mx.float16)
    with everywhere() as here:
        grads = mx.grad(lambda tree, x: (tree["w"] * x).sum(), argnums=1)(tree, x)
    assert (grads.tolist(), grads.dtype) == ([1.0, 1.0], mx.float16)
    assert not here.scalers


class Host:
    """An optimizer behind a host's own check for bad gradients."""

    def __init__(self, guard):
        self.optimizer, self.guard = optim.AdamW(1e-2), guard

    def update(self, model, grads):
        if self.guard == "nan_to_num":
            grads = tree_map(lambda g: mx.nan_to_num(g, 0.0, 0.0, 0.0), grads)
        elif not mx.isfinite(optim.clip_grad_norm(grads, 1.0)[1]).item():
            if self.guard == "raise":
                raise ArithmeticError
            return
        self.optimizer.update(model, grads)


@pytest.mark.parametrize("guard", ["continue", "raise", "nan_to_num"])
def test_trainer_that_skips_non_finite_steps_itself_still_trains(guard):
    model = Mlp(dtype=mx.float16)
    start = mse(model)(*batch(0, dtype=mx.float16)).item()
    with everywhere(init_scale=2.0**30) as here:
        step = make_step(model, Host(guard))
        for i in range(60):
            with contextlib.suppress(ArithmeticError):
                loss = step(*batch(i, dtype=mx.float16))
    assert loss.item() < 0.05 * start
    assert here.scalers[0].get_scale() < 2.0**20
    assert here.scalers[0].skipped_steps.item() >= 10


def test_scale_found_skips_no_step_even_if_later_gradients_are_32_times_as_large():
    def train(dtype):
        model, sizes = Mlp(dtype=dtype), [1e3, 32e3, *[1e3] * 8]
        gradient = nn.value_and_grad(model, lambda x, y, k: k * mse(model)(x, y))

        def loss_and_grad(x, y):
            # Not in the loss function, which runs several times to find the scale.
            return gradient(x, y, sizes.pop(0))

        # As mlx-lm-lora's GRPO, it raises at the first overflow.
        return loop(model, make_step(model, Host("raise"), loss_and_grad), dtype, 10)

    scale, *rest = follows_float32(train)
    assert scale.endswith("0 of 10 gradients overflowed")
    assert rest == ["AdamW: 10 steps applied, 0 skipped"]
    # From 65536, one halving per step is too slow for a run this short. After an
    # exception, everywhere() does not warn.
    with pytest.raises(ArithmeticError), everywhere(init_scale=65536.0):
        train(mx.float16)


@each_mode
def test_run_that_skips_every_step_warns_during_training_and_at_the_end(compiled):
    model, optimizer = Mlp(dtype=mx.float16), optim.AdamW(1e-2)
    before, state = bits(model.parameters()), [model.state, optimizer.state]
    warns = pytest.warns(UserWarning, match="skipped|every loss scale")
    with warns as warned, everywhere() as here:
        gradient = nn.value_and_grad(model, lambda x, y: mse(model)(x, y) * INF)
        step = compile_over(state, make_step(model, optimizer, gradient), compiled)
        for i in range(120):
            step(*batch(i, dtype=mx.float16))
            mx.eval(state)
    assert here.report()[1] == "AdamW: 0 steps applied, 120 skipped"
    first, skips, last = (str(each.message) for each in warned)
    assert first.startswith("The loss or the gradients of the first batch are non-fin")
    # Once, although the model and the optimizer have a scaler each.
    assert "At least 50 steps in a row" in skips
    assert "not trained: AdamW skipped 120 of 120 steps because" in last
    assert first.endswith('pass float32_layers="auto".')
    assert last.endswith('pass float32_layers="auto".')
    assert bits(model.parameters()) == before
