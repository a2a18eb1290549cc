"""``GradScaler``: calls out of order, bad arguments, settings."""

import threading
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from support.helpers import INF, NAN, Mlp, batch, bits, mse
from support.scaler_helpers import apply, used

from mlx_gradscale import GradScaler

pytestmark = pytest.mark.core

# Misuse


def test_scaling_twice_is_refused():
    scaler, model = GradScaler(), Mlp()
    loss_fn = mse(model)
    with pytest.raises(TypeError, match="scaled already"):
        scaler.value_and_grad(model, scaler.scale_loss(loss_fn))
    with pytest.raises(TypeError, match="scaled already"):
        GradScaler().scale_loss(scaler.scale_loss(loss_fn))
    scaled, scaler = scaler.scale_loss(loss_fn), GradScaler()
    for hidden in (
        lambda x, y: GradScaler().scale(loss_fn(x, y)),
        lambda x, y: scaled(x, y),
        partial(scaled),
        mx.compile(lambda x, y: GradScaler().scale(loss_fn(x, y))),
    ):
        twice = scaler.value_and_grad(model, hidden)
        before = bits(model.parameters())
        with pytest.raises(RuntimeError, match="twice"):
            twice(*batch())
        assert bits(model.parameters()) == before
    # After the error, and outside of the loss function, it is allowed.
    once = mx.grad(lambda w: GradScaler().scale(w))
    assert once(mx.array(1.0)).item() == 65536.0


def test_a_loss_that_is_scaled_already_is_not_scaled_again():
    scaler = GradScaler()
    for other in (scaler, GradScaler()):
        with pytest.raises(RuntimeError, match="scaled already"):
            other.scale(scaler.scale(mx.array(1.0)))
        with pytest.raises(RuntimeError, match="scaled already"):
            mx.grad(lambda x, s=other: s.scale([scaler.scale(x)])[0])(mx.array(1.0))


def square(x):
    return (x * x).sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", ["scale", "scale_loss"])
def test_a_gradient_taken_inside_of_a_loss_may_be_scaled(way, compiled):
    scaler = GradScaler(init_scale=8.0)
    inner = {
        "scale": lambda w: scaler.scale(square(w)),
        "scale_loss": scaler.scale_loss(square),
    }[way]

    def loss_fn(w):
        gradient = mx.grad(inner)(w) / scaler.state["scale"]
        return square(w) + square(gradient)  # 5 w**2

    step = mx.grad(scaler.scale_loss(loss_fn))
    step = mx.compile(step, inputs=scaler.state) if compiled else step
    assert step(mx.array([3.0])).item() == 8.0 * 10.0 * 3.0


def test_a_loss_under_way_on_another_thread_is_no_reason_to_refuse():
    scaler, started, done = GradScaler(), threading.Event(), threading.Event()

    def loss_fn():
        started.set()
        assert done.wait(60)
        return mx.array(1.0)

    thread = threading.Thread(target=scaler.scale_loss(loss_fn))
    thread.start()
    try:
        assert started.wait(60)
        gradient = mx.grad(lambda w: scaler.scale(w))(mx.array(1.0)).item()
    finally:
        done.set()
        thread.join()
    assert gradient == 65536.0


@pytest.mark.parametrize("settings", [{}, {"init_scale": 4.0}], ids=str)
def test_a_device_as_in_pytorch_is_refused(settings):
    for call in (("cuda",), settings), ((), {"device": "mps", **settings}):
        with pytest.raises(TypeError, match="takes no device"):
            GradScaler(*call[0], **call[1])


def test_a_subclass_may_take_arguments_of_its_own():
    class Named(GradScaler):
        def __init__(self, name, device="cuda"):
            super().__init__(init_scale=4.0)
            self.name = name, device

    assert Named("run", device="mps").name == ("run", "mps")


def test_value_and_grad_wants_a_model_and_a_function():
    model, scaler = Mlp(), GradScaler()
    with pytest.raises(TypeError, match="takes a model first, got function"):
        scaler.value_and_grad(mse(model), model)
    with pytest.raises(TypeError, match="keep must be a function"):
        scaler.value_and_grad(model, mse(model), mx.float16, keep="layers.0")
    with pytest.raises(ValueError, match="without compute_dtype"):
        scaler.value_and_grad(model, mse(model), cast_inputs=False)


def unscale_twice(scaler, optimizer):
    scaler.unscale_(optimizer, {"w": mx.ones(1)})
    scaler.unscale_(optimizer, {"w": mx.ones(1)})


def unscale_after_step(scaler, optimizer):
    apply(scaler, optimizer, 1.0)
    scaler.unscale_(optimizer, {"w": mx.ones(1)})


def step_twice(scaler, optimizer):
    apply(scaler, optimizer, 1.0)
    apply(scaler, optimizer, 1.0)


def update_first(scaler, optimizer):
    scaler.update()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (unscale_twice, "twice"),
        (unscale_after_step, "after step"),
        (step_twice, "call update"),
        (update_first, "nothing recorded"),
    ],
)
def test_calls_out_of_order_are_refused(misuse, message):
    with pytest.raises(RuntimeError, match=message):
        misuse(used(), optim.SGD(1.0))


@pytest.mark.parametrize("method", ["step", "unscale_", "apply_gradients"])
def test_stepping_without_ever_scaling_is_refused(method):
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler()
    _, gradients = nn.value_and_grad(model, mse(model))(*batch())
    before = bits(model.parameters())
    arguments = {
        "step": (optimizer, model, gradients),
        "unscale_": (optimizer, gradients),
        "apply_gradients": (optimizer, gradients, model),
    }[method]
    with pytest.raises(RuntimeError, match="never scaled a loss"):
        getattr(scaler, method)(*arguments)
    assert bits(model.parameters()) == before


def test_after_a_refused_step_the_iteration_can_go_on():
    scaler, optimizer = used(), optim.SGD(1.0)
    with pytest.raises(ValueError, match="no such parameter"):
        scaler.apply_gradients(optimizer, {"x": mx.ones(1)}, {"w": mx.ones(1)})
    assert scaler.skipped_steps.item() == 0
    apply(scaler, optimizer, 1.0)
    scaler.update()


@pytest.mark.parametrize("first", ["adam", None, 0.1, optim.Adam, Mlp()])
def test_what_is_no_optimizer_is_refused(first):
    with pytest.raises(TypeError, match="optimizer of mlx"):
        used().apply_gradients(first, {"w": mx.ones(1)}, {"w": mx.ones(1)})


def test_step_wants_a_model():
    with pytest.raises(TypeError, match="takes a model"):
        used().step(optim.SGD(0.1), {"w": mx.ones(1)}, {"w": mx.ones(1)})


def test_keep_needs_a_compute_dtype():
    with pytest.raises(ValueError, match="compute_dtype"):
        GradScaler().value_and_grad(Mlp(), lambda: None, keep=lambda *_: True)


# Settings


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"growth_factor": 1.0}, ValueError),
        ({"growth_factor": 1.0 + 1e-9}, ValueError),
        ({"growth_factor": INF}, ValueError),
        ({"growth_factor": NAN}, ValueError),
        ({"growth_factor": True}, TypeError),
        ({"growth_factor": "2"}, TypeError),
        ({"backoff_factor": 0.0}, ValueError),
        ({"backoff_factor": 1.0}, ValueError),
        ({"backoff_factor": -0.5}, ValueError),
        ({"backoff_factor": None}, TypeError),
        ({"growth_interval": 0}, ValueError),
        ({"growth_interval": 2.0}, TypeError),
        ({"growth_interval": True}, TypeError),
        ({"growth_interval": 2**31}, ValueError),
        ({"backoff_interval": 0}, ValueError),
        ({"backoff_interval": 1.5}, TypeError),
        ({"init_scale": 0.0}, ValueError),
        ({"init_scale": -1.0}, ValueError),
        ({"init_scale": INF}, ValueError),
        ({"init_scale": NAN}, ValueError),
        ({"init_scale": True}, TypeError),
        ({"init_scale": 2.0**-65}, ValueError),
        ({"init_scale": 2.0**65}, ValueError),
        ({"init_scale": 2**65}, ValueError),
        ({"init_scale": 10**400}, ValueError),
        ({"init_scale": 1e39}, ValueError),
        ({"min_scale": 0.0}, ValueError),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError),
        ({"init_scale": 1.0, "min_scale": 2.0}, ValueError),
        ({"init_scale": 4.0, "max_scale": 2.0}, ValueError),
        ({"dynamic": 1}, TypeError),
        ({"enabled": "yes"}, TypeError),
        ({"init_scale": "cuda"}, TypeError),
        ({"init_scale": "mps"}, TypeError),
    ],
    ids=str,
)
def test_bad_settings_are_refused(arguments, error):
    with pytest.raises(error, match=r"must be|above|below|leave out"):
        GradScaler(**arguments)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("growth_factor", 0.5),
        ("backoff_factor", 2.0),
        ("growth_interval", 0),
        ("growth_interval", False),
    ],
)
def test_a_refused_setter_changes_nothing(name, bad):
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match="must be"):
        getattr(scaler, f"set_{name}")(bad)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("value", [128, 128.0, mx.array(128.0), np.float32(128)])
def test_the_scale_can_be_set_and_forgets_what_was_recorded(value):
    scaler, optimizer = used(), optim.SGD(1.0)
    apply(scaler, optimizer, INF)
    scaler.update(value)
    assert scaler.get_scale() == 128.0
    apply(scaler, optimizer, 1.0)


@pytest.mark.parametrize(
    "value", [0, -1.0, NAN, INF, True, "8", mx.ones(2), mx.array(True), [2.0], 2**2000]
)
def test_a_bad_new_scale_is_refused(value):
    scaler = GradScaler()
    with pytest.raises((TypeError, ValueError), match="new_scale must be"):
        scaler.update(value)
    assert scaler.get_scale() == 65536.0


def test_a_new_scale_is_clamped_to_the_limits():
    scaler = GradScaler(min_scale=2.0, max_scale=2.0**20)
    scaler.update(1.0)
    assert scaler.get_scale() == 2.0
    scaler.update(mx.array(1e9))
    assert scaler.get_scale() == 2.0**20
