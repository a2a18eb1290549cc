"""``LossScaleOptimizer``: every inner optimizer, skipping, clipping."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.graphs import bytes_moved, kernels
from support.helpers import (
    BAD_VALUES,
    INF,
    NAN,
    NOT_ELEMENTWISE,
    OPTIMIZERS,
    Traced,
    bits,
    gradients_like,
    parameters,
    poison,
    same,
)
from support.optimizer_helpers import HALVES, Training, wrapped

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core.finite import global_norm

pytestmark = pytest.mark.core

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
