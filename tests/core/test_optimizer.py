"""What a step takes over from an optimizer and its wrapper, and what it refuses."""

import gc
import weakref
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import INF, NAN, gradients_like, parameters, pickled, refused, same
from support.optimizer_helpers import assert_near, loop_of, wrapped
from support.scaler_helpers import guarded_apply

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer


@pytest.mark.parametrize("max_norm", [0.1, 1e3, np.float32(2), INF])
def test_max_grad_norm_clips_like_mlx_clip_grad_norm(max_norm):
    optimizer = wrapped(optim.SGD(1.0), scale=2.0**10, max_grad_norm=max_norm)
    weights = parameters()
    gradients = gradients_like(weights, 3)
    scaled = tree_map(lambda g: g * 2.0**10, gradients)
    new = optimizer.apply_gradients(scaled, weights)
    clipped, norm = optim.clip_grad_norm(gradients, max_norm)
    expected = optim.SGD(1.0).apply_gradients(clipped, weights)
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    assert_near(new, expected, rtol=1e-6, atol=1e-7)
    assert wrapped().grad_norm is None


def test_max_grad_norm_can_change_only_if_given_and_only_to_a_positive_number():
    optimizer = wrapped(max_grad_norm=1.0)
    for bad in (0, -1.0, 1e-46, NAN, "1", True, None):
        with refused(ValueError, "positive number", optimizer):
            optimizer.max_grad_norm = bad
        if bad is not None:
            with pytest.raises(ValueError, match="max_grad_norm must be a positive"):
                wrapped(max_grad_norm=bad)
    with pytest.raises(AttributeError, match="without max_grad_norm"):
        wrapped().max_grad_norm = 1.0


def test_attributes_of_the_wrapped_optimizer_are_read_and_set_through_the_wrapper():
    inner = optim.AdamW(1e-3, weight_decay=0.3)
    optimizer = LossScaleOptimizer(inner)
    assert optimizer.weight_decay == 0.3
    optimizer.weight_decay = 0.0
    optimizer.betas = [0.8, 0.9]
    assert (inner.weight_decay, inner.betas) == (0.0, [0.8, 0.9])
    optimizer.note = "mine"
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError):
        optimizer.scaler = GradScaler()
    with pytest.raises(AttributeError, match="Create a new LossScaleOptimizer"):
        optimizer.optimizer = optim.SGD(0.1)
    with pytest.raises(AttributeError, match=r"AdamW.*nonsense"):
        optimizer.nonsense  # noqa: B018
    assert pickled(optimizer).weight_decay == 0.0


def test_learning_rate_and_step_in_the_state_belong_to_the_wrapped_optimizer():
    inner = optim.SGD(0.5)
    optimizer, weights = wrapped(inner), {"w": mx.zeros(1)}
    assert optimizer.state["learning_rate"].item() == 0.5
    optimizer.state["learning_rate"] = 0.25
    assert inner.learning_rate.item() == optimizer.learning_rate.item() == 0.25
    new = optimizer.apply_gradients({"w": mx.ones(1)}, weights)
    assert (new["w"].item(), optimizer.state["step"].item()) == (-0.25, 1)
    optimizer.state["step"] = mx.array(7, mx.uint64)
    assert inner.step.item() == optimizer.step.item() == 7
    with pytest.raises(KeyError, match="nonsense"):
        optimizer.state["nonsense"]
    with pytest.raises(KeyError, match="nonsense"):
        optimizer.state["nonsense"] = mx.array(1.0)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-3,), "Expected an mlx.optimizers"),
        ((optim.AdamW,), "Expected an mlx.optimizers"),
        ((LossScaleOptimizer(optim.SGD(0.1)),), "cannot be wrapped"),
        ((optim.MultiOptimizer([wrapped()], []),), "Wrap the MultiOptimizer"),
        ((optim.SGD(0.1), 65536.0), "must be a GradScaler"),
    ],
)
def test_loss_scale_optimizer_wraps_only_unwrapped_mlx_optimizers(arguments, message):
    with pytest.raises(TypeError, match=message):
        LossScaleOptimizer(*arguments)


@pytest.mark.parametrize("wrong", ["float16", None, True, 4, 64, [16]])
def test_state_bits_must_be_32_16_or_8(wrong):
    with pytest.raises(ValueError, match=r"state_bits must be 32, 16 or 8, got"):
        LossScaleOptimizer(optim.SGD(0.1), state_bits=wrong)


RATE, NAMES = {"of": 1.0}, ["scale"]


def filtered():
    parts = [optim.SGD(0.1, momentum=0.9), optim.SGD(0.5, momentum=0.5)]
    for part in parts:
        part.init(parameters())
    return optim.MultiOptimizer(parts, [lambda path, _: path in NAMES])


def adamw():
    return optim.AdamW(1e-2, betas=[0.9, 0.99])


CHANGES = {
    "weight_decay": (adamw, lambda o, i: setattr(o, "weight_decay", 0.1 * (i % 3))),
    "learning_rate": (adamw, lambda o, i: setattr(o, "learning_rate", 0.01 * (1 + i))),
    "an array": (adamw, lambda o, i: setattr(o, "weight_decay", mx.array(0.1 * i))),
    "betas in place": (adamw, lambda o, i: o.betas.__setitem__(0, 0.9 - 0.1 * (i > 3))),
    "what the schedule reads": (
        lambda: optim.SGD(lambda step: mx.array(RATE["of"])),
        lambda o, i: RATE.update(of=float(i)),
    ),
    "what the filter reads": (
        filtered,
        lambda o, i: NAMES.__setitem__(0, "scale" if i < 4 else "single"),
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_changed_setting_takes_effect_at_the_next_eager_step(make, change):
    (guarded, bare), trees = (make(), make()), [parameters(), parameters()]
    for i in range(8):
        gradients = gradients_like(trees[0], i)
        for optimizer in (guarded, bare):
            change(optimizer, i)
        trees[0] = guarded_apply(guarded, gradients, trees[0])
        trees[1] = bare.apply_gradients(gradients, trees[1])
    assert same(*trees)


@pytest.mark.compiles
def test_step_does_not_keep_an_optimizer_or_its_model_alive():
    def train():
        model = nn.Linear(4, 4)
        optimizer = optim.MultiOptimizer(
            [optim.SGD(lambda step: mx.array(0.1) + 0 * step), optim.Adam(0.1)],
            [lambda path, _: hasattr(model, path)],
        )
        for seed in range(3):
            gradients = gradients_like(model.trainable_parameters(), seed)
            model.update(guarded_apply(optimizer, gradients, model))
        return weakref.ref(optimizer), weakref.ref(model)

    references = train()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_float64_parameters_stay_float64_and_a_skipped_step_changes_no_bit():
    with mx.stream(mx.cpu):
        weights = {"w": mx.array(np.array([1 / 3]), mx.float64)}
        for gradient, expected in ((INF, 1 / 3), (2.0**-40, 1 / 3 - 2.0**-41)):
            gradients = {"w": mx.array([gradient])}
            new = guarded_apply(optim.SGD(0.5), gradients, weights)
            assert new["w"].item() == expected


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"x": mx.ones(2)}, "'x', but no such parameter"),
        ({"w": {"x": mx.ones(2)}}, "'w.x', but no such parameter"),
        ({"list": [mx.ones(2)] * 3}, r"'list\.2', but no such parameter"),
        ({"list": mx.ones(2)}, "'list', but no such parameter"),
        ({"w": mx.ones(3)}, r"of 'w' has shape \(3,\)"),
        ({"w": 1.0}, "'w' must be an mx.array"),
        ({"w": None}, "'w' must be an mx.array"),
        ([mx.ones(2)], "must be a dict"),
    ],
)
def test_error_names_gradients_that_match_no_parameter_and_nothing_changes(
    gradients, message
):
    weights = {"w": mx.ones(2), "list": [mx.ones(2), mx.ones(2)]}
    optimizer = optim.Adam(0.1)
    with refused((TypeError, ValueError), message, optimizer):
        guarded_apply(optimizer, gradients, weights)
    tree = {"a.b": mx.ones(1), "a": {"b": mx.zeros(1)}}
    with refused(ValueError, "Rename one", optimizer):
        guarded_apply(optimizer, tree, tree)


def test_partly_initialized_multi_optimizer_steps_around_a_frozen_module():
    parts = [optim.Adam(1.0), optim.SGD(2.0)]
    optimizer = optim.MultiOptimizer(parts, [lambda path, _: path.endswith("w")])
    weights = {"layers": [{"w": mx.zeros(1), "b": mx.zeros(1)}, {}, {"w": mx.zeros(1)}]}
    parts[0].init({"layers": [{"w": mx.zeros(1)}]})
    new = guarded_apply(optimizer, tree_map(mx.ones_like, weights), weights)
    values = {path: round(x.item(), 3) for path, x in tree_flatten(new)}
    assert values["layers.0.w"] == values["layers.2.w"] < 0
    assert values["layers.0.b"] == -2.0
    assert new["layers"][1] == {}


@pytest.mark.parametrize("kind", ["scaler", "wrapper"])
def test_integer_parameters_stay_unchanged_even_if_their_gradients_were_clipped(kind):
    model = nn.Module()
    model.weight, model.ids = mx.ones(3), mx.array([1, 0, 5])
    loss_fn = lambda x: (mx.where(model.ids == 1, model.weight, 0) * x).sum()  # noqa: E731
    inner = optim.AdamW(0.5, weight_decay=0.5)
    _, loss_and_grad, update = loop_of(kind, model, inner, loss_fn=loss_fn)
    for _ in range(2):
        grads, _ = optim.clip_grad_norm(loss_and_grad(mx.ones(3))[1], 0.1)
        assert grads["ids"].dtype == mx.float32
        update(model, grads)
    assert (model.ids.tolist(), model.ids.dtype) == ([1, 0, 5], mx.int32)
    assert model.weight[0].item() < 0.9


SHAPES = [((2, 2), new) for new in [(1, 2), (3, 2), (2,), ()]]
WIDENED = [((4, 1), (1, 4)), ((1, 2), (2, 2)), ((), (2, 2)), (None, (2,))]
# The state of a third-party optimizer may have any shape.
ThirdParty = type("ThirdParty", (optim.Adam,), {})


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [(optim.Adam, *shapes) for shapes in SHAPES + WIDENED]
    + [(ThirdParty, *shapes) for shapes in SHAPES],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapper"])
def test_parameter_of_another_shape_than_its_state_is_refused_and_changes_nothing(
    kind, old, new, dtype, wrap
):
    optimizer = wrapped(kind(0.1), max_grad_norm=1.0) if wrap else kind(0.1)
    start = {"a": mx.ones(1, dtype)}
    optimizer.init(start if old is None else start | {"w": mx.ones(old, dtype)})
    weights = {"w": mx.ones(new, dtype)}
    step = optimizer.apply_gradients if wrap else partial(guarded_apply, optimizer)
    with refused(ValueError, r"'w'|shape of a parameter changed", optimizer):
        step(weights, weights)


def test_integer_and_empty_leaves_and_bare_containers_pass_through():
    weights = {
        **{"w": mx.ones(2, mx.float16), "index": mx.array([3, 4]), "none": []},
        **{"empty": mx.zeros((0,)), "zero_d": mx.array(2.0), "text": "of a model"},
    }
    # mlx-lm's Llama has an empty dict for its rope, and one for what is text in it.
    gradients = {**weights, "index": mx.array([0, 0]), "rope": {}, "text": []}
    new = guarded_apply(optim.AdamW(0.1), gradients, weights)
    assert same(new["index"], weights["index"])
    assert (new["none"], new["empty"].shape) == ([], (0,))
    assert new["zero_d"].item() < 2.0


def test_lists_of_dicts_in_a_model_are_updated_in_place():
    model = nn.Module()
    model.blocks = [{"w": mx.ones(2)}, {"w": mx.ones(2), "deep": [mx.ones(1)]}]
    loss_fn = lambda: sum(x.sum() for _, x in tree_flatten(model.parameters()))  # noqa: E731
    _, loss_and_grad, update = loop_of("scaler", model, optim.SGD(1.0), loss_fn=loss_fn)
    boxes = [id(box) for box in model.blocks]
    assert update(model, loss_and_grad()[1]).item()
    assert [id(box) for box in model.blocks] == boxes
    assert all(not x.any().item() for _, x in tree_flatten(model.parameters()))
