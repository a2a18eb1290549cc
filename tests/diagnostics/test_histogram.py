"""Histograms agree with what a cast to float16 really does."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import gradient_histogram

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def cast(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float16)


def powers_of(values: np.ndarray) -> dict[int, int]:
    values = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    powers, counts = np.unique(
        np.frexp(np.abs(values))[1].astype(int) - 1, return_counts=True
    )
    return dict(zip(powers.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_every_half_precision_number_is_in_its_bin(dtype):
    every = mx.array(np.arange(2**16, dtype=np.uint16)).view(dtype)
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype == mx.float16:
        values = bits.view(np.float16)
    else:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    histogram = gradient_histogram({"w": every})
    assert histogram.by_power() == powers_of(values)
    assert histogram.bins[0] == 2
    assert histogram.nonfinite == np.count_nonzero(~np.isfinite(values))
    assert histogram.bins[-1] == np.count_nonzero(np.isnan(values))
    assert histogram.size == 2**16


def test_float32_subnormals_are_counted():
    # From the bits: no arithmetic on the way may flush them.
    bits = np.array([1, 2, 3, 0x007FE000, 0x00800000, 0x80000001], np.uint32)
    histogram = gradient_histogram([mx.array(bits).view(mx.float32)])
    assert histogram.by_power() == {-149: 2, -148: 2, -127: 1, -126: 1}


def test_values_that_round_up_to_infinity_overflow():
    edge = np.array([65504, 65519, 65519.99, 65520, 65535, 65536], np.float32)
    assert np.count_nonzero(np.isinf(cast(edge))) == 3
    assert gradient_histogram([mx.array(edge)]).unscaled.overflow == 0.5


def test_best_scale_is_the_middle_of_those_that_lose_nothing():
    # From 2**-14 on it is normal, up to 2**15 it is finite.
    assert gradient_histogram([mx.array([1.0])]).best_scale == 1.0
    assert gradient_histogram([mx.array([2.0**-10])]).best_scale == 1024.0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(FLOATS, min_size=1, max_size=40),
    st.integers(min_value=-10, max_value=24),
)
def test_shares_agree_with_a_cast(values, p):
    values = np.array(values, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = values.astype(np.float64) * 2.0**p
    # Within a rounding of 2**-25, and on it, a cast rounds either way.
    magnitude = np.abs(scaled)
    keep = (magnitude < 2.0**-25 * (1 - 2.0**-11)) | (magnitude > 2.0**-25)
    values, scaled = values[keep], scaled[keep]
    halves = cast(scaled)
    shares = gradient_histogram([mx.array(values)]).at(2.0**p)
    size = max(len(values), 1)
    assert shares.zero == np.count_nonzero(values == 0) / size
    assert shares.overflow == np.count_nonzero(np.isinf(halves)) / size
    assert shares.underflow == np.count_nonzero((halves == 0) & (values != 0)) / size
    assert shares.nonfinite == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_no_other_scale_loses_less(values):
    histogram = gradient_histogram([mx.array(np.array(values, np.float32))])
    best = histogram.best_scale
    if not any(values):
        assert best is None
        return
    powers = histogram.by_power()
    attainable = min(15 - max(powers), 64)
    if attainable < -64:
        assert best == 2.0**-64
        return

    def lost(p):
        shares = histogram.at(2.0**p)
        bits = sum(
            n * (-14 - q) for q, n in histogram.by_power(2.0**p).items() if q < -14
        )
        return shares.overflow, shares.underflow, bits

    assert lost(np.log2(best)) <= min(lost(p) for p in range(-64, 65))
    assert best <= 2.0**attainable


def test_scaled_gradients_give_the_same_histogram():
    grads = mx.array([2.0**-30, 2.0**-26, 2.0**-20, 1.0])
    scaler = GradScaler(init_scale=2.0**15)
    true = gradient_histogram([grads])
    scaled = gradient_histogram([grads * 2.0**15], scaler)
    assert scaled.by_power() == true.by_power()
    assert scaled.unscaled == true.unscaled
    assert scaled.scaled == true.at(2.0**15)
    assert (true.unscaled.underflow, scaled.scaled.underflow) == (0.5, 0.0)
    assert scaled.best_scale == true.best_scale


def test_overflow_asks_for_a_smaller_scale():
    grads = [mx.array([float("inf"), 2.0**-10])]
    assert gradient_histogram(grads, 2.0**10).best_scale < 2.0**10


def test_leaves_are_counted_alone_and_together():
    grads = {
        "a": {"weight": mx.full((4, 100), 2.0**-3).T},
        "b": [mx.array(8.0, mx.float16), mx.array([1, 2, 3])],
        "c": mx.array([3 + 4j]),
        "d": mx.zeros((0, 5)),
    }
    histogram = gradient_histogram(grads)
    assert list(histogram.leaves) == ["a.weight", "b.0", "c"]
    assert histogram.leaves["a.weight"].by_power() == {-3: 400}
    assert histogram.leaves["b.0"].by_power() == {3: 1}
    assert histogram.leaves["c"].by_power() == {1: 1, 2: 1}
    assert histogram.by_power() == {-3: 400, 1: 1, 2: 1, 3: 1}
    assert histogram.size == sum(x.size for x in histogram.leaves.values())


def test_histogram_prints_a_table():
    text = str(gradient_histogram([mx.array([2.0**-30, 1.0])], 1024.0))
    assert text.splitlines()[0].split()[-1] == "nonfinite"
    assert "at scale 2^10" in text
    assert "50.00%" in text


def test_tree_without_floating_leaves_is_empty():
    histogram = gradient_histogram({"n": mx.array([1, 2])})
    assert histogram.size == 0
    assert histogram.best_scale is None
    assert histogram.unscaled.zero == 0
    assert str(histogram)


def test_misuse_raises():
    with pytest.raises(TypeError, match="tree of arrays"):
        gradient_histogram({"w": 1.0})
    with pytest.raises(ValueError, match="positive"):
        gradient_histogram({"w": mx.ones(2)}, 0.0)
    with pytest.raises(TypeError, match="GradScaler"):
        gradient_histogram({"w": mx.ones(2)}, "big")
