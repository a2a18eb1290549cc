"""``GradScaler``: calls out of order, bad arguments, settings."""

import warnings
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import INF, NAN, Mlp, batch, bits, each_mode, mse
from support.scaler_helpers import apply, used

from mlx_gradscale import GradScaler, LossScaleOptimizer

# Misuse


def test_scaling_a_loss_function_twice_is_refused():
    scaler, model = GradScaler(), Mlp()
    loss_fn = mse(model)
    for call in (
        lambda f: scaler.value_and_grad(model, f),
        lambda f: GradScaler().scale_loss(f),
        lambda f: LossScaleOptimizer(optim.SGD(0.1)).scale_loss(f, model),
    ):
        with pytest.raises(TypeError, match="scaled twice"):
            call(scaler.scale_loss(loss_fn))


def test_the_two_modes_are_not_mixed_and_the_error_says_which_was_first():
    model = Mlp()
    unscaled = [
        lambda s: s.value_and_grad(model, mse(model)),
        lambda s: s.scale_loss(mse(model), model),
        lambda s: LossScaleOptimizer(optim.SGD(0.1), s).scale_loss(mse(model), model),
    ]
    for one in unscaled:
        for first, second in ((one, lambda s: s.scale(mx.array(1.0))),) * 2:
            for a, b in ((first, second), (second, first)):
                scaler = GradScaler()
                a(scaler)
                with pytest.raises(RuntimeError, match="without calling scale"):
                    b(scaler)
                a(scaler)


def test_a_device_as_in_pytorch_is_refused():
    with pytest.raises(TypeError, match="has no device argument"):
        GradScaler("cuda")
    with pytest.raises(TypeError, match="device"):
        GradScaler(device="mps")


def test_a_subclass_may_take_arguments_of_its_own():
    class Named(GradScaler):
        def __init__(self, name, device="cuda"):
            super().__init__(init_scale=4.0)
            self.name = name, device

    assert Named("run", device="mps").name == ("run", "mps")


def test_value_and_grad_refuses_what_is_no_model_or_function():
    model, scaler = Mlp(), GradScaler()
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got function"):
        scaler.value_and_grad(mse(model), model)
    with pytest.raises(ValueError, match="require compute_dtype"):
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
        (step_twice, "Call update"),
        (update_first, "without a step"),
    ],
)
def test_calls_out_of_order_are_refused(misuse, message):
    with pytest.raises(RuntimeError, match=message):
        misuse(used(), optim.SGD(1.0))


@each_mode
def test_gradients_of_plain_value_and_grad_are_taken_as_true_with_one_warning(compiled):
    found = []
    for scaled in (False, True):
        mx.random.seed(4)
        model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler()
        plain = nn.value_and_grad(model, mse(model))
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, scaler.state]

        def step(x, y, model=model, optimizer=optimizer, scaler=scaler, plain=plain):
            scaler.minimize(optimizer, model, plain(x, y)[1])

        if not scaled:
            for _ in range(3):
                optimizer.update(model, plain(*batch())[1])
        else:
            step = mx.compile(step, inputs=state, outputs=state) if compiled else step
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    step(*batch())
            messages = [str(w.message) for w in caught]
            assert ["do not come from this scaler" in m for m in messages] == [True]
        found.append(dict(tree_flatten(model.parameters())))
    for path, x in found[0].items():
        assert mx.allclose(x, found[1][path], rtol=1e-5, atol=1e-6), path


@pytest.mark.parametrize("wrap", [False, True], ids=["step", "update"])
def test_gradients_of_another_model_raise_at_the_step(wrap):
    model, other, scaler = Mlp(), nn.Linear(3, 3), GradScaler()
    _, grads = scaler.value_and_grad(model, mse(model))(*batch())
    optimizer = LossScaleOptimizer(optim.SGD(0.1), scaler)
    optimizer.init(other.trainable_parameters())
    before = bits([other.parameters(), scaler.state])
    step = optimizer.update if wrap else partial(scaler.step, optim.SGD(0.1))
    with pytest.raises(ValueError, match=r"'layers.*', but no such parameter"):
        step(other, grads)
    assert bits([other.parameters(), scaler.state]) == before


def test_after_a_refused_step_the_iteration_continues():
    scaler, optimizer = used(), optim.SGD(1.0)
    with pytest.raises(ValueError, match="no such parameter"):
        scaler.apply_gradients(optimizer, {"x": mx.ones(1)}, {"w": mx.ones(1)})
    assert scaler.skipped_steps.item() == 0
    apply(scaler, optimizer, 1.0)
    scaler.update()


@pytest.mark.parametrize("first", ["adam", None, 0.1, optim.Adam, Mlp()])
def test_what_is_no_optimizer_is_refused(first):
    with pytest.raises(TypeError, match="Expected an mlx"):
        used().apply_gradients(first, {"w": mx.ones(1)}, {"w": mx.ones(1)})


def test_step_refuses_what_is_no_model():
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        used().step(optim.SGD(0.1), {"w": mx.ones(1)}, {"w": mx.ones(1)})


def test_keep_needs_a_compute_dtype():
    with pytest.raises(ValueError, match="compute_dtype"):
        GradScaler().value_and_grad(Mlp(), lambda: None, keep=lambda *_: True)


# Settings


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"growth_factor": 1.0 + 1e-9}, ValueError),
        ({"backoff_factor": None}, TypeError),
        ({"growth_interval": 2.0}, TypeError),
        ({"backoff_interval": 0}, ValueError),
        ({"init_scale": NAN}, ValueError),
        ({"init_scale": True}, TypeError),
        ({"init_scale": 10**400}, ValueError),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError),
        ({"init_scale": 1.0, "min_scale": 2.0}, ValueError),
        ({"init_scale": 4.0, "max_scale": 2.0}, ValueError),
        ({"dynamic": 1}, TypeError),
        ({"init_scale": "cuda"}, TypeError),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_the_constructor(arguments, error):
    with pytest.raises(error, match=r"must be|must not exceed|Omit"):
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
def test_setting_the_scale_forgets_the_steps_since_the_last_update(value):
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


@pytest.mark.parametrize("enabled", [1, 0, "yes", "", np.bool_(True), None])
def test_enabled_is_truthy_as_in_pytorch(enabled):
    assert GradScaler(enabled=enabled).is_enabled() is bool(enabled)


def test_a_model_in_place_of_gradients_is_refused_and_stays_as_it_was():
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


def test_scale_outside_of_the_differentiated_function_warns():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(64.0)
    loss, grads = nn.value_and_grad(model, mse(model))(*batch())
    scaler.scale(loss)
    with pytest.warns(UserWarning, match="its result was never differentiated"):
        scaler.step(optimizer, model, grads)


def test_scale_inside_of_the_differentiated_function_does_not_warn():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(64.0)
    scaled = nn.value_and_grad(model, lambda x, y: scaler.scale(mse(model)(x, y)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            _, grads = scaled(*batch())
            scaler.step(optimizer, model, grads)
            scaler.update()


@pytest.mark.compiles
def test_scaler_that_a_compiled_step_does_not_list_says_so_when_it_is_read():
    model, optimizer, scaler = Mlp(), optim.SGD(0.1), GradScaler(64.0)
    loss_and_grad = scaler.value_and_grad(model, mse(model))
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        scaler.minimize(optimizer, model, loss_and_grad(x, y)[1])

    state = [model.state, optimizer.state]
    mx.compile(step, inputs=state, outputs=state)(*batch())
    with pytest.raises(RuntimeError, match=r"list scaler\.state in its inputs="):
        scaler.get_scale()
