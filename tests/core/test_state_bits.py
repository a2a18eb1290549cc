"""Master weights and moments in fewer bytes: ``state_bits=16`` and ``8``."""

import copy
import itertools
import math

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import gradients_like
from support.optimizer_helpers import HALVES, decoded, wrapped

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer
from mlx_gradscale.core.eight_bit import EightBit, decode, encode, round_master


def nbytes(tree):
    return sum(x.nbytes for _, x in tree_flatten(tree) if x.ndim)


# Weight 2, master weight 4, 2 or 1, and the moments; float32 weights are their own
# masters. Adafactor's rows and columns are 1/8 of a byte here.
MOMENTUM = ({32: 10, 16: 6, 8: 5}, {32: 8, 16: 6, 8: 6})
BYTES = {
    "AdamW": (optim.AdamW(1e-3), {32: 14, 16: 8, 8: 5}, {32: 12, 16: 8, 8: 6}),
    "Lion": (optim.Lion(1e-3), *MOMENTUM),
    "SGD momentum": (optim.SGD(1e-3, momentum=0.9), *MOMENTUM),
    "Adafactor": (
        optim.Adafactor(),
        {32: 6.25, 16: 4.25, 8: 3.25},
        dict.fromkeys((32, 16, 8), 4.25),
    ),
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("dtype", [*HALVES, mx.float32])
def test_state_takes_as_many_bytes_per_parameter_as_documented(name, dtype):
    inner, half, full = BYTES[name]
    taken = {}
    for state_bits in half:
        weights = {"w": mx.ones((32, 32), dtype)}
        optimizer = wrapped(copy.deepcopy(inner), state_bits=state_bits)
        optimizer.init(weights)
        for seed in range(2):
            gradients = gradients_like(weights, seed)
            weights = optimizer.apply_gradients(gradients, weights)
        # The written bits are the weight's own memory.
        state = {k: x for k, x in optimizer.state.items() if k != "written"}
        taken[state_bits] = nbytes([weights, state]) / 1024
    assert taken == (full if dtype == mx.float32 else half)


@pytest.mark.parametrize("state_bits", [16, 8])
def test_moments_decay_where_rounding_to_the_nearest_would_freeze_them(state_bits):
    start, none = {"w": mx.linspace(0.5, 2.0, 256)}, {"w": mx.zeros(256)}
    optimizer = MasterWeightOptimizer(optim.Adam(0.0), state_bits=state_bits)

    def second_moment():
        return decoded(optimizer, optim.Adam(0.0), start).state["w"]["v"]

    optimizer.apply_gradients(start, start)
    first = second_moment()
    for _ in range(800):
        optimizer.apply_gradients(none, start)
        mx.eval(optimizer.state)
    # To the nearest, v would not change at all: a code of 8 bits is 28 percent from the
    # next, and half an ulp of bfloat16 is 0.2 percent.
    decay = mx.log(second_moment() / first)
    expected = 800 * math.log(0.999)
    assert mx.mean(decay).item() == pytest.approx(expected, abs=0.05)
    near = {16: 0.15, 8: 0.6}[state_bits]
    assert mx.max(mx.abs(decay - expected)).item() < near


@pytest.mark.parametrize("state_bits", [16, 8])
def test_few_state_bits_of_a_third_party_optimizer_are_refused(state_bits):
    inner = optim.MultiOptimizer([type("Own", (optim.Adam,), {})(0.1)], [])
    with pytest.raises(ValueError, match="Own manages its own state"):
        LossScaleOptimizer(inner, state_bits=state_bits)


@pytest.mark.parametrize("eps", [0.0, 1e-13, float("nan")])
def test_state_bits_8_refuses_an_eps_that_its_codes_cannot_represent(eps):
    optimizer = wrapped(optim.AdamW(1e-3), state_bits=8)
    optimizer.eps = eps
    with pytest.raises(ValueError, match="state_bits=8 requires an eps of at least"):
        optimizer.init({"w": mx.ones(2, mx.float16)})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95), (0.99, 0.9)])
def test_gradients_of_every_size_leave_finite_weights_in_8_bits(dtype, eps, betas):
    sizes = 10.0 ** mx.arange(-30, 16)
    weights = {"w": mx.concatenate([mx.full(46, 0.01), mx.zeros(46)]).astype(dtype)}
    optimizer = wrapped(optim.AdamW(1e-3, betas, eps), state_bits=8)
    for i in range(30):
        # Spikes, silence, and changes of sign; zeros stay zero.
        gradients = sizes * [1, -1, 1e-3, 0, 0, 0][i % 6]
        gradients = {"w": mx.concatenate([gradients, gradients * 0])}
        weights = optimizer.apply_gradients(gradients, weights)
    masters = optimizer.masters(weights)["w"]
    # 30 steps of at most 16 times the rate, where v has its largest code; inf is not.
    assert mx.max(mx.abs(masters)).item() < 0.5
    assert not mx.any(masters[46:]).item()


def stored(masters, weights, state_bits):
    """Return the remainders of master weights, and the master weights of those."""
    optimizer = wrapped(optim.SGD(0.0), state_bits=state_bits)
    optimizer.set_masters({"w": weights}, {"w": masters})
    return optimizer.state["remainders"]["w"], optimizer.masters({"w": weights})["w"]


def joined(weights, remainders, state_bits):
    optimizer = wrapped(optim.SGD(0.0), state_bits=state_bits)
    optimizer.init({"w": weights})
    optimizer.state["remainders"]["w"] = remainders
    return optimizer.masters({"w": weights})["w"]


def every_half(dtype):
    return mx.arange(65536).astype(mx.uint16).view(dtype)


def allowed(masters, dtype):
    """The bound that the module states, for each master."""
    size = np.abs(np.array(masters, np.float64))
    if dtype == mx.float16:
        return np.where(size >= 2.0**-16, 0.0, 2.0**-40)
    near = np.maximum(size * 2.0**-23, 2.0**-126)
    return np.where(size < 2.0**110, near, size * 2.0**-8)


PARTS = [0.0, 1e-7, 0.24999, 0.25, 0.499995, 0.5, 0.500005, 0.9]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("part", [*PARTS, "random"])
def test_master_between_any_two_weights_is_stored_in_16_bits_within_the_bound(
    dtype, part
):
    patterns = every_half(dtype)
    values = np.array(mx.where(mx.isfinite(patterns), patterns, 0).astype(mx.float32))
    values = values.astype(np.float64)
    part = np.random.default_rng(0).random(65536) if part == "random" else part
    masters = mx.array(values + part * (np.roll(values, -1) - values), mx.float32)
    masters = mx.where(mx.isfinite(masters.astype(dtype)), masters, 0)
    weights = masters.astype(dtype)
    remainders, back = stored(masters, weights, 16)
    assert remainders.dtype == mx.int16
    error = np.abs(np.array(back, np.float64) - np.array(masters, np.float64))
    assert np.all(error <= allowed(masters, dtype))
    # The same weight, and the same remainder: a checkpoint holds masters alone.
    assert mx.array_equal(back.astype(dtype), weights)
    sizes = mx.abs(masters)
    usual = mx.logical_or(sizes == 0, mx.logical_and(sizes > 1e-30, sizes < 1e30))
    again = mx.where(usual, stored(back, weights, 16)[0], remainders)
    assert mx.array_equal(again, remainders)


@pytest.mark.parametrize("dtype", HALVES)
def test_joined_master_rounds_to_its_weight_whatever_the_16_bits(dtype):
    weights = every_half(dtype)
    for seed in range(4):
        key = mx.random.key(seed)
        stale = mx.random.randint(-32768, 32768, weights.shape, mx.int16, key=key)
        stale = mx.where(mx.arange(65536) % 3 == seed, (-1) ** seed * 32767, stale)
        masters = joined(weights, stale.astype(mx.int16), 16)
        # Weights that are not finite are their own masters.
        assert mx.array_equal(masters.astype(dtype), weights, equal_nan=True)
        of_zero = mx.where(weights == 0, mx.abs(masters), 0)
        assert mx.max(of_zero).item() <= (2.0**-25 if dtype == mx.float16 else 0.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_master_of_any_weight_with_any_8_bits_is_half_an_ulp_away_at_most(dtype):
    weight = every_half(dtype)
    usual = np.array(mx.abs(weight.astype(mx.float32)))
    # GPUs flush float32 subnormals, and a remainder is 2**-16 of its weight.
    tiny, large = (2.0**-24, 65505) if dtype == mx.float16 else (2.0**-109, 2.0**127)
    weight = weight[mx.array(np.flatnonzero((usual >= tiny) & (usual < large)))]
    value = weight.astype(mx.float32)
    above = (weight.view(mx.uint16) + 1).view(dtype).astype(mx.float32)
    for r in (-126, -63, -1, 0, 1, 63, 126):
        remainder = mx.full(weight.shape, r, mx.int8)
        master = joined(weight, remainder, 8)
        assert mx.all(mx.abs(master - value) <= mx.abs(above - value) * 0.500001).item()
        again = EightBit().split(master, weight)["remainders"]
        assert mx.array_equal(again, remainder)


# The arithmetic of 8 bits alone, over many steps.

EPS = 1e-8
STEPS = (*range(1, 200), 10**6, 2**32 - 1, 2**40)


def dither(step):
    """The numbers a and b of a step."""
    return EightBit().dither(mx.array(step, mx.uint64))[:2]


def encoded(m, v, *dithers):
    return encode({"m": m, "v": v}, EPS, *dithers).moments


def join(weight, remainder):
    return EightBit().join(weight, {"remainders": remainder}).master


@pytest.mark.parametrize(
    ("dtype", "ulps"),
    # Float32 itself would lose 2 percent of a smaller update of a float16 weight.
    [*itertools.product(HALVES, [0.05, 0.3, 1, 5]), (mx.bfloat16, 0.005)],
)
def test_constant_updates_add_up_and_no_weight_gets_stuck(dtype, ulps):
    first = mx.random.uniform(0.5, 4, (3000,), key=mx.random.key(0)).astype(dtype)
    # Some just below, at and above powers of two.
    first[:9] = 2.0 ** (np.arange(9) // 3) * (1 + (np.arange(9) % 3 - 1) * 2.0**-8)
    steps = 1000 if ulps < 0.05 else 100
    for weight, sign in ((first, 1), (first, -1), (-first, 1)):
        update = sign * ulps * mx.finfo(dtype).eps * 0.7 * mx.ones(weight.shape)
        remainder = mx.zeros(weight.shape, mx.int8)
        start = join(weight, remainder)
        for i in range(steps):
            master = join(weight, remainder) + update
            weight, remainder, _ = round_master(master, weight, dither(i)[0])
            mx.eval(weight, remainder)
        gain = (join(weight, remainder) - start) / (steps * update)
        assert mx.min(gain).item() > 0.97
        assert mx.max(gain).item() < 1.03


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_noisy_gradients_that_shrink_give_the_sums_of_float32_updates(beta2):
    shape = (2000,)
    size = 10.0 ** mx.random.uniform(-5, 1, shape, key=mx.random.key(0))
    exact = mx.zeros(shape), mx.zeros(shape)
    codes = encoded(*exact)

    def adam(m, v, g):
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * mx.square(g)
        return (m, v), m / (mx.sqrt(v) + EPS)

    gains, errors = [], []
    for i in range(30):
        sums = [mx.zeros(shape)] * 2
        for j in range(100 * i, 100 * i + 100):
            g = mx.random.normal(shape, key=mx.random.key(j)) * size
            g = g if i < 10 else g / 5
            exact, update = adam(*exact, g)
            coded, other = adam(**decode(codes, EPS), g=g)
            codes = encoded(*coded, *dither(j))
            sums = [sums[0] + update, sums[1] + other]
            mx.eval(exact, codes, sums)
        square = mx.mean(mx.square(sums[0]))
        gains.append((mx.mean(sums[0] * sums[1]) / square).item())
        error = mx.mean(mx.square(sums[1] - sums[0]))
        errors.append(mx.sqrt(error / square).item())
    # With b in place of its spread, the mean is 0.970.
    assert 0.98 < np.mean(gains) < 1.02
    assert max(errors) < 0.26


def test_every_code_is_decoded_to_a_value_with_the_same_code():
    m = mx.arange(-98, 99).astype(mx.int8)
    for code in range(253):
        v = mx.full(m.shape, code, mx.uint8)
        # The middle between the thresholds of dither 0 and 1.
        again = encoded(**decode({"m": m, "v": v}, EPS))
        assert mx.array_equal(again["m"], m)
        assert mx.array_equal(again["v"], v)


def test_dithers_lie_between_zero_and_one_and_are_evenly_spread():
    found = np.array([[x.item() for x in dither(step)] for step in STEPS])
    for values in found.T:
        assert 0 < values.min() < values.max() < 1
        counts, _ = np.histogram(values[:199], bins=10, range=(0, 1))
        assert counts.min() >= 17
        assert counts.max() <= 23
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.1
