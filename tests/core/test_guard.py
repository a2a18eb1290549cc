"""The guarded update: all of the optimizer's step, or nothing at all."""

import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.graphs import kernels
from support.helpers import (
    BAD_VALUES,
    INF,
    NOT_ELEMENTWISE,
    OPTIMIZERS,
    Traced,
    bits,
    gradients_like,
    parameters,
    poison,
    same,
)

from mlx_gradscale import GradScaler, LossScaleOptimizer, all_finite
from mlx_gradscale.guard import autocompile, guarded_apply
from mlx_gradscale.guard import step as module
from mlx_gradscale.state_tree import slots

pytestmark = pytest.mark.core

every_optimizer = pytest.mark.parametrize(
    "make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)


def copy(tree):
    return tree_map(lambda x: x, tree)


class Run:
    """A guarded optimizer beside the bare one, on the same tree."""

    def __init__(self, make, compiled, dtype=mx.float32):
        self.optimizer, self.bare = make(), make()
        self.parameters = [parameters(dtype)]
        self.bare_parameters = [parameters(dtype)]
        self.optimizer.init(to_float32(self.parameters[0]))
        self.bare.init(to_float32(self.bare_parameters[0]))
        self.dtype = dtype

        def guarded(gradients, inverse):
            finite = all_finite(module.unscale(gradients, inverse))
            self.parameters[0] = guarded_apply(
                self.optimizer, gradients, self.parameters[0], inverse, finite
            )

        def bare(gradients):
            full = to_float32(self.bare_parameters[0])
            new = self.bare.apply_gradients(gradients, full)
            self.bare_parameters[0] = tree_map(lambda x: x.astype(dtype), new)

        self.traced = Traced(guarded)
        self.guarded, self.apply_bare = self.traced, bare
        if compiled:
            state = [self.parameters, self.optimizer.state]
            bare_state = [self.bare_parameters, self.bare.state]
            self.guarded = mx.compile(self.traced, inputs=state, outputs=state)
            self.apply_bare = mx.compile(bare, inputs=bare_state, outputs=bare_state)

    def step(self, seed, value=None, path="layers.1.weight"):
        gradients = gradients_like(self.parameters[0], seed)
        inverse = mx.array(2.0**-seed)
        scaled = tree_map(lambda g: g * 2.0**seed, gradients)
        if value is None:
            self.guarded(scaled, inverse)
            self.apply_bare(gradients)
        else:
            self.guarded(poison(scaled, path, value), inverse)

    def everything(self):
        return [copy(self.parameters[0]), copy(self.optimizer.state)]


def to_float32(tree):
    return tree_map(lambda x: x.astype(mx.float32), tree)


def agree(ours, bare):
    if not BEFORE_0_32:
        return same(ours, bare)
    # Compiled, constants have eight digits there.
    ours, bare = dict(tree_flatten(ours)), dict(tree_flatten(bare))
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    return ours.keys() == bare.keys() and all(
        mx.allclose(x, bare[path], **close) for path, x in ours.items()
    )


@every_optimizer
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_bad_step_changes_no_bit_and_a_good_one_is_the_optimizers_own(make, compiled):
    run = Run(make, compiled)
    paths = [path for path, x in tree_flatten(run.parameters[0]) if x.size]
    for seed in range(4):
        run.step(seed)
    before = run.everything()
    for path, value in zip(paths, [*BAD_VALUES.values()] * 9, strict=False):
        run.step(5, value, path)
    assert same(run.everything(), before)
    for seed in range(4, 7):
        run.step(seed)
    assert agree(run.parameters[0], run.bare_parameters[0])
    assert agree(run.optimizer.state, run.bare.state)
    assert not same(run.everything(), before)
    if compiled:
        assert run.traced.count == 1


def test_no_optimizer_of_mlx_is_missing():
    there = {
        name
        for name, x in vars(optim).items()
        if isinstance(x, type) and issubclass(x, optim.Optimizer)
    }
    tested = {type(make()).__name__ for make in OPTIMIZERS.values()}
    assert tested == there - {"Optimizer"}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", ["SGD", "AdamW corrected", "Adafactor", "Muon"])
def test_half_parameters_are_updated_in_float32_and_keep_their_dtype(name, dtype):
    run = Run(OPTIMIZERS[name], compiled=False, dtype=dtype)
    for seed in range(3):
        run.step(seed)
    run.step(1, INF)
    assert same(run.parameters[0], run.bare_parameters[0])
    assert {x.dtype for _, x in tree_flatten(run.parameters[0])} == {dtype}
    state = [x.dtype for _, x in tree_flatten(run.optimizer.state)]
    assert not {mx.float16, mx.bfloat16} & set(state)


def test_a_state_that_was_initialised_in_half_precision_becomes_float32():
    optimizer = optim.Adam(1e-2)
    weights = {"w": mx.ones(3, mx.float16)}
    optimizer.init(weights)
    guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
    assert optimizer.state["w"]["v"].dtype == mx.float32


@pytest.mark.parametrize("gradient_dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - NOT_ELEMENTWISE))
def test_no_more_kernels_per_parameter_than_the_bare_optimizer(
    name, dtype, gradient_dtype
):
    def count(leaves, guarded):
        weights = {f"w{i}": mx.ones((8, 8), dtype) for i in range(leaves)}
        gradients = {k: w.astype(gradient_dtype) for k, w in weights.items()}
        optimizer = OPTIMIZERS[name]()
        optimizer.init(to_float32(weights))

        def step(state, weights, gradients, inverse, apply):
            places = [(box, key) for _, box, key in slots(optimizer.state)]
            for (box, key), value in zip(places, state, strict=True):
                box[key] = value
            if guarded:
                new = guarded_apply(optimizer, gradients, weights, inverse, apply)
            else:
                full = to_float32(weights)
                new = optimizer.apply_gradients(to_float32(gradients), full)
                new = tree_map(lambda x: x.astype(dtype), new)
            return new, [box[key] for box, key in places]

        state = [box[key] for _, box, key in slots(optimizer.state)]
        inputs = (state, weights, gradients, mx.array(0.5), mx.array(True))
        mx.eval(inputs)
        return len(kernels(mx.compile(step)(*inputs)))

    guarded = count(4, True) - count(3, True)
    bare = count(4, False) - count(3, False)
    assert guarded <= bare


def test_an_eager_loop_compiles_once_and_runs_no_python_after_that(monkeypatch):
    monkeypatch.setattr(module, "_run", run := Traced(module._run))
    optimizer, weights = optim.AdamW(1e-2), {"a": mx.ones((4, 4)), "b": mx.ones(4)}
    for seed in range(6):
        gradients = gradients_like(weights, seed)
        weights = guarded_apply(
            optimizer, gradients, weights, mx.array(1.0), mx.array(True)
        )
    assert run.count == 1


def test_settings_that_change_with_every_step_compile_once(monkeypatch):
    monkeypatch.setattr(autocompile.mx, "compile", compiling := Traced(mx.compile))
    optimizer, weights = optim.AdamW(1e-2), {"w": mx.ones(4)}

    def steps(decays):
        for optimizer.weight_decay in decays:
            guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
        return compiling.count

    assert steps([0.1, 0.2, 0.3, 0.4]) == 1
    assert steps([0.5, 0.5, 0.5]) == 2
    assert steps([0.6, 0.6, 0.6]) == 3


def changes():
    def weight_decay(optimizer, i):
        optimizer.weight_decay = 0.1 * (i % 3)

    def betas(optimizer, i):
        optimizer.betas = [0.9 - 0.1 * (i > 3), 0.99]

    def betas_in_place(optimizer, i):
        optimizer.betas[0] = 0.9 - 0.1 * (i > 3)

    def learning_rate(optimizer, i):
        optimizer.learning_rate = 0.01 * (1 + i)

    return [weight_decay, betas, betas_in_place, learning_rate]


@pytest.mark.parametrize("change", changes(), ids=lambda f: f.__name__)
def test_a_changed_hyperparameter_counts_from_the_next_eager_step(change):
    optimizers = [optim.AdamW(1e-2, betas=[0.9, 0.99]) for _ in range(2)]
    trees = [parameters(), parameters()]
    for i in range(8):
        gradients = gradients_like(trees[0], i)
        for optimizer in optimizers:
            change(optimizer, i)
        guarded, bare = optimizers
        trees[0] = guarded_apply(
            guarded, gradients, trees[0], mx.array(1.0), mx.array(True)
        )
        trees[1] = bare.apply_gradients(gradients, trees[1])
    assert same(*trees)


def test_changed_filters_of_a_multi_optimizer_count_from_the_next_eager_step():
    chosen = {"names": {"scale"}}

    def make():
        return optim.MultiOptimizer(
            [optim.SGD(0.1, momentum=0.9), optim.SGD(0.5, momentum=0.5)],
            [lambda path, _: path in chosen["names"]],
        )

    optimizers, trees = [make(), make()], [parameters(), parameters()]
    for optimizer in optimizers:
        for inner in optimizer.optimizers:
            inner.init(parameters())
    for i in range(8):
        chosen["names"] = {"scale"} if i < 4 else {"single", "pair.0"}
        gradients = gradients_like(trees[0], i)
        trees[0] = guarded_apply(
            optimizers[0], gradients, trees[0], mx.array(1.0), mx.array(True)
        )
        trees[1] = optimizers[1].apply_gradients(gradients, trees[1])
    assert same(*trees)


def test_a_changed_schedule_counts_from_the_next_eager_step():
    class Schedule:
        factor = 1.0

        def __init__(self):
            self.factor = 0.1

        def __call__(self, step):
            return mx.array(self.factor)

    schedule = Schedule()
    optimizer = optim.SGD(schedule)
    weights = {"w": mx.zeros(2)}
    for i in range(6):
        schedule.factor = 0.1 if i < 3 else 1.0
        before = weights["w"]
        weights = guarded_apply(
            optimizer, {"w": mx.ones(2)}, weights, mx.array(1.0), mx.array(True)
        )
        assert (before - weights["w"])[0].item() == pytest.approx(schedule.factor)


def trained_pair():
    model = nn.Linear(4, 4)
    optimizer = optim.MultiOptimizer(
        [optim.SGD(lambda step: mx.array(0.1) + 0 * step), optim.Adam(0.1)],
        [lambda path, _: hasattr(model, path)],
    )
    for seed in range(3):
        gradients = gradients_like(model.trainable_parameters(), seed)
        new = guarded_apply(optimizer, gradients, model, mx.array(1.0), mx.array(True))
        model.update(new)
    return weakref.ref(optimizer), weakref.ref(model)


def test_a_schedule_may_read_anything():
    class Settings:
        rate = 1.0

    settings = Settings()
    optimizer = optim.SGD(lambda step: mx.array(settings.rate))
    for i in range(6):
        settings.rate = float(i)
        new = guarded_apply(
            optimizer,
            {"w": mx.ones(1)},
            {"w": mx.zeros(1)},
            mx.array(1.0),
            mx.array(True),
        )
        assert new["w"].item() == -i


def test_float64_parameters_stay_float64_and_come_back_bit_for_bit():
    with mx.stream(mx.cpu):
        weights = {"w": mx.array(np.array([1 / 3]), mx.float64)}
        optimizer = optim.SGD(0.5)
        step = lambda g, ok: guarded_apply(  # noqa: E731
            optimizer, {"w": mx.array([g])}, weights, mx.array(1.0), mx.array(ok)
        )["w"].item()
        assert step(INF, False) == 1 / 3
        assert step(2.0**-40, True) == 1 / 3 - 2.0**-41


def test_a_filter_that_looks_at_the_dtype():
    optimizer = optim.MultiOptimizer(
        [optim.SGD(1.0), optim.SGD(0.0)], [lambda path, w: w.dtype == mx.float16]
    )
    weights = {"a": mx.ones(2, mx.float16), "b": mx.ones(2)}
    new = guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
    assert (new["a"].tolist(), new["b"].tolist()) == ([0, 0], [1, 1])


def test_a_schedule_of_plain_numbers():
    optimizer, weights = optim.SGD(lambda step: 0.5), {"w": mx.zeros(1)}
    for _ in range(3):
        weights = guarded_apply(
            optimizer, {"w": mx.ones(1)}, weights, mx.array(1.0), mx.array(True)
        )
    assert weights["w"].item() == -1.5


def test_paths_that_are_the_same_with_dots_are_refused():
    tree = {"a.b": mx.ones(1), "a": {"b": mx.zeros(1)}}
    with pytest.raises(ValueError, match="Rename one"):
        guarded_apply(optim.SGD(1.0), tree, tree, mx.array(1.0), mx.array(True))


def test_nothing_outlives_optimizer_and_model():
    optimizer, model = trained_pair()
    gc.collect()
    assert optimizer() is None
    assert model() is None
    assert len(autocompile._steppers) == 0


def test_integer_and_empty_leaves_and_bare_containers_pass_through():
    weights = {
        "w": mx.ones(2),
        "index": mx.array([3, 4]),
        "none": [],
        "empty": mx.zeros((0,)),
        "zero_d": mx.array(2.0),
    }
    gradients = {**weights, "index": mx.array([0, 0])}
    new = guarded_apply(
        optim.AdamW(0.1), gradients, weights, mx.array(1.0), mx.array(True)
    )
    assert same(new["index"], weights["index"])
    assert new["none"] == []
    assert new["empty"].shape == (0,)
    assert new["zero_d"].item() < 2.0


def test_an_empty_tree_applies_nothing():
    optimizer = optim.Adam(0.1)
    assert guarded_apply(optimizer, {}, {}, mx.array(1.0), mx.array(True)) == {}
    assert optimizer.step.item() == 0
    weights = {"w": mx.ones(1)}
    guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
    assert optimizer.step.item() == 1


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"x": mx.ones(2)}, "'x' but no such parameter"),
        ({"w": {"x": mx.ones(2)}}, "below 'w'"),
        ({"list": [mx.ones(2)] * 3}, r"'list\.2' but no such parameter"),
        ({"list": mx.ones(2)}, "'list' but no such parameter"),
        ({"w": mx.ones(3)}, r"'w' has shape \(3,\)"),
        ({"w": 1.0}, "'w' must be an array"),
        ({"w": None}, "'w' must be an array"),
        ([mx.ones(2)], "must be a dict"),
    ],
)
def test_gradients_that_do_not_fit_are_named_and_nothing_changes(gradients, message):
    weights = {"w": mx.ones(2), "list": [mx.ones(2), mx.ones(2)]}
    optimizer = optim.Adam(0.1)
    before = copy(optimizer.state)
    with pytest.raises((TypeError, ValueError), match=message):
        guarded_apply(optimizer, gradients, weights, mx.array(1.0), mx.array(True))
    assert same(optimizer.state, before)


def test_a_multi_optimizer_with_a_frozen_module_between_trained_ones():
    optimizer = optim.MultiOptimizer(
        [optim.SGD(1.0), optim.SGD(2.0)], [lambda path, _: path == "layers.0.w"]
    )
    weights = {"layers": [{"w": mx.zeros(1), "b": mx.zeros(1)}, {}, {"w": mx.zeros(1)}]}
    gradients = tree_map(mx.ones_like, weights)
    new = guarded_apply(optimizer, gradients, weights, mx.array(1.0), mx.array(True))
    values = {path: x.item() for path, x in tree_flatten(new)}
    assert values == {"layers.0.w": -1.0, "layers.0.b": -2.0, "layers.2.w": -2.0}
    assert new["layers"][1] == {}


def test_a_parameter_without_state_is_named():
    optimizer = optim.Adam(0.1)
    optimizer.init({"a": mx.ones(1)})
    weights = {"a": mx.ones(1), "b": mx.ones(1)}
    with pytest.raises(ValueError, match="no state for 'b'"):
        guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))


@pytest.mark.parametrize("shape", [(1, 2), (2,), ()])
def test_a_parameter_that_a_step_would_reshape_is_named(shape):
    optimizer = optim.Adam(0.1)
    optimizer.init({"w": mx.ones((2, 2))})
    weights = {"w": mx.ones(shape)}
    before = bits(optimizer.state)
    with pytest.raises(ValueError, match="'w' has shape"):
        guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
    assert bits(optimizer.state) == before


@pytest.mark.parametrize("old", [(1, 2), (2,), ()])
def test_a_state_that_a_step_would_reshape_is_named(old):
    optimizer = optim.Adam(0.1)
    optimizer.init({"w": mx.ones(old)})
    weights = {"w": mx.ones((2, 2))}
    before = bits(optimizer.state)
    with pytest.raises(ValueError, match=r"'w\.m' in the optimizer's state has shape"):
        guarded_apply(optimizer, weights, weights, mx.array(1.0), mx.array(True))
    assert bits(optimizer.state) == before


def test_old_buffers_are_donated():
    size = 2**20
    peaks = {}
    for kind in ("bare", "guarded"):
        optimizer = optim.AdamW(1e-3)
        box = [{f"w{i}": mx.ones(size) for i in range(8)}]
        gradients = {f"w{i}": mx.ones(size) for i in range(8)}
        optimizer.init(box[0])

        def step(gradients, kind=kind, optimizer=optimizer, box=box):
            if kind == "bare":
                box[0] = optimizer.apply_gradients(gradients, box[0])
            else:
                box[0] = guarded_apply(
                    optimizer, gradients, box[0], mx.array(1.0), mx.array(True)
                )

        state = [box, optimizer.state]
        step = mx.compile(step, inputs=state, outputs=state)
        for _ in range(2):
            step(gradients)
            mx.eval(state)
        mx.clear_cache()
        mx.reset_peak_memory()
        step(gradients)
        mx.eval(state)
        peaks[kind] = mx.get_peak_memory()
        del optimizer, box, gradients, step, state
    assert peaks["guarded"] <= 1.02 * peaks["bare"]


def test_unscale_divides_in_float32():
    scaled = {"a": mx.array([65504.0], mx.float16), "i": mx.array([7])}
    out = module.unscale(scaled, mx.array(2.0**-16))
    assert out["a"].dtype == mx.float32
    assert out["a"].item() == np.float32(65504 / 65536)
    assert same(out["i"], scaled["i"])


def test_an_empty_part_of_the_gradients_asks_for_no_parameter():
    # mlx-lm's Llama has an empty dict for its rope, and one for what is text in it.
    gradients = {"w": mx.ones(2), "rope": {}, "kinds": []}
    weights = {"w": mx.ones(2), "kinds": "text"}
    apply = mx.array(True)
    new = guarded_apply(optim.SGD(0.5), gradients, weights, None, apply)
    assert new["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("way", ["true", "scaled", "wrapped"])
def test_integer_parameters_stay_also_where_their_gradients_were_clipped(way):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = mx.ones(3)
            self.ids = mx.array([1, 0, 5])

        def __call__(self, x):
            return (mx.where(self.ids == 1, self.weight, 0) * x).sum()

    model, optimizer = Chosen(), optim.AdamW(0.5, weight_decay=0.5)
    scaler = GradScaler(8.0)
    if way == "wrapped":
        optimizer = LossScaleOptimizer(optimizer, scaler)
    if way == "scaled":
        loss_and_grad = nn.value_and_grad(model, scaler.scale_loss(model))
    else:
        source = optimizer if way == "wrapped" else scaler
        loss_and_grad = source.value_and_grad(model, lambda x: model(x))
    for _ in range(2):
        _, grads = loss_and_grad(mx.ones(3))
        if way == "scaled":
            grads = scaler.unscale_(optimizer, grads)
        grads, _ = optim.clip_grad_norm(grads, 0.1)
        assert grads["ids"].dtype == mx.float32
        if way == "wrapped":
            optimizer.update(model, grads)
        else:
            scaler.minimize(optimizer, model, grads)
    assert (model.ids.tolist(), model.ids.dtype) == ([1, 0, 5], mx.int32)
    assert model.weight[0].item() < 0.9
