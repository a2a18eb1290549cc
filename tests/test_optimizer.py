"""``LossScaleOptimizer``: masters, clipping, state, and every inner optimizer."""

import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import (
    BAD_VALUES,
    INF,
    NAN,
    NOT_ELEMENTWISE,
    OPTIMIZERS,
    Mlp,
    Traced,
    address,
    batch,
    bits,
    bytes_moved,
    gradients_like,
    kernels,
    mse,
    parameters,
    poison,
    same,
)
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.finite import global_norm

HALVES = [mx.float16, mx.bfloat16]


def wrapped(inner=None, scale=1.0, **arguments):
    scaler = GradScaler(init_scale=scale)
    scaler.scale(mx.array(1.0))
    return LossScaleOptimizer(inner or optim.AdamW(1e-2), scaler, **arguments)


def rounded(optimizer, tree):
    """The masters, cast to the dtype of the parameters."""
    return tree_map(lambda m, p: m.astype(p.dtype), optimizer.masters(tree), dict(tree))


class Training:
    """A small float16 model, its wrapped optimizer and one compiled step."""

    def __init__(
        self, inner=None, dtype=mx.float16, compiled=True, init=True, **arguments
    ):
        mx.random.seed(1)
        self.model = Mlp(dtype=dtype)
        self.optimizer = LossScaleOptimizer(
            inner or optim.AdamW(optim.cosine_decay(1e-2, 200)),
            GradScaler(init_scale=256.0, growth_interval=7),
            **arguments,
        )
        if init:
            self.optimizer.init(self.model.trainable_parameters())
        loss_fn = self.optimizer.scale_loss(mse(self.model))
        loss_and_grad = nn.value_and_grad(self.model, loss_fn)

        def step(x, y):
            loss, gradients = loss_and_grad(x, y)
            self.optimizer.update(self.model, gradients)
            return loss

        self.traced = Traced(step)
        self.step = self.traced
        if compiled:
            state = [self.model.state, self.optimizer.state]
            self.step = mx.compile(self.traced, inputs=state, outputs=state)

    def run(self, seeds, bad=()):
        for seed in seeds:
            x, y = batch(seed, dtype=mx.float16)
            loss = self.step(x * (INF if seed in bad else 1), y)
        mx.eval(self.model.state, self.optimizer.state)
        return loss

    def everything(self):
        return bits([self.model.parameters(), self.optimizer.state])


# Masters


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_model_is_its_masters_rounded_after_every_step(dtype, compiled):
    training = Training(dtype=dtype, compiled=compiled)
    for seed in range(6):
        training.run([seed], bad=(3,))
        model = training.model.trainable_parameters()
        masters = training.optimizer.masters(model)
        assert {x.dtype for _, x in tree_flatten(masters)} == {mx.float32}
        assert same(rounded(training.optimizer, model), model)


def test_the_inner_optimizer_sees_only_float32():
    seen = set()

    class Watching(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            seen.update(x.dtype for x in (gradient, parameter, *state.values()))
            return super().apply_single(gradient, parameter, state)

    Training(Watching(0.1, momentum=0.9)).run(range(2))
    assert seen == {mx.float32}


def test_float32_parameters_have_no_master():
    optimizer = wrapped()
    optimizer.init({"a": mx.ones(2), "b": mx.ones(2, mx.float16), "i": mx.array([1])})
    assert set(optimizer.state["masters"]) == {"b"}


def test_updates_below_half_an_ulp_add_up_only_with_masters():
    # 1e-4 is a fifth of float16's half ulp at 1.0 (4.9e-4).
    gradients = {"w": mx.full((4,), 1e-4, mx.float16)}
    kept, lost = {"w": mx.ones(4, mx.float16)}, {"w": mx.ones(4, mx.float16)}
    optimizer, plain = wrapped(optim.SGD(1.0)), optim.SGD(1.0)
    for _ in range(100):
        kept = optimizer.apply_gradients(gradients, kept)
        lost = plain.apply_gradients(gradients, lost)
    assert lost["w"].tolist() == [1.0] * 4
    assert kept["w"][0].item() == pytest.approx(0.99, abs=5e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_weights_that_the_user_replaces_are_not_undone(dtype, compiled):
    training = Training(optim.SGD(0.0, momentum=0.9), dtype, compiled)
    training.run(range(3))
    for i in range(3):
        new = tree_map(
            lambda p, i=i: (mx.random.normal(p.shape) * 10.0 ** (-3 * i)).astype(dtype),
            training.model.trainable_parameters(),
        )
        training.model.update(new)
        training.run([7], bad=(7,) if i == 1 else ())
        # By value: the optimizer's arithmetic may turn -0 into 0.
        now = training.model.trainable_parameters()
        equal = tree_map(lambda a, b: mx.array_equal(a, b).item(), new, now)
        assert all(leaf for _, leaf in tree_flatten(equal))
    assert training.traced.count == 1 or not compiled


@pytest.mark.parametrize("dtype", HALVES)
def test_every_neighbour_of_a_rounded_master_is_taken_for_the_users(dtype):
    patterns = mx.arange(65536).astype(mx.uint16).view(dtype)
    finite = np.array(mx.isfinite(patterns))
    values = patterns[mx.array(np.flatnonzero(finite))]
    # A third of an ulp from each value, towards zero: it rounds back to it.
    masters = values.astype(mx.float32) * (1 - mx.finfo(dtype).eps / 3)
    rounded = masters.astype(dtype)
    for offset in (0, 1, 65535):
        bits_ = rounded.view(mx.uint16) + mx.array(offset, mx.uint16)
        weights = bits_.view(dtype)
        optimizer = wrapped(optim.SGD(0.0))
        optimizer.init({"w": rounded})
        optimizer.state["masters"]["w"] = masters
        new = optimizer.apply_gradients({"w": mx.zeros_like(weights)}, {"w": weights})
        usable = mx.isfinite(weights)
        assert mx.array_equal(
            mx.where(usable, new["w"], 0), mx.where(usable, weights, 0)
        )
        kept = optimizer.state["masters"]["w"] == masters
        if offset == 0:
            assert mx.all(kept).item()
        else:
            assert mx.all(kept <= (masters == weights.astype(mx.float32))).item()


def test_a_weight_moved_to_the_other_side_of_a_tie_is_the_users():
    optimizer = wrapped(optim.SGD(0.0))
    optimizer.init({"w": mx.ones(1, mx.float16)})
    # Halfway between 1 and the next half: it rounds to 1.
    optimizer.state["masters"]["w"] = mx.array([1 + 2**-11])
    weights = {"w": mx.array([1 + 2**-10], mx.float16)}
    new = optimizer.apply_gradients({"w": mx.zeros(1)}, weights)
    assert new["w"].item() == optimizer.state["masters"]["w"].item() == 1 + 2**-10


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_weights_changed_in_place_are_the_users_also_after_a_skip(dtype, compiled):
    training = Training(optim.SGD(0.0), dtype, compiled)
    training.run(range(2))
    layer = training.model.layers[0]
    layer.weight += 1
    layer.bias[0] = 5
    want = [layer.weight * 1, layer.bias * 1]
    training.run([7], bad=(7,))
    training.run([8])
    assert same([layer.weight, layer.bias], want)


def test_a_master_that_the_user_edits_counts():
    optimizer = wrapped(optim.SGD(0.0))
    weights = {"w": mx.ones(1, mx.float16)}
    optimizer.init(weights)
    optimizer.state["masters"]["w"] = mx.array([3.0])
    skipped = optimizer.apply_gradients({"w": mx.array([INF])}, weights)
    assert skipped["w"].item() == 1.0
    assert optimizer.apply_gradients({"w": mx.zeros(1)}, skipped)["w"].item() == 3.0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_model_cast_after_init_trains_on_from_its_weights(dtype):
    training = Training(optim.SGD(0.0), mx.float16, compiled=False)
    training.run(range(2))
    for changed in (dtype, mx.float16):
        training.model.set_dtype(changed)
        before = tree_map(lambda x: x * 1, training.model.trainable_parameters())
        training.run([3])
        assert same(training.model.trainable_parameters(), before)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_was_written_takes_no_memory_of_its_own(compiled):
    training = Training(compiled=compiled)
    for seed in range(3):
        weights = tree_flatten(training.model.trainable_parameters())
        written = training.optimizer.state["written"]
        assert [address(x) for _, x in weights] == [
            address(written[p]) for p, _ in weights
        ]
        training.run([seed], bad=(1,))


def test_a_state_without_what_was_written_resumes_exactly():
    training, other = Training(), Training()
    training.run(range(3))
    state = dict(tree_flatten(training.optimizer.state))
    short = {k: x for k, x in state.items() if not k.startswith("written.")}
    assert len(short) < len(state)
    other.model.update(tree_map(lambda x: x, training.model.parameters()))
    other.optimizer.state = tree_unflatten(list(short.items()))
    for each in (training, other):
        each.run(range(3, 6))
    assert other.everything() == training.everything()


def test_clipping_makes_no_float32_copy_of_the_gradients():
    weights = {f"w{i}": mx.ones((8, 8), mx.float16) for i in range(8)}
    optimizer = wrapped(max_grad_norm=1.0)
    optimizer.init(weights)
    box = [weights]

    def step(gradients):
        box[0] = optimizer.apply_gradients(gradients, box[0])

    state = [box, optimizer.state]
    gradients = tree_map(lambda w: w * 1, weights)
    mx.eval(state, gradients)
    mx.compile(step, inputs=state, outputs=state)(gradients)
    assert "AsType" not in kernels(state)


def test_zeroed_weights_stay_zero():
    optimizer = wrapped(optim.SGD(1.0))
    weights = {"w": mx.full((3,), 1000.25, mx.float16)}
    weights = optimizer.apply_gradients({"w": mx.full((3,), 0.1)}, weights)
    weights = {"w": mx.zeros(3, mx.float16)}
    weights = optimizer.apply_gradients({"w": mx.zeros(3)}, weights)
    assert weights["w"].tolist() == [0.0] * 3


# Skipping, for every optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_bad_step_changes_nothing_but_the_scale(name, compiled):
    optimizer = wrapped(OPTIMIZERS[name](), max_grad_norm=5.0)
    box = [parameters(mx.float16)]
    optimizer.init(box[0])

    def step(gradients):
        box[0] = optimizer.apply_gradients(gradients, box[0])

    traced = Traced(step)
    state = [box, optimizer.state]
    run = mx.compile(traced, inputs=state, outputs=state) if compiled else traced
    good = gradients_like(box[0], 1, dtype=mx.float16)
    for _ in range(2):
        run(good)
    inner = optimizer.state["optimizer"], optimizer.state["masters"]
    before = bits([box, inner])
    for value in BAD_VALUES.values():
        run(poison(good, "layers.1.weight", value))
        assert bits([box, inner]) == before
    assert optimizer.scaler.skipped_steps.item() == 3
    assert optimizer.scaler.get_scale() == 0.125
    assert optimizer.step.item() == 2
    run(good)
    assert bits([box, inner]) != before
    if compiled:
        assert traced.count == 1


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW corrected", "MultiOptimizer"])
def test_with_float32_parameters_it_is_the_inner_optimizer(name):
    optimizer, plain = wrapped(OPTIMIZERS[name]()), OPTIMIZERS[name]()
    trees = [parameters(), parameters()]
    for seed in range(4):
        gradients = gradients_like(trees[0], seed)
        trees[0] = optimizer.apply_gradients(gradients, trees[0])
        trees[1] = plain.apply_gradients(gradients, trees[1])
    assert same(*trees)


def test_one_trace_whether_or_not_init_was_called_in_time():
    training = Training()
    training.run(range(12), bad=(4, 5))
    assert training.traced.count == 1
    assert training.optimizer.step.item() == 10


def test_one_kernel_and_one_half_read_more_than_adamw_and_a_cast():
    def count(leaves, guarded):
        weights = {f"w{i}": mx.ones((8, 8), mx.float16) for i in range(leaves)}
        masters = tree_map(lambda w: w.astype(mx.float32), weights)
        inner = optim.AdamW(1e-2)
        if guarded:
            optimizer = wrapped(inner)
            optimizer.init(weights)
            box = [weights]

            def step(gradients):
                box[0] = optimizer.apply_gradients(gradients, box[0])

            state = [box, optimizer.state]
        else:
            inner.init(masters)
            box = [masters, weights]

            def step(gradients):
                gradients = tree_map(lambda g: g.astype(mx.float32), gradients)
                box[0] = inner.apply_gradients(gradients, box[0])
                box[1] = tree_map(lambda m: m.astype(mx.float16), box[0])

            state = [box, inner.state]
        gradients = tree_map(lambda w: w + 1, weights)
        mx.eval(state, weights, gradients)
        before = [gradients, tree_map(lambda x: x, state)]
        mx.compile(step, inputs=state, outputs=state)(gradients)
        compiled = [k for k in kernels(state) if k.startswith("Compiled")]
        return np.array([len(compiled), bytes_moved(before, state)])

    bare = count(16, False) - count(8, False)
    ours = count(16, True) - count(8, True)
    # Beside one kernel for each of the eight more: one that joins them, checked.
    assert ours[0] <= bare[0] + 1
    # The gradient, three float32 arrays in and out, the new weight: and the old one.
    assert bare[1] == 8 * 64 * (2 + 3 * (4 + 4) + 2)
    assert ours[1] == bare[1] + 8 * 64 * 2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - NOT_ELEMENTWISE))
def test_one_kernel_per_parameter_with_masters(name, dtype):
    def count(leaves):
        box = [{f"w{i}": mx.ones((8, 8), dtype) for i in range(leaves)}]
        optimizer = wrapped(OPTIMIZERS[name]())
        optimizer.init(box[0])

        def step(gradients):
            box[0] = optimizer.apply_gradients(gradients, box[0])

        state = [box, optimizer.state]
        gradients = tree_map(lambda w: w + 1, box[0])
        mx.eval(state, gradients)
        mx.compile(step, inputs=state, outputs=state)(gradients)
        return len(kernels(state))

    # Up to eight leaves of one shape the finite check is as many kernels as for one.
    assert count(8) - count(4) == 4


def test_peak_memory_is_that_of_adamw_on_masters():
    # The gradients come from the float16 weights by an operation that cannot be
    # fused, as in a real step: a graph keeps its inputs until the end, so the old
    # weights and the gradients are there in both.
    def peak(guarded):
        weights = {f"w{i}": mx.zeros((2, 2**19), mx.float16) for i in range(8)}
        inner = optim.AdamW(1e-3)
        optimizer = wrapped(inner)
        if guarded:
            optimizer.init(weights)
            box = [weights]

            def step():
                gradients = tree_map(lambda w: mx.cumsum(w, axis=0), box[0])
                box[0] = optimizer.apply_gradients(gradients, box[0])

            state = [box, optimizer.state]
        else:
            box = [weights, tree_map(lambda w: w.astype(mx.float32), weights)]
            inner.init(box[1])

            def step():
                gradients = tree_map(
                    lambda w: mx.cumsum(w, axis=0).astype(mx.float32), box[0]
                )
                box[1] = inner.apply_gradients(gradients, box[1])
                box[0] = tree_map(lambda m: m.astype(mx.float16), box[1])

            state = [box, inner.state]
        del weights
        step = mx.compile(step, inputs=state, outputs=state)
        for _ in range(2):
            step()
            mx.eval(state)
        mx.clear_cache()
        mx.reset_peak_memory()
        step()
        mx.eval(state)
        return mx.get_peak_memory()

    assert peak(guarded=True) <= 1.02 * peak(guarded=False)


# Clipping


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_is_that_of_mlx(max_norm):
    optimizer = wrapped(optim.SGD(1.0), scale=2.0**10, max_grad_norm=max_norm)
    weights = parameters()
    gradients = gradients_like(weights, 3)
    scaled = tree_map(lambda g: g * 2.0**10, gradients)
    new = optimizer.apply_gradients(scaled, weights)
    clipped, norm = optim.clip_grad_norm(gradients, max_norm)
    expected = optim.SGD(1.0).apply_gradients(clipped, weights)
    assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for (_, a), (_, b) in zip(tree_flatten(new), tree_flatten(expected), strict=True):
        assert np.allclose(np.array(a), np.array(b), rtol=1e-6, atol=1e-7)


def test_the_norm_takes_fewer_kernels_than_clip_grad_norm():
    leaves = {f"w{i}": mx.ones((16, 16)) for i in range(16)}
    one = mx.array(1.0)
    mx.eval(leaves, one)
    ours = kernels(mx.compile(global_norm)(leaves, one))
    clip = kernels(mx.compile(lambda g: optim.clip_grad_norm(g, 1.0))(leaves))
    # Two joined passes for eight leaves each, one for both and a sum, against a
    # square, a sum and a product for every leaf.
    assert len(ours) <= 2 + 1 + 1 + 1
    assert len(clip) >= 3 * 16


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_an_infinite_gradient_skips_and_is_never_clipped_to_zero(value):
    optimizer = wrapped(optim.SGD(1.0), max_grad_norm=1.0)
    weights = {"a": mx.ones(2), "b": mx.ones(1)}
    gradients = {"a": mx.array([1.0, value]), "b": mx.ones(1)}
    new = optimizer.apply_gradients(gradients, weights)
    assert same(new, weights)
    assert not optimizer.scaler.last_step_applied.item()
    assert not np.isfinite(optimizer.grad_norm.item())


def test_infinity_only_measures():
    optimizer = wrapped(optim.SGD(1.0), max_grad_norm=INF)
    new = optimizer.apply_gradients({"a": mx.array([3.0, 4.0])}, {"a": mx.zeros(2)})
    assert new["a"].tolist() == [-3.0, -4.0]
    assert optimizer.grad_norm.item() == 5.0
    assert wrapped().grad_norm is None


# State


def save(optimizer, path):
    mx.save_safetensors(str(path), dict(tree_flatten(optimizer.state)))


def load(optimizer, path):
    optimizer.state = tree_unflatten(list(mx.load(str(path)).items()))


@pytest.mark.parametrize(
    "inner",
    [
        lambda: optim.AdamW(optim.cosine_decay(1e-2, 200)),
        lambda: optim.MultiOptimizer(
            [optim.Muon(0.02), optim.Adam(1e-2)], [lambda p, w: w.ndim == 2]
        ),
    ],
    ids=["AdamW", "MultiOptimizer"],
)
@pytest.mark.parametrize("when", ["compiled before", "init after", "no init"])
def test_saved_state_resumes_bit_for_bit(tmp_path, inner, when):
    training = Training(inner(), max_grad_norm=1.0)
    training.run(range(10), bad=(4,))
    save(training.optimizer, tmp_path / "optimizer.safetensors")
    training.model.save_weights(str(tmp_path / "model.safetensors"))
    training.run(range(10, 60), bad=(30,))

    again = Training(inner(), max_grad_norm=1.0, init=when == "compiled before")
    state = again.optimizer.state
    if when == "compiled before":
        again.run(range(3))
    again.model.load_weights(str(tmp_path / "model.safetensors"))
    load(again.optimizer, tmp_path / "optimizer.safetensors")
    if when == "init after":
        again.optimizer.init(again.model.trainable_parameters())
    again.run(range(10, 60), bad=(30,))
    assert again.optimizer.state is state
    assert again.everything() == training.everything()
    # Without init the first call makes the state, and the second sees more arrays.
    assert again.traced.count == (2 if when == "no init" else 1)


def test_state_resumes_in_a_fresh_process(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_unflatten
        from test_optimizer import Training, load, save
        folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        training = Training()
        if first:
            training.model.load_weights(folder + "/model.safetensors")
            load(training.optimizer, folder + "/optimizer.safetensors")
        training.run(range(first, last))
        training.model.save_weights(folder + "/model.safetensors")
        save(training.optimizer, folder + "/optimizer.safetensors")
        """
    )
    for first, last in ((0, 10), (10, 60)):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), str(first), str(last)],
            check=True,
            cwd=Path(__file__).parent,
            timeout=300,
        )
    training = Training()
    training.run(range(60))
    saved = mx.load(str(tmp_path / "optimizer.safetensors"))
    assert bits(saved) == bits(dict(tree_flatten(training.optimizer.state)))
    saved = mx.load(str(tmp_path / "model.safetensors"))
    assert bits(saved) == bits(dict(tree_flatten(training.model.parameters())))


def test_learning_rate_and_step_are_read_and_set():
    training = Training(optim.SGD(0.5))
    assert training.optimizer.learning_rate.item() == 0.5
    training.run([0])
    training.optimizer.learning_rate = 0.0
    before = bits(training.model.parameters())
    training.run([1])
    assert bits(training.model.parameters()) == before
    assert training.optimizer.step.item() == 2
    assert training.traced.count == 1


def test_a_disabled_scaler_leaves_masters_and_the_inner_optimizer():
    optimizer = LossScaleOptimizer(optim.SGD(1.0), GradScaler(enabled=False))
    loss_fn = optimizer.scale_loss(lambda w: w)
    assert loss_fn(mx.array(2.0)).item() == 2.0
    new = optimizer.apply_gradients({"w": mx.array([INF])}, {"w": mx.array([1.0])})
    assert new["w"].item() == -INF


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-3,), "Expected an optimizer"),
        ((optim.AdamW,), "Expected an optimizer"),
        ((LossScaleOptimizer(optim.SGD(0.1)),), "already"),
        ((optim.SGD(0.1), 65536.0), "must be a GradScaler"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        LossScaleOptimizer(*arguments)


def test_arguments_of_the_inner_optimizer_are_refused():
    with pytest.raises(TypeError, match="weight_decay belongs to the optimizer inside"):
        LossScaleOptimizer(optim.AdamW(1e-3), weight_decay=0.1)


@pytest.mark.parametrize("value", [0, -1.0, NAN, True, "1"])
def test_a_max_grad_norm_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="max_grad_norm must be a positive"):
        wrapped(max_grad_norm=value)


def test_a_wrapped_optimizer_inside_another_is_refused():
    nested = optim.MultiOptimizer([wrapped(), optim.SGD(0.1)], [lambda *_: True])
    with pytest.raises(TypeError, match="only once, outermost"):
        LossScaleOptimizer(nested)


def test_two_optimizers_do_not_share_a_scaler():
    first = wrapped()
    with pytest.raises(ValueError, match="belongs to another"):
        LossScaleOptimizer(optim.SGD(0.1), first.scaler)


def test_a_scaler_does_not_step_a_wrapped_optimizer():
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    with pytest.raises(TypeError, match="has a scaler of its own"):
        scaler.step(wrapped(), Mlp(), {})


def test_forgetting_to_scale_the_loss_is_refused():
    model, optimizer = Mlp(), LossScaleOptimizer(optim.SGD(0.1))
    _, gradients = nn.value_and_grad(model, mse(model))(*batch())
    with pytest.raises(RuntimeError, match="never scaled a loss"):
        optimizer.update(model, gradients)


def freeze_first():
    training = Training()
    training.model.layers[0].freeze()
    training.optimizer = wrapped()
    training.optimizer.init(training.model.trainable_parameters())
    return training


def test_parameters_added_later_or_frozen_before_are_named():
    training = freeze_first()
    training.model.layers[0].unfreeze()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    before = training.everything()
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' was not there"):
        training.optimizer.update(training.model, gradients)
    assert training.everything() == before


def test_parameters_removed_later_are_named():
    training = Training()
    del training.model.layers[1]["bias"]
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    with pytest.raises(ValueError, match=r"'layers\.1\.bias' is gone"):
        training.optimizer.update(training.model, gradients)


def test_a_gradient_for_a_parameter_frozen_later_is_refused():
    training = Training()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    training.model.layers[0].freeze()
    with pytest.raises(
        ValueError, match=r"'layers\.0\.(weight|bias)', which is frozen"
    ):
        training.optimizer.update(training.model, gradients)


def test_a_parameter_that_became_half_after_init_is_named_until_init_again():
    optimizer = wrapped(optim.SGD(1.0))
    optimizer.init({"w": mx.ones(2)})
    half = {"w": mx.ones(2, mx.float16)}
    with pytest.raises(ValueError, match=r"'w' became .*float16"):
        optimizer.apply_gradients(half, half)
    optimizer.init(half)
    optimizer.apply_gradients(half, half)
    assert set(optimizer.state["masters"]) == {"w"}


def test_parameters_that_come_later_train_after_init_again():
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.init({"a": mx.ones(1)})
    both = {"a": mx.ones(1), "b": mx.ones(1)}
    optimizer.init(both)
    new = optimizer.apply_gradients(both, both)
    assert new["b"].item() < 1


def test_copies_have_one_state_of_their_own():
    import copy
    import pickle

    for copied in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        optimizer = wrapped(optim.Adam(0.1))
        weights = {"w": mx.ones(2, mx.float16)}
        weights = optimizer.apply_gradients(weights, weights)
        other = copied(optimizer)
        assert other.state["scaler"] is other.scaler.state
        assert other.state["optimizer"] is other.optimizer.state
        assert bits(other.state) == bits(optimizer.state)
        other.scale_loss(lambda: None)
        other.apply_gradients({"w": mx.array([INF, 1.0])}, weights)
        assert other.state["scaler"]["scale"].item() == 0.5
        assert optimizer.scaler.get_scale() == 1.0


def test_freezing_later_is_allowed():
    training = Training()
    training.optimizer.scaler.scale(mx.array(1.0))
    training.model.layers[0].freeze()
    gradients = gradients_like(training.model.trainable_parameters(), 0)
    training.optimizer.update(training.model, gradients)
    assert training.optimizer.step.item() == 1


def spoil(state, path, value):
    state[path] = value
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("masters.layers.0.weight"),
            "has no 'masters.layers.0.weight'",
        ),
        (lambda s: spoil(s, "masters.x", mx.ones(1)), "another model"),
        (lambda s: spoil(s, "masters.layers.0.bias", mx.ones(3)), "of shape"),
        (
            lambda s: spoil(s, "masters.layers.0.bias", mx.full((16,), NAN)),
            "'masters.layers.0.bias' in the state holds NaN",
        ),
        (
            lambda s: spoil(s, "optimizer.layers.1.bias.v", mx.array([INF])),
            "'optimizer.layers.1.bias.v' in the state holds NaN",
        ),
        (lambda s: spoil(s, "scaler.scale", mx.array(0.0)), "scale must be positive"),
        (lambda s: s.clear(), "no scaler in it|has no"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change, message):
    training = Training()
    training.run(range(2))
    state = dict(tree_flatten(training.optimizer.state))
    change(state)
    before = training.everything()
    with pytest.raises((ValueError, TypeError), match=message):
        training.optimizer.state = tree_unflatten(list(state.items()))
    assert training.everything() == before


def test_a_state_of_another_model_set_before_init_is_refused_every_time():
    other = wrapped(optim.Adam(0.1))
    other.init({"x": mx.ones(3)})
    optimizer = wrapped(optim.Adam(0.1))
    optimizer.state = other.state
    weights = {"w": mx.ones(1)}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"another model|has no"):
            optimizer.apply_gradients(weights, weights)


def test_a_state_of_another_kind_is_refused_before_init_too():
    with pytest.raises(ValueError, match="not the state of a LossScaleOptimizer"):
        wrapped().state = optim.Adam(1e-3).state


# What reviews found


def test_masters_are_those_of_replaced_weights_and_keep_the_structure():
    optimizer = wrapped(optim.SGD(0.1))
    weights = {"a": (mx.ones(2, mx.float16), mx.ones(2)), "0": mx.ones(1, mx.bfloat16)}
    assert optimizer.masters(weights)["0"].dtype == mx.float32
    optimizer.init(weights)
    optimizer.apply_gradients(tree_map(lambda w: w * 1e-4, weights), weights)
    masters = optimizer.masters(weights)
    assert isinstance(masters["a"], tuple)
    assert masters["a"][0][0].item() == pytest.approx(1 - 1e-5, abs=1e-7)
    five = {**weights, "0": mx.full((1,), 5, mx.bfloat16)}
    assert optimizer.masters(five)["0"].item() == 5.0


def test_the_scaler_cannot_be_exchanged():
    with pytest.raises(AttributeError):
        wrapped().scaler = GradScaler()


def test_unscaling_twice_is_refused():
    optimizer = wrapped(optim.SGD(1.0), scale=1024.0)
    optimizer.scaler.scale(mx.array(1.0))
    gradients = optimizer.scaler.unscale_(optimizer.optimizer, {"w": mx.ones(1)})
    with pytest.raises(RuntimeError, match="max_grad_norm="):
        optimizer.apply_gradients(gradients, {"w": mx.ones(1)})


def test_a_skip_without_loss_scaling_is_counted():
    scaler = GradScaler(enabled=False)
    optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler, max_grad_norm=1.0)
    new = optimizer.apply_gradients({"w": mx.array([NAN])}, {"w": mx.ones(1)})
    assert new["w"].item() == 1.0
    assert not scaler.last_step_applied.item()
    assert scaler.skipped_steps.item() == 1


def test_a_state_that_is_rejected_at_init_leaves_the_scaler_as_it_was():
    other = wrapped(optim.Adam(0.1), scale=4.0)
    other.init({"x": mx.ones(3)})
    optimizer = wrapped(optim.Adam(0.1), scale=1024.0)
    optimizer.state = other.state
    for _ in range(2):
        with pytest.raises(ValueError, match=r"another model|has no"):
            optimizer.init({"w": mx.ones(2)})
        assert optimizer.scaler.get_scale() == 1024.0


def test_a_scaler_state_of_another_shape_is_refused():
    optimizer = wrapped()
    state = dict(tree_flatten(optimizer.state))
    state["scaler.scale"] = state["scaler.scale"].reshape(1)
    with pytest.raises(ValueError, match=r"scaler\.scale"):
        optimizer.state = tree_unflatten(list(state.items()))


def test_freezing_with_a_tree_of_trainable_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = wrapped(optim.SGD(0.1))
    optimizer.init(model.trainable_parameters())
    model.layers[0].freeze()
    weights = model.trainable_parameters()
    new = optimizer.apply_gradients(tree_map(mx.ones_like, weights), weights)
    assert len(tree_flatten(new)) == 2


def test_numbers_of_numpy_and_calls_with_a_loss():
    assert wrapped(max_grad_norm=np.float32(2)).max_grad_norm == 2.0
    with pytest.raises(TypeError, match="the function that computes the loss"):
        wrapped().scale_loss(mx.array(1.0))
