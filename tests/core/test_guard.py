"""What a guarded step takes over from an optimizer, and what it refuses."""

import gc
import weakref
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import INF, bits, gradients_like, parameters, same
from support.optimizer_helpers import loop_of, wrapped
from support.scaler_helpers import guarded_apply

from mlx_gradscale import GradScaler

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
def test_guarding_does_not_keep_an_optimizer_or_its_model_alive():
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

    optimizer, model = train()
    gc.collect()
    assert (optimizer(), model()) == (None, None)


def test_float64_parameters_stay_float64_and_a_skipped_step_changes_no_bit():
    with mx.stream(mx.cpu):
        weights = {"w": mx.array(np.array([1 / 3]), mx.float64)}
        optimizer = optim.SGD(0.5)
        step = lambda g, ok: guarded_apply(  # noqa: E731
            optimizer, {"w": mx.array([g])}, weights, ok
        )["w"].item()
        assert step(INF, False) == 1 / 3
        assert step(2.0**-40, True) == 1 / 3 - 2.0**-41


def test_parameters_with_the_same_dotted_path_are_refused():
    tree = {"a.b": mx.ones(1), "a": {"b": mx.zeros(1)}}
    with pytest.raises(ValueError, match="Rename one"):
        guarded_apply(optim.SGD(1.0), tree, tree)


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
    before = bits(optimizer.state)
    with pytest.raises((TypeError, ValueError), match=message):
        guarded_apply(optimizer, gradients, weights)
    assert bits(optimizer.state) == before


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
ThirdParty = type("ThirdParty", (optim.Adam,), {})


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        *[(optim.Adam, *shapes) for shapes in SHAPES + WIDENED],
        # Its own state may have any shape.
        *[(ThirdParty, *shapes) for shapes in SHAPES],
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapper"])
def test_parameter_of_another_shape_than_its_state_is_refused_and_changes_nothing(
    kind, old, new, dtype, wrap
):
    start = {"a": mx.ones(1, dtype)}
    start |= {} if old is None else {"w": mx.ones(old, dtype)}
    optimizer = wrapped(kind(0.1), max_grad_norm=1.0) if wrap else kind(0.1)
    optimizer.init(start)
    weights, before = {"w": mx.ones(new, dtype)}, bits(optimizer.state)
    step = optimizer.apply_gradients if wrap else partial(guarded_apply, optimizer)
    with pytest.raises(ValueError, match=r"'w'|shape of a parameter changed"):
        step(weights, weights)
    assert bits(optimizer.state) == before


def test_integer_and_empty_leaves_and_bare_containers_pass_through():
    weights = {
        "w": mx.ones(2, mx.float16),
        "index": mx.array([3, 4]),
        "none": [],
        "empty": mx.zeros((0,)),
        "zero_d": mx.array(2.0),
        "text": "of a model",
    }
    # mlx-lm's Llama has an empty dict for its rope, and one for what is text in it.
    gradients = {**weights, "index": mx.array([0, 0]), "rope": {}, "text": []}
    new = guarded_apply(optim.AdamW(0.1), gradients, weights)
    assert same(new["index"], weights["index"])
    assert new["none"] == []
    assert new["empty"].shape == (0,)
    assert new["zero_d"].item() < 2.0


def test_lists_of_dicts_in_a_model_are_updated_in_place():
    model = nn.Module()
    model.blocks = [{"w": mx.ones(2)}, {"w": mx.ones(2), "deep": [mx.ones(1)]}]
    scaler, optimizer = GradScaler(4.0), optim.SGD(1.0)
    loss_fn = lambda: sum(x.sum() for _, x in tree_flatten(model.parameters()))  # noqa: E731
    _, grads = scaler.value_and_grad(model, loss_fn)()
    boxes = [id(box) for box in model.blocks]
    assert scaler.minimize(optimizer, model, grads).item()
    assert [id(box) for box in model.blocks] == boxes
    assert all(not x.any().item() for _, x in tree_flatten(model.parameters()))
