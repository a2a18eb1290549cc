"""Histograms agree with what a cast to float16 really does."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale.diagnostics import gradient_histogram

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def powers_of(values):
    values = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    powers = np.frexp(np.abs(values))[1].astype(int) - 1
    # The subnormals of float32 share one bin.
    powers, counts = np.unique(np.maximum(powers, -127), return_counts=True)
    return dict(zip(powers.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_half_precision_number_is_counted_in_its_bin(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype == mx.float16:
        values = bits.view(np.float16)
    else:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    histogram = gradient_histogram({"w": mx.array(bits).view(dtype)})
    assert histogram.by_power() == powers_of(values)
    assert histogram.bins[0] == 2
    assert histogram.at(1.0).nonfinite == np.mean(~np.isfinite(values))
    assert histogram.bins[-1] == np.count_nonzero(np.isnan(values))
    assert histogram.size == 2**16


def test_float32_subnormals_underflow_and_values_that_round_to_inf_overflow():
    # From the bits: no arithmetic on the way may flush them.
    bits = np.array([1, 2, 3, 0x007FE000, 0x00800000, 0x80000001], np.uint32)
    histogram = gradient_histogram([mx.array(bits).view(mx.float32)])
    assert histogram.by_power() == {-127: 5, -126: 1}
    assert histogram.at(2.0**64).underflow == 1.0
    # At the other end, values that round up to infinity overflow.
    edge = [65504, 65519, 65519.99, 65520, 65535, 65536]
    assert gradient_histogram([mx.array(edge)]).at(1.0).overflow == 0.5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(FLOATS, min_size=1, max_size=40),
    st.integers(min_value=-10, max_value=24),
)
def test_histogram_shares_agree_with_a_cast_to_float16(values, p):
    values = np.array(values, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = values.astype(np.float64) * 2.0**p
        # Within a rounding of 2**-25, and on it, a cast rounds either way.
        magnitude = np.abs(scaled)
        keep = (magnitude < 2.0**-25 * (1 - 2.0**-11)) | (magnitude > 2.0**-25)
        values, halves = values[keep], scaled[keep].astype(np.float16)
    shares = gradient_histogram([mx.array(values)]).at(2.0**p)
    size = max(len(values), 1)
    assert shares.zero == np.count_nonzero(values == 0) / size
    assert shares.overflow == np.count_nonzero(np.isinf(halves)) / size
    assert shares.underflow == np.count_nonzero((halves == 0) & (values != 0)) / size
    assert shares.nonfinite == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_no_other_scale_loses_fewer_gradients_than_the_best_scale(values):
    histogram = gradient_histogram([mx.array(np.array(values, np.float32))])
    best = histogram.best_scale
    if not any(values):
        assert best is None
        return
    if max(histogram.by_power()) > 15 + 64:
        assert best == 2.0**-64  # even this one overflows
        return

    def lost(p):
        shares, powers = histogram.at(2.0**p), histogram.by_power(2.0**p)
        bits = sum(n * (-14 - q) for q, n in powers.items() if q < -14)
        return shares.overflow, shares.underflow, bits

    assert lost(np.log2(best)) <= min(lost(p) for p in range(-64, 65))


def test_best_scale_is_the_middle_one_and_ignores_non_finite_values():
    # From 2**-14 on it is normal, up to 2**15 it is finite.
    assert gradient_histogram([mx.array([1.0])]).best_scale == 1.0
    assert gradient_histogram([mx.array([2.0**-10])]).best_scale == 1024.0
    overflowed = [mx.array([float("inf"), 2.0**-10])]
    assert gradient_histogram(overflowed).best_scale == 1024.0


def test_histogram_table_shows_the_shares_without_scaling_and_at_the_best_scale():
    grads = mx.array([2.0**-30, 2.0**-26, 2.0**-20, 1.0])
    header, unscaled, best = str(gradient_histogram([grads])).splitlines()
    assert header.split()[-1] == "nonfinite"
    assert unscaled.startswith("without scaling ")
    assert "50.00%" in unscaled
    assert best.startswith("at the best, 2^15 ")


def test_histogram_counts_each_leaf_and_all_leaves():
    grads = {
        "a": {"weight": mx.full((4, 100), 2.0**-3).T},
        "b": [mx.array(8.0, mx.float16), mx.array([1, 2, 3])],
        "c": mx.array([3 + 4j]),
        "d": mx.zeros((0, 5)),
    }
    histogram = gradient_histogram(grads)
    leaves = {path: leaf.by_power() for path, leaf in histogram.leaves.items()}
    assert leaves == {"a.weight": {-3: 400}, "b.0": {3: 1}, "c": {1: 1, 2: 1}}
    assert histogram.by_power() == {-3: 400, 1: 1, 2: 1, 3: 1}


def test_histogram_of_a_tree_without_floating_leaves_is_empty():
    histogram = gradient_histogram({"n": mx.array([1, 2])})
    assert (histogram.size, histogram.best_scale) == (0, None)
    assert histogram.at(1.0).zero == 0
    assert str(histogram)


def test_gradient_histogram_refuses_wrong_trees_and_scales():
    with pytest.raises(TypeError, match="tree of mx"):
        gradient_histogram({"w": 1.0})
    with pytest.raises(ValueError, match="positive"):
        gradient_histogram({"w": mx.ones(2)}).at(0.0)
    with pytest.raises(TypeError, match="GradScaler"):
        gradient_histogram({"w": mx.ones(2)}).at("big")
