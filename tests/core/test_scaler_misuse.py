"""``GradScaler``: calls out of order and bad arguments."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import Mlp, batch, each_mode, mse
from support.optimizer_helpers import assert_near
from support.scaler_helpers import apply, every_warning, used

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer


def test_scaled_and_unscaled_gradients_are_not_mixed_in_one_scaler():
    model = Mlp()
    unscaled = [
        lambda s: s.value_and_grad(model, mse(model)),
        lambda s: s.scale_loss(mse(model), model),
        lambda s: LossScaleOptimizer(optim.SGD(0.1), s).scale_loss(mse(model), model),
    ]
    scaled = lambda s: s.scale(mx.array(1.0))  # noqa: E731
    for one in unscaled:
        for first, second in ((one, scaled), (scaled, one)):
            scaler = GradScaler()
            first(scaler)
            with pytest.raises(RuntimeError, match="without calling scale"):
                second(scaler)
            first(scaler)


def test_pytorch_device_argument_is_refused():
    with pytest.raises(TypeError, match="has no device argument"):
        GradScaler("cuda")
    with pytest.raises(TypeError, match="device"):
        GradScaler(device="mps")


def test_value_and_grad_refuses_arguments_that_are_not_a_model_or_a_function():
    model, scaler = Mlp(), GradScaler()
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got function"):
        scaler.value_and_grad(mse(model), model)
    with pytest.raises(ValueError, match="require compute_dtype"):
        scaler.value_and_grad(model, mse(model), cast_inputs=False)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("unscale unscale", "twice"),
        ("step unscale", "after step"),
        ("step step", "Call update"),
        ("update", "without a step"),
    ],
)
def test_scaler_calls_out_of_order_are_refused(calls, message):
    scaler, optimizer = used(), optim.SGD(1.0)
    call = {
        "unscale": lambda: scaler.unscale_(optimizer, {"w": mx.ones(1)}),
        "step": lambda: apply(scaler, optimizer, 1.0),
        "update": scaler.update,
    }
    *before, last = calls.split()
    for name in before:
        call[name]()
    with pytest.raises(RuntimeError, match=message):
        call[last]()


@each_mode
@pytest.mark.parametrize("kind", ["scaler", "wrapper"])
def test_gradients_of_plain_value_and_grad_are_treated_as_unscaled(kind, compiled):
    mx.random.seed(4)
    model, other, inner = Mlp(), Mlp(), optim.SGD(0.1)
    other.update(model.parameters())
    scaler = GradScaler()
    optimizer = LossScaleOptimizer(inner, scaler) if kind == "wrapper" else inner
    update = partial(scaler.minimize, inner) if optimizer is inner else optimizer.update
    plain = nn.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, scaler.state]

    def step(x, y):
        update(model, plain(x, y)[1])

    step = mx.compile(step, inputs=state, outputs=state) if compiled else step
    bare, expected = optim.SGD(0.1), nn.value_and_grad(other, mse(other))
    for seed in range(3):
        step(*batch(seed))
        bare.update(other, expected(*batch(seed))[1])
    assert_near(model.parameters(), other.parameters())


def loss_scaled(scaler):
    return LossScaleOptimizer(optim.SGD(0.1), scaler)


@pytest.mark.parametrize(
    ("dtype", "make", "is_scaled", "n_warnings"),
    [
        (mx.float16, lambda: loss_scaled(GradScaler()), False, 1),
        (mx.float16, lambda: loss_scaled(GradScaler()), True, 0),
        (mx.float16, lambda: MasterWeightOptimizer(optim.SGD(0.1)), False, 1),
        (mx.float16, lambda: MasterWeightOptimizer(optim.SGD(0.1)), True, 1),
        (mx.bfloat16, lambda: MasterWeightOptimizer(optim.SGD(0.1)), False, 0),
        (mx.float32, lambda: loss_scaled(GradScaler()), False, 0),
        (mx.float16, lambda: loss_scaled(GradScaler(enabled=False)), False, 0),
        # The user has fixed the scale at 1.
        (mx.float16, lambda: loss_scaled(GradScaler(1.0, dynamic=False)), False, 0),
    ],
)
def test_float16_parameters_warn_once_if_no_scale_entered_their_gradients(
    dtype, make, is_scaled, n_warnings
):
    model, optimizer = Mlp(dtype=dtype), make()
    x, y = batch(dtype=dtype)
    differentiate = optimizer.value_and_grad if is_scaled else nn.value_and_grad
    loss_and_grad = differentiate(model, mse(model))
    with every_warning() as caught:
        for _ in range(3):
            optimizer.update(model, loss_and_grad(x, y)[1])
    found = ["no scale has entered" in str(w.message) for w in caught]
    assert found == [True] * n_warnings


def test_iteration_continues_after_a_refused_step():
    scaler, optimizer = used(), optim.SGD(1.0)
    with pytest.raises(ValueError, match="no such parameter"):
        scaler.apply_gradients(optimizer, {"x": mx.ones(1)}, {"w": mx.ones(1)})
    assert scaler.skipped_steps.item() == 0
    apply(scaler, optimizer, 1.0)
    scaler.update()


@pytest.mark.parametrize("first", ["adam", None, 0.1, optim.Adam, Mlp()])
def test_apply_gradients_refuses_an_argument_that_is_not_an_optimizer(first):
    with pytest.raises(TypeError, match="Expected an mlx"):
        used().apply_gradients(first, {"w": mx.ones(1)}, {"w": mx.ones(1)})


def test_model_passed_as_gradients_is_refused_and_unchanged():
    model, optimizer, scaler = nn.Linear(2, 1), optim.SGD(1.0), GradScaler()
    scaler.scale(mx.array(1.0))
    before = np.array(model.weight)
    with pytest.raises(TypeError, match="must be the gradients, got a model"):
        scaler.unscale_(optimizer, model)
    with pytest.raises(TypeError, match=r"gradients must be a dict.*Linear"):
        scaler.step(optimizer, model, model)
    with pytest.raises(TypeError, match=r"gradients must be a dict.*Linear"):
        LossScaleOptimizer(optimizer).update(model, model)
    assert np.array_equal(np.array(model.weight), before)


@pytest.mark.compiles
def test_scaler_missing_from_compile_inputs_raises_when_it_is_read():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(64.0)
    loss_and_grad = scaler.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        scaler.minimize(optimizer, model, loss_and_grad(x, y)[1])

    state = [model.state, optimizer.state]
    mx.compile(step, inputs=state, outputs=state)(*batch())
    with pytest.raises(RuntimeError, match=r"pass scaler\.state or optimizer"):
        scaler.get_scale()


@pytest.mark.compiles
def test_init_with_a_group_inside_mx_compile_is_refused_with_advice():
    model, group = Mlp(), mx.distributed.init()
    optimizer = LossScaleOptimizer(optim.SGD(0.1), group=group, average=True)
    optimizer._ranks.is_single = False  # as in a larger group
    loss_and_grad = optimizer.value_and_grad(model, mse(model))

    def step(x, y):
        optimizer.update(model, loss_and_grad(x, y)[1])

    state = [model.state, optimizer.state]
    with pytest.raises(RuntimeError, match=r"call init\(\) .*outside the compiled"):
        mx.compile(step, inputs=state, outputs=state)(*batch())
