"""``LossScaleOptimizer(masters="remainder")``: masters in two bytes less."""

import copy

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import bits, each_mode, gradients_like, same
from support.optimizer_helpers import HALVES, Training, wrapped

from mlx_gradscale import GuardedOptimizer, LossScaleOptimizer

REMAINDER = {"masters": "remainder"}
each_half = pytest.mark.parametrize("dtype", HALVES)


def masters(training):
    return training.optimizer.masters(training.model.trainable_parameters())


def nbytes(tree):
    return sum(x.nbytes for _, x in tree_flatten(tree) if x.ndim)


# What a run does


@each_half
@each_mode
def test_remainders_train_as_float32_masters_do(dtype, compiled):
    both = [Training(dtype=dtype, compiled=compiled) for _ in range(2)]
    both[1] = Training(dtype=dtype, compiled=compiled, **REMAINDER)
    for training in both:
        training.run(range(12), bad=(3, 7))
    expected, found = (dict(tree_flatten(masters(training))) for training in both)
    for path, x in expected.items():
        # Float16: the same masters, but for what is below 2**-16. Bfloat16: what one
        # bit in the last place is after ten steps.
        near = 2.0**-39 if dtype == mx.float16 else 2.0**-20
        assert mx.allclose(found[path], x, rtol=0, atol=near), path


@each_half
def test_small_steps_add_up_as_with_float32_masters(dtype):
    key, size = mx.random.key(1), (16, 16)
    start = (mx.random.normal(size, key=key) * 0.02).astype(dtype)
    found = {}
    for kind in ("float32", "remainder"):
        optimizer = GuardedOptimizer(optim.AdamW(1e-6), masters=kind)
        box = [{"w": start}]
        optimizer.init(box[0])

        def step(gradient, box=box, optimizer=optimizer):
            box[0] = optimizer.apply_gradients({"w": gradient}, box[0])

        state = [box, optimizer.state]
        step = mx.compile(step, inputs=state, outputs=state)
        keys = mx.random.split(key, 300)
        for k in keys:
            step(mx.random.normal(size, key=k) + mx.sign(start.astype(mx.float32)))
            mx.eval(state)
        found[kind] = optimizer.masters(box[0])["w"]
    moved = mx.abs(found["float32"] - start.astype(mx.float32))
    apart = mx.abs(found["float32"] - found["remainder"])
    # With 3,000 steps: 4e-14 of 2.2e-3 on the mean in float16, 2e-9 in bfloat16.
    assert mx.mean(moved).item() > 1e-4
    assert mx.mean(apart).item() < (1e-12 if dtype == mx.float16 else 2e-9)


@each_half
@each_mode
def test_a_skip_keeps_nan_payloads_infinities_and_remainders(dtype, compiled):
    training = Training(dtype=dtype, compiled=compiled, **REMAINDER)
    training.run(range(3))
    layer = training.model.layers[0]
    # Another NaN than arithmetic gives, an infinity, and a subnormal.
    odd = mx.array([0x7E01, 0xFFC1, 0xFC00, 0x0001], mx.uint16).view(dtype)
    layer.bias = mx.concatenate([odd, layer.bias[4:]])
    before = bits([training.model.parameters(), training.optimizer.state["remainders"]])
    moments = bits(training.optimizer.state["optimizer"])
    training.run([7], bad=(7,))
    state = training.optimizer.state
    assert bits([training.model.parameters(), state["remainders"]]) == before
    assert bits(state["optimizer"]) == moments


def test_a_third_party_optimizer_steps_joined_masters():
    class Doubling(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            assert {gradient.dtype, parameter.dtype} == {mx.float32}
            return parameter - 2 * self.learning_rate * gradient

    optimizer = wrapped(Doubling(0.5), **REMAINDER)
    weights = {"w": mx.ones(4, mx.float16)}
    for _ in range(100):
        weights = optimizer.apply_gradients({"w": mx.full((4,), 1e-4)}, weights)
    assert np.allclose(optimizer.masters(weights)["w"], 0.99, rtol=1e-5)


# Weights of the user


@each_half
def test_pruned_weights_stay_zero(dtype):
    optimizer = wrapped(optim.SGD(1.0), **REMAINDER)
    weights = {"w": mx.full((3,), 1000.25, dtype)}
    weights = optimizer.apply_gradients({"w": mx.full((3,), 0.1)}, weights)
    assert optimizer.masters(weights)["w"][0].item() not in (0.0, 1000.0)
    weights = {"w": mx.zeros(3, dtype)}
    for _ in range(3):
        weights = optimizer.apply_gradients({"w": mx.zeros(3)}, weights)
        assert weights["w"].tolist() == [0.0] * 3
    # Half the smallest float16: of what is below, the sum is still to be kept.
    assert mx.max(mx.abs(optimizer.masters(weights)["w"])).item() <= 2.0**-25


def test_updates_below_the_smallest_float16_add_up():
    optimizer = wrapped(optim.SGD(1.0), **REMAINDER)
    weights = {"w": mx.zeros(2, mx.float16)}
    for _ in range(100):
        weights = optimizer.apply_gradients({"w": mx.full((2,), -1e-9)}, weights)
    assert weights["w"][0].item() == pytest.approx(1e-7, rel=0.3)
    assert optimizer.masters(weights)["w"][0].item() == pytest.approx(1e-7, rel=1e-3)


def test_a_replaced_weight_has_a_master_within_half_its_ulp():
    training = Training(**REMAINDER)
    training.run(range(4))
    layer = training.model.layers[0]
    layer.weight = mx.random.normal(layer.weight.shape).astype(mx.float16)
    full, weight = masters(training)["layers"][0]["weight"], layer.weight
    assert mx.array_equal(full.astype(mx.float16), weight)
    assert mx.all(mx.abs(full - weight) <= mx.abs(weight).astype(mx.float32) * 2**-11)


def test_a_parameter_that_became_half_is_refused():
    optimizer = wrapped(**REMAINDER)
    optimizer.init({"w": mx.ones(2)})
    with pytest.raises(ValueError, match=r"no master weight.* not .*float16"):
        optimizer.apply_gradients({"w": mx.ones(2)}, {"w": mx.ones(2, mx.float16)})


# What it takes


@each_half
def test_remainders_take_twelve_bytes_per_parameter(dtype):
    taken = {}
    for kind in ("float32", "remainder"):
        weights = {"w": mx.ones((32, 32), dtype)}
        optimizer = wrapped(masters=kind)
        optimizer.init(weights)
        for seed in range(2):
            gradients = gradients_like(weights, seed)
            weights = optimizer.apply_gradients(gradients, weights)
        state = {k: x for k, x in optimizer.state.items() if k != "written"}
        taken[kind] = nbytes([weights, state]) / 1024
    # Weight 2, moments 8, and 4 or 2. What was written is the weight's own memory.
    assert taken == {"float32": 14, "remainder": 12}


# What else there is of masters


@pytest.mark.parametrize("saved", ["float32", "remainder"])
def test_a_state_with_the_other_kind_of_masters_is_refused(saved):
    other = {"float32": "remainder", "remainder": "float32"}[saved]
    training, loading = (Training(compiled=False, masters=x) for x in (saved, other))
    training.run(range(2))
    before = loading.everything()
    state = tree_map(lambda x: x, training.optimizer.state)
    with pytest.raises(ValueError, match="saved with the other kind"):
        loading.optimizer.state = state
    assert loading.everything() == before


def test_a_copy_has_remainders_of_its_own():
    training = Training(**REMAINDER)
    training.run(range(2))
    other = copy.deepcopy(training.optimizer)
    assert same(other.state, training.optimizer.state)
    training.run([2])
    assert not same(other.state["remainders"], training.optimizer.state["remainders"])


def test_only_half_parameters_have_remainders():
    optimizer = wrapped(**REMAINDER)
    optimizer.init({"a": mx.ones(2), "b": mx.ones(2, mx.float16), "i": mx.array([1])})
    assert list(optimizer.state["remainders"]) == ["b"]
    assert not optimizer.state["masters"]
    assert not optimizer.state["written"]


@pytest.mark.parametrize("wrong", ["float16", None, True, "remainders"])
def test_another_kind_of_masters_is_refused(wrong):
    with pytest.raises(ValueError, match='masters must be "float32" or "remainder"'):
        LossScaleOptimizer(optim.SGD(0.1), masters=wrong)
