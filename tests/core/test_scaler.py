"""``GradScaler`` as a user meets it: scaling, stepping, and calls that are refused."""

from collections import namedtuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_map
from support.helpers import BAD_VALUES, INF, Mlp, batch, bits, mse, refused
from support.optimizer_helpers import Training, wrapped
from support.scaler_helpers import apply, used

from mlx_gradscale import GradScaler, LossScaleOptimizer

Pair = namedtuple("Pair", "a b")


def test_scale_multiplies_trees_in_float32_and_is_differentiable():
    scaler = GradScaler()
    out = scaler.scale({"x": [mx.array(1.0)], "y": Pair(mx.array(2), mx.array([3.0]))})
    assert out["x"][0].item() == 65536
    assert isinstance(out["y"], Pair)
    assert (out["y"].a.item(), out["y"].b.tolist()) == (2 * 65536, [3 * 65536])
    with pytest.warns(UserWarning, match="loss is float16"):
        assert GradScaler().scale(mx.array(2.0, mx.float16)).item() == 2 * 65536
    gradient = mx.grad(lambda x: scaler.scale(x * x))(mx.array(3.0))
    assert gradient.item() == 6 * 65536


@pytest.mark.parametrize("outputs", ["loss", 1.0, None, {"a": 1}, [mx.array(1.0), 2]])
def test_scale_refuses_leaves_that_are_not_arrays(outputs):
    with pytest.raises(TypeError, match="tree of mx"):
        GradScaler().scale(outputs)


def test_unscale_without_a_step_drops_a_batch_and_updates_the_scale():
    model, optimizer = Mlp(), optim.SGD(1)
    scaler = GradScaler(1024.0, growth_interval=2)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    before = bits(model.parameters())
    for factor, scale in ((INF, 512.0), (1.0, 512.0), (1.0, 1024.0), (INF, 512.0)):
        x, y = batch()
        scaler.unscale_(optimizer, loss_and_grad(x * factor, y)[1])
        scaler.update()
        assert scaler.get_scale() == scale
    assert bits(model.parameters()) == before
    assert scaler.skipped_steps.item() == 0
    for factor in (INF, 1.0):  # all gradients that were unscaled count
        scaler.unscale_(optimizer, loss_and_grad(batch()[0] * factor, batch()[1])[1])
    scaler.update()
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapper"])
@pytest.mark.parametrize(
    ("scaled", "stepped"), [*[(1.0, value) for value in BAD_VALUES.values()], (INF, 0)]
)
def test_gradient_that_is_not_finite_before_or_after_clipping_is_skipped(
    scaled, stepped, wrap
):
    scaler = used()
    optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler) if wrap else optim.SGD(1.0)
    scaler.unscale_(optimizer, {"w": mx.array([scaled])})
    gradients, weights = {"w": mx.array([float(stepped)])}, {"w": mx.array([1.0])}
    new = scaler.apply_gradients(optimizer, gradients, weights)
    scaler.update()
    assert (new["w"].item(), optimizer.step.item()) == (1.0, 0)
    assert scaler.get_scale() == 32768


def test_unscale_works_in_place_even_if_its_result_is_ignored():
    scaler, optimizer = used(GradScaler(1024.0)), optim.SGD(1.0)
    gradients = {"a": [mx.array([3.0]) * 1024], "b": {"w": mx.array([4.0]) * 1024}}
    weights = tree_map(mx.zeros_like, gradients)
    assert scaler.unscale_(optimizer, gradients) is gradients
    assert gradients["a"][0].item() == 3.0
    gradients, norm = optim.clip_grad_norm(gradients, 1.0)
    assert norm.item() == 5.0
    new = scaler.apply_gradients(optimizer, gradients, weights)
    assert new["a"][0].item() == pytest.approx(-0.6, rel=1e-5)


@pytest.mark.compiles
def test_tree_of_any_containers_unscaled_for_two_optimizers_is_unscaled_once():
    trees = [[0.5, 2.0], (0.5, 2.0), Pair(0.5, 2.0)]  # mx.compile takes them for one
    trees += [0.5, {"a": (0.5, [2.0]), "b": [({"c": 0.5},)]}]
    trees += [{"a": tree, "b": [tree]} for tree in trees[:3]]
    scaler = used(GradScaler(8.0))
    for tree in trees:
        grads = tree_map(lambda x: mx.array(8.0 * x), tree)
        for optimizer in (optim.SGD(1.0), optim.SGD(1.0)):
            grads = scaler.unscale_(optimizer, grads)
            # repr() distinguishes lists, tuples and namedtuples at any depth.
            assert repr(tree_map(mx.array.item, grads)) == repr(tree)
    buffer = {"w": mx.array(4.0)}
    grads = scaler.unscale_(optim.SGD(1.0), dict(buffer))
    buffer["w"] *= 0  # the scaled gradient is no longer needed
    new = scaler.apply_gradients(optim.SGD(1.0), grads, {"w": mx.array(1.0)})
    assert new["w"].item() == 0.5


def test_buffer_that_accumulates_scaled_gradients_again_is_unscaled_again():
    scaler, optimizer, buffer = GradScaler(8.0), optim.SGD(1.0), {"w": mx.array(0.0)}
    for _ in range(3):
        buffer["w"] *= 0
        buffer["w"] += mx.grad(lambda w: scaler.scale(3.0 * w))(mx.array(1.0))
        scaler.unscale_(optimizer, buffer)
        assert buffer["w"].item() == 3.0
        scaler.apply_gradients(optimizer, buffer, {"w": mx.array(1.0)})
        scaler.update()


def test_finite_gradient_that_unscaling_overflows_is_skipped():
    # PyTorch looks only at the scaled gradient and applies the inf.
    scaler, weights = used(GradScaler(2.0**-64)), {"w": mx.array([1.0])}
    new = scaler.apply_gradients(optim.SGD(1.0), {"w": mx.array([1e20])}, weights)
    assert new["w"].item() == 1.0
    assert not scaler.last_step_applied.item()


def test_frozen_and_quantized_layers_stay_unchanged_and_the_others_train():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    nn.quantize(model, class_predicate=lambda path, m: path == "layers.0")
    model.layers[1].freeze()
    scaler, optimizer = GradScaler(init_scale=128.0), optim.AdamW(1e-2)
    loss_fn = scaler.value_and_grad(
        model, lambda x: mx.mean(model(x).astype(mx.float32)), mx.float16
    )
    before = bits(model.parameters())
    _, gradients = loss_fn(mx.ones((2, 64)))
    assert scaler.minimize(optimizer, model, gradients).item()
    changed = {k for k, v in bits(model.parameters()).items() if before[k] != v}
    # The bias of a quantized layer is trained; its packed weight is not.
    assert changed == {"layers.0.bias", "layers.2.weight", "layers.2.bias"}


@pytest.mark.parametrize("grads", [{}, {"layers": [{}, {}]}])
def test_step_without_gradients_is_refused_and_initializes_nothing(grads):
    # As in PyTorch: an applied step would let the scale grow.
    scaler, model, optimizer = used(), Mlp(), optim.Adam(0.1)
    for call in (scaler.minimize, scaler.step):
        with refused(ValueError, "No floating-point parameter", model, scaler):
            call(optimizer, model, grads)
    scaler.minimize(optimizer, model, tree_map(mx.ones_like, model.parameters()))
    assert optimizer.step.item() == 1


WAYS = {
    "value_and_grad": lambda s, model: s.value_and_grad(model, mse(model)),
    "scale_loss": lambda s, model: s.scale_loss(mse(model), model),
    "wrapper": lambda s, model: LossScaleOptimizer(optim.SGD(0.1), s).value_and_grad(
        model, mse(model)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_scaled_and_unscaled_gradients_are_not_mixed_in_one_scaler(way):
    unscaled = lambda s: way(s, Mlp())  # noqa: E731
    scaled = lambda s: s.scale(mx.array(1.0))  # noqa: E731
    for first, second in ((unscaled, scaled), (scaled, unscaled)):
        scaler = GradScaler()
        first(scaler)
        with pytest.raises(RuntimeError, match="without calling scale"):
            second(scaler)
        first(scaler)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("unscale unscale", "twice"),
        ("step unscale", "after step"),
        ("step step", "Call update"),
        ("update", r"without a step.*to drop a batch, unscale_\(\)"),
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


WRONG = {
    "a device": (lambda s, m: GradScaler("cuda"), "has no device argument"),
    "device=": (lambda s, m: GradScaler(device="mps"), "device"),
    "no model": (lambda s, m: s.value_and_grad(mse(m), m), r"an nn\.Module, got func"),
    "cast_inputs": (
        lambda s, m: s.value_and_grad(m, mse(m), cast_inputs=False),
        "require compute_dtype",
    ),
    "a dict for the model": (lambda s, m: s.step(optim.SGD(0.1), {}, {}), r"nn\.Mod"),
    "a dict for the wrapper's model": (
        lambda s, m: wrapped().update({}, m),
        r"must be an nn\.Module, got dict",
    ),
    "a wrapper of another scaler": (
        lambda s, m: s.step(wrapped(), m, {}),
        "created with another scaler",
    ),
    **{
        f"{one!r} for an optimizer": (
            lambda s, m, one=one: s.apply_gradients(one, *[{"w": mx.ones(1)}] * 2),
            "Expected an mlx",
        )
        for one in ("adam", None, 0.1, optim.Adam)
    },
    "a model to unscale": (
        lambda s, m: s.unscale_(optim.SGD(1.0), m),
        "must be the gradients, got a model",
    ),
    "a model for gradients": (
        lambda s, m: s.step(optim.SGD(1.0), m, m),
        "gradients must be a dict.*Mlp",
    ),
    "no such parameter": (
        lambda s, m: s.minimize(optim.SGD(1.0), m, {"x": mx.ones(1)}),
        "no such parameter",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_argument_is_refused_and_the_iteration_continues(call, message):
    scaler, model = GradScaler(), Mlp()
    with refused((TypeError, ValueError), message, model, scaler):
        call(scaler, model)
    scaler.step(optim.SGD(0.1), model, tree_map(mx.ones_like, model.parameters()))
    scaler.update()


@pytest.mark.compiles
def test_reading_the_state_of_a_compiled_step_is_refused_with_advice():
    training = Training(optim.SGD(0.1), init=False)
    optimizer, model = training.optimizer, training.model
    state = [model.state]  # the state of the optimizer is missing
    step = mx.compile(training.traced, inputs=state, outputs=state)
    step(*batch(dtype=mx.float16))
    advice = r"call init\(\) .*outside the compiled function, and pass scaler\.state or"
    with pytest.raises(RuntimeError, match=advice):
        optimizer.scaler.get_scale()
