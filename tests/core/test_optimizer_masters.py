"""``LossScaleOptimizer``: master weights of both kinds."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import INF, bits, dtypes, each_mode, refused, same
from support.optimizer_helpers import HALVES, Training, assert_near, wrapped

each_kind = pytest.mark.parametrize("state_bits", [32, 16, 8])


@each_kind
def test_inner_optimizer_sees_only_float32(state_bits, monkeypatch):
    seen, apply_single = set(), optim.SGD.apply_single

    def watching(self, gradient, parameter, state):
        seen.update(x.dtype for x in (gradient, parameter, *state.values()))
        return apply_single(self, gradient, parameter, state)

    monkeypatch.setattr(optim.SGD, "apply_single", watching)
    Training(optim.SGD(0.1, momentum=0.9), state_bits=state_bits).run(range(2))
    assert seen == {mx.float32}


@each_kind
def test_only_half_parameters_have_master_weights_in_a_tree_of_their_structure(
    state_bits,
):
    optimizer = wrapped(optim.SGD(0.1), state_bits=state_bits)
    weights = {"a": (mx.ones(2, mx.float16), mx.ones(2)), "0": mx.ones(1, mx.bfloat16)}
    weights["i"] = mx.array([1])
    assert dtypes(optimizer.masters(weights)) == {mx.float32, mx.int32}  # before init
    optimizer.init(weights)
    own, other = ("masters", "remainders")[:: 1 if state_bits == 32 else -1]
    assert set(optimizer.state[own]) == {"a.0", "0"}
    assert dict.get(optimizer.state, other) is None
    optimizer.apply_gradients(tree_map(lambda w: w * 1e-4, weights), weights)
    masters = optimizer.masters(weights)
    assert isinstance(masters["a"], tuple)
    assert masters["a"][0][0].item() == pytest.approx(1 - 1e-5, abs=4e-6)
    five = {**weights, "0": mx.full((1,), 5, mx.bfloat16)}
    assert optimizer.masters(five)["0"].item() == pytest.approx(5.0, rel=1e-2)


@each_kind
@pytest.mark.parametrize(
    # A fifth of float16's half ulp at 1 (4.9e-4), and below its smallest number.
    ("start", "step", "end"),
    [(1.0, 1e-4, 0.99), (0.0, -1e-9, 1e-7)],
)
def test_updates_too_small_for_float16_accumulate_only_with_master_weights(
    state_bits, start, step, end
):
    kept = lost = {"w": mx.full((4,), start, mx.float16)}
    gradients = {"w": mx.full((4,), step, mx.float16)}
    optimizer, plain = wrapped(optim.SGD(1.0), state_bits=state_bits), optim.SGD(1.0)
    for _ in range(100):
        kept = optimizer.apply_gradients({"w": mx.full((4,), step)}, kept)
        lost = plain.apply_gradients(gradients, lost)
    assert lost["w"].tolist() == [start] * 4
    assert kept["w"][0].item() == pytest.approx(end, rel=0.3 if end < 1e-6 else 5e-4)
    assert optimizer.masters(kept)["w"][0].item() == pytest.approx(end, rel=4e-3)


@each_kind
@pytest.mark.parametrize("dtype", HALVES)
@each_mode
def test_weights_replaced_by_the_user_are_kept(dtype, compiled, state_bits):
    # Scheduled, so that it shares its kernels with the test above.
    still = optim.AdamW(lambda step: mx.array(0.0))
    training = Training(still, dtype, compiled, state_bits=state_bits)
    training.run(range(3))
    model = training.model
    for i in range(3):
        random = lambda p, i=i: mx.random.normal(p.shape) * 10.0 ** (-3 * i)  # noqa: E731
        model.apply(lambda p, random=random: random(p).astype(dtype))
        if i == 2:
            for layer in model.layers:
                layer.weight += 1
                layer.bias[0] = 5
        new = tree_map(lambda x: x * 1, model.parameters())
        training.run([7], bad=(7,) if i == 1 else ())
        # By value: the optimizer's arithmetic may turn -0 into 0.
        assert_near(model.parameters(), new, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_neighbor_of_a_rounded_master_weight_counts_as_replaced(dtype):
    patterns = mx.arange(65536).astype(mx.uint16).view(dtype)
    values = patterns[mx.array(np.flatnonzero(mx.isfinite(patterns)))]
    # A third of an ulp from each value, towards zero: it rounds back to it.
    masters = values.astype(mx.float32) * (1 - mx.finfo(dtype).eps / 3)
    rounded = masters.astype(dtype)
    for offset in (0, 1, 65535):
        weights = (rounded.view(mx.uint16) + mx.array(offset, mx.uint16)).view(dtype)
        optimizer = wrapped(optim.SGD(0.0))
        optimizer.init({"w": rounded})
        optimizer.state["masters"]["w"] = masters
        new = optimizer.apply_gradients({"w": mx.zeros_like(weights)}, {"w": weights})
        both = [mx.where(mx.isfinite(weights), x, 0) for x in (new["w"], weights)]
        assert mx.array_equal(*both)
        kept = optimizer.state["masters"]["w"] == masters
        exact = masters == weights.astype(mx.float32)
        assert mx.all(kept if offset == 0 else kept <= exact).item()


@each_kind
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_model_cast_after_init_trains_on_from_its_weights(dtype, state_bits):
    training = Training(optim.SGD(0.0), compiled=False, state_bits=state_bits)
    training.run(range(2))
    for changed in (dtype, mx.float16):
        training.model.set_dtype(changed)
        before = tree_map(lambda x: x * 1, training.model.trainable_parameters())
        training.run([3])
        assert same(training.model.trainable_parameters(), before)


def test_master_weight_is_replaced_by_the_user_or_with_its_weight():
    optimizer, zeros = wrapped(optim.SGD(0.0)), {"w": mx.zeros(1)}
    weights = {"w": mx.ones(1, mx.float16)}
    optimizer.init(weights)
    optimizer.state["masters"]["w"] = mx.array([3.0])
    skipped = optimizer.apply_gradients({"w": mx.array([INF])}, weights)
    assert skipped["w"].item() == 1.0
    assert optimizer.apply_gradients(zeros, skipped)["w"].item() == 3.0
    # bfloat16 2**-7 has the bits of float16 1.
    optimizer.apply_gradients(zeros, weights)
    weights = {"w": mx.full((1,), 2**-7, mx.bfloat16)}
    assert optimizer.apply_gradients(zeros, weights)["w"].item() == 2**-7


@pytest.mark.parametrize("save", [False, True], ids=["set_dtype", "state"])
def test_master_weights_survive_a_change_from_float16_to_bfloat16(save):
    optimizer = wrapped(optim.SGD(1.0))
    weights = {"w": mx.ones(1, mx.float16)}
    weights = optimizer.apply_gradients({"w": mx.full((1,), 2**-13)}, weights)
    weights = {"w": weights["w"].astype(mx.bfloat16)}
    if save:
        state = tree_map(lambda x: x, optimizer.state)
        optimizer = wrapped(optim.SGD(1.0))
        optimizer.init(weights)
        optimizer.state = state
    optimizer.apply_gradients({"w": mx.zeros(1)}, weights)
    assert optimizer.state["masters"]["w"].item() == 1 - 2**-13


@each_mode
def test_written_bits_share_the_memory_of_the_weights(compiled):
    training = Training(compiled=compiled)
    for seed in range(3):
        weights = tree_flatten(training.model.trainable_parameters())
        written = training.optimizer.state["written"]
        for path, x in weights:
            first, second = (np.array(a, copy=False) for a in (x, written[path]))
            assert np.shares_memory(first, second), path
        training.run([seed], bad=(1,))


@each_kind
def test_set_masters_replaces_the_master_weights_by_values_of_any_dtype(state_bits):
    optimizer = wrapped(optim.SGD(0.0), state_bits=state_bits)
    masters = {"w": mx.array([0.1, 0.2]), "full": mx.array([5.0])}
    weights = {"w": masters["w"].astype(mx.float16), "full": mx.array([5.0])}
    optimizer.init(tree_map(mx.zeros_like, weights))
    optimizer.set_masters(weights, masters)
    if state_bits == 8:  # to the nearest of 252 values per ulp of 2**-13
        assert_near(optimizer.masters(weights), masters, rtol=0, atol=2**-13 / 500)
        masters = optimizer.masters(weights)
    assert same(optimizer.masters(weights), masters)
    new = optimizer.apply_gradients(tree_map(mx.zeros_like, masters), weights)
    assert same(new, weights)
    assert same(optimizer.masters(new), masters)
    whole = {"w": mx.array([2.0, 3.0], mx.float16)}
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.int32):
        optimizer = wrapped(optim.SGD(0.0), state_bits=state_bits)
        optimizer.set_masters(whole, {"w": whole["w"].astype(dtype)})
        assert optimizer.masters(whole)["w"].tolist() == [2.0, 3.0]


@each_kind
def test_set_masters_refuses_other_weights_and_ignores_frozen_parameters(state_bits):
    optimizer, weights = wrapped(state_bits=state_bits), {"w": mx.ones(2, mx.float16)}
    optimizer.init(weights)
    with refused(ValueError, "'w' do not round to the parameter", optimizer):
        optimizer.set_masters(weights, {"w": mx.array([1.0, 1.01])})
    before = bits(optimizer.state)
    frozen = {"frozen": mx.ones(3, mx.float16)}  # which has no master weight
    optimizer.set_masters(weights | frozen, weights | frozen)
    assert bits(optimizer.state) == before
