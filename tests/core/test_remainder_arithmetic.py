"""A weight and 16 bits of what rounding it lost are its float32 master."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import same
from support.optimizer_helpers import HALVES

from mlx_gradscale.core.masters import SixteenBit, to_float32

DTYPE = mx.int16
STORAGE = SixteenBit()


@mx.compile
def _split(master, weight):
    return STORAGE.split(master, weight)["remainders"]


@mx.compile
def _join(weight, remainder):
    return STORAGE.join(weight, {"remainders": remainder}).master


def split_and_joined(masters, dtype):
    """Weights, remainders and masters that come back; zero for infinite weights."""
    masters = mx.array(masters, mx.float32)
    masters = mx.where(mx.isfinite(masters.astype(dtype)), masters, 0)
    weights = masters.astype(dtype)
    remainders = _split(masters, weights)
    return masters, weights, remainders, _join(weights, remainders)


def allowed(masters, dtype):
    """The bound that the module states, for each master."""
    size = np.abs(np.array(masters, np.float64))
    if dtype == mx.float16:
        return np.where(size >= 2.0**-16, 0.0, 2.0**-40)
    near = np.maximum(size * 2.0**-23, 2.0**-126)
    return np.where(size < 2.0**110, near, size * 2.0**-8)


def check_bound(masters, dtype):
    masters, weights, remainders, back = split_and_joined(masters, dtype)
    assert remainders.dtype == DTYPE
    error = np.abs(np.array(back, np.float64) - np.array(masters, np.float64))
    assert np.all(error <= allowed(masters, dtype))
    # The same weight, and the same remainder: a checkpoint holds masters alone.
    assert mx.array_equal(back.astype(dtype), weights)
    sizes = mx.abs(masters)
    usual = mx.logical_or(sizes == 0, mx.logical_and(sizes > 1e-30, sizes < 1e30))
    again = mx.where(usual, _split(back, weights), remainders)
    assert mx.array_equal(again, remainders)


@pytest.mark.parametrize("dtype", HALVES)
@given(
    st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.floats(-65520, 65520, width=32),
            st.floats(-1, 1, width=32),
            st.floats(-(2.0**-12), 2.0**-12, width=32),
        ),
        min_size=16,
        max_size=16,
    )
)
def test_joined_master_is_within_the_documented_bound(dtype, masters):
    check_bound(masters, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "part", [0.0, 1e-7, 0.24999, 0.25, 0.499995, 0.5, 0.500005, 0.9]
)
def test_joined_master_is_within_the_bound_between_every_weight_and_the_next(
    dtype, part
):
    patterns = mx.arange(65536).astype(mx.uint16).view(dtype)
    values = np.array(mx.where(mx.isfinite(patterns), patterns, 0).astype(mx.float32))
    values = values.astype(np.float64)
    check_bound(values + part * (np.roll(values, -1) - values), dtype)


def test_joined_bfloat16_master_is_at_most_one_float32_ulp_off():
    # Between 1 and 2, and below a power of two, where float32 resolves twice as much.
    for start in (0x3FC0, 0x3F81, 0x3F80, 0x4000):
        patterns = (start << 16) + np.arange(-32768, 32768, dtype=np.int64)
        masters = patterns.astype(np.uint32).view(np.float32)
        masters, *_, back = split_and_joined(masters, mx.bfloat16)
        ulps = np.array(back).view(np.int32) - np.array(masters).view(np.int32)
        assert np.abs(ulps).max() == 1
        assert np.mean(ulps == 0) > (0.999 if start % 128 else 0.74)


@pytest.mark.parametrize("dtype", HALVES)
def test_joined_master_rounds_to_its_weight_whatever_the_remainder(dtype):
    weights = mx.arange(65536).astype(mx.uint16).view(dtype)
    for seed in range(4):
        key = mx.random.key(seed)
        stale = mx.random.randint(-32768, 32768, weights.shape, DTYPE, key=key)
        stale = mx.where(mx.arange(65536) % 3 == seed, (-1) ** seed * 32767, stale)
        masters = _join(weights, stale.astype(DTYPE))
        # Weights that are not finite are their own masters.
        assert mx.array_equal(masters.astype(dtype), weights, equal_nan=True)
        of_zero = mx.where(weights == 0, mx.abs(masters), 0)
        assert mx.max(of_zero).item() <= (2.0**-25 if dtype == mx.float16 else 0.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_exactly_representable_weight_has_no_remainder(dtype):
    weights = mx.random.normal((64,)).astype(dtype)
    none = mx.zeros((64,), DTYPE)
    assert same(_split(to_float32(weights), weights), none)
    assert same(_join(weights, none), to_float32(weights))
