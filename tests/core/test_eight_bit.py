"""Codes of 8 bits lose no update: properties of the arithmetic, without a model."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from support.optimizer_helpers import HALVES

from mlx_gradscale.core.eight_bit import EightBit, decode, encode, round_master

EPS = 1e-8
STORAGE = EightBit()
STEPS = (*range(1, 200), 10**6, 2**32 - 1, 2**40)


def dither(step):
    """The numbers a and b of a step."""
    return STORAGE.dither(mx.array(step, mx.uint64))[:2]


def join(weight, remainder):
    return STORAGE.join(weight, {"remainders": remainder}).master


def adam_of(m, v):
    return {"m": m, "v": v}


def encoded(m, v, eps=EPS, *dithers):
    return encode(adam_of(m, v), eps, *dithers).moments


def rounded(master, weight, step):
    return round_master(master, weight, dither(step)[0])[:2]


def add_constantly(weight, update, steps):
    """Add an update to master weights in 8 bits; return the sum of what they gained."""
    remainder = mx.zeros(weight.shape, mx.int8)
    start = join(weight, remainder)
    for i in range(steps):
        master = join(weight, remainder) + update
        weight, remainder = rounded(master, weight, i)
        mx.eval(weight, remainder)
    return join(weight, remainder) - start


@pytest.mark.parametrize(
    ("dtype", "ulps"),
    # Float32 itself would lose 2 percent of a smaller update of a float16 weight.
    [*itertools.product(HALVES, [0.05, 0.3, 1, 5]), (mx.bfloat16, 0.005)],
)
def test_constant_updates_add_up_and_no_weight_gets_stuck(dtype, ulps):
    start = mx.random.uniform(0.5, 4, (3000,), key=mx.random.key(0)).astype(dtype)
    # Some just below, at and above powers of two.
    start[:9] = 2.0 ** (np.arange(9) // 3) * (1 + (np.arange(9) % 3 - 1) * 2.0**-8)
    steps = 1000 if ulps < 0.05 else 100
    for weight, sign in ((start, 1), (start, -1), (-start, 1)):
        update = sign * ulps * mx.finfo(dtype).eps * 0.7 * mx.ones(weight.shape)
        gain = add_constantly(weight, update, steps) / (steps * update)
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
            codes = encoded(*coded, EPS, *dither(j))
            sums = [sums[0] + update, sums[1] + other]
            mx.eval(exact, codes, sums)
        square = mx.mean(mx.square(sums[0]))
        gains.append((mx.mean(sums[0] * sums[1]) / square).item())
        error = mx.mean(mx.square(sums[1] - sums[0]))
        errors.append(mx.sqrt(error / square).item())
    assert 0.97 < np.mean(gains) < 1.03
    assert max(errors) < 0.26


@pytest.mark.parametrize("dtype", HALVES)
def test_exact_zeros_stay_zero_at_every_step(dtype):
    zeros = mx.zeros((4,))
    for step in STEPS:
        codes = encoded(zeros, zeros, EPS, *dither(step))
        weight, remainder = rounded(zeros, zeros.astype(dtype), step)
        moments = [*codes.values(), *decode(codes, EPS).values()]
        for x in (*moments, weight, remainder, join(weight, remainder)):
            assert not mx.any(x).item(), step


@pytest.mark.parametrize("eps", [1e-10, 1e-8, 1e-3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.99, 0.9)])
def test_gradients_from_1e_30_to_1e15_leave_no_infinity_and_bounded_updates(betas, eps):
    size = mx.array(10.0 ** np.arange(-30, 16), mx.float32)
    codes = encoded(mx.zeros_like(size), mx.zeros_like(size), eps)
    for i in range(60):
        # Spikes, silence, and changes of sign.
        g = size * [1, -1, 1e-3, 0, 0, 0][i % 6]
        old = decode(codes, eps)
        m, v = old["m"], old["v"]
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * mx.square(g)
        codes = encoded(m, v, eps, *dither(i))
        decoded = decode(codes, eps).values()
        assert all(mx.all(mx.isfinite(x)).item() for x in (m, v, *decoded))
        # The decoded m is at most sqrt(252) sqrt(v), and the new v at least beta2 v.
        bound = 17 / math.sqrt(betas[1]) + 1 / math.sqrt(1 - betas[1])
        assert mx.max(mx.abs(m) / (mx.sqrt(v) + eps)).item() < bound


def test_every_code_is_decoded_to_a_value_with_the_same_code():
    m = mx.arange(-98, 99).astype(mx.int8)
    for code in range(253):
        v = mx.full(m.shape, code, mx.uint8)
        # The middle between the thresholds of dither 0 and 1.
        again = encoded(**decode(adam_of(m, v), EPS))
        assert mx.array_equal(again["m"], m)
        assert mx.array_equal(again["v"], v)


@pytest.mark.parametrize("dtype", HALVES)
def test_master_of_any_weight_with_any_remainder_is_half_an_ulp_away_at_most(dtype):
    patterns = np.arange(65536, dtype=np.uint16)
    weight = mx.array(patterns).view(dtype)
    usual = np.array(mx.abs(weight.astype(mx.float32)))
    # GPUs flush float32 subnormals, and a remainder is 2**-16 of its weight.
    tiny, large = (2.0**-24, 65505) if dtype == mx.float16 else (2.0**-109, 2.0**127)
    weight = weight[mx.array(np.flatnonzero((usual >= tiny) & (usual < large)))]
    value = weight.astype(mx.float32)
    bits = weight.view(mx.uint16)
    ulp = mx.abs((bits + 1).view(dtype).astype(mx.float32) - value)
    for r in (-126, -63, -1, 0, 1, 63, 126):
        remainder = mx.full(weight.shape, r, mx.int8)
        master = join(weight, remainder)
        assert mx.all(mx.abs(master - value) <= ulp * 0.500001).item()
        assert mx.array_equal(STORAGE.split(master, weight)["remainders"], remainder)


def test_dithers_lie_between_zero_and_one_and_are_evenly_spread():
    found = [dither(step) for step in STEPS]
    for numbers in zip(*found, strict=True):
        values = np.array([x.item() for x in numbers])
        assert 0 < values.min() < values.max() < 1
        counts, _ = np.histogram(values[:199], bins=10, range=(0, 1))
        assert counts.min() >= 17
        assert counts.max() <= 23
    a, b = np.array([[x.item() for x in each] for each in found]).T
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1
