"""The finite check agrees with ``mx.isfinite`` on everything."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import BAD_VALUES, INF, NAN, kernels
from hypothesis import given
from hypothesis import strategies as st

from mlx_gradscale import NonFinite, all_finite, nonfinite
from mlx_gradscale import finite as module

HALVES = [mx.float16, mx.bfloat16]
FLOATS = [*HALVES, mx.float32]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_bit_pattern_of_the_halves(dtype):
    patterns = mx.arange(65536).astype(mx.uint16).view(dtype)
    expected = np.array(mx.isfinite(patterns))
    # Together, all that are finite; alone, each that is not.
    indices = np.arange(65536)
    assert all_finite(patterns[mx.array(indices[expected])]).item()
    check = mx.compile(all_finite)
    bad = [check(patterns[i]) for i in indices[~expected].tolist()]
    assert len(bad) in (2 * 1024, 2 * 128)
    assert not mx.any(mx.stack(bad)).item()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30))
def test_bit_patterns_of_float32(patterns):
    x = mx.array(np.array(patterns, np.uint32)).view(mx.float32)
    assert all_finite({"x": x}).item() == mx.all(mx.isfinite(x)).item()


@pytest.mark.parametrize(
    "pattern", [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]
)
def test_the_edges_of_float32(pattern):
    x = mx.array(np.array([pattern], np.uint32)).view(mx.float32)
    assert all_finite(x).item() == mx.isfinite(x).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 130), (2**20 + 5,), (3, 2**19)])
def test_one_bad_value_anywhere_is_found(dtype, value, shape):
    values = np.ones(shape, np.float32)
    for index in {0, values.size // 2, values.size - 1}:
        bad = values.copy()
        bad.reshape(-1)[index] = value
        tree = [mx.ones(shape, dtype)] * 9 if values.size < 2000 else []
        assert not all_finite([*tree, mx.array(bad).astype(dtype)]).item()
    assert all_finite([mx.array(values).astype(dtype)]).item()


def test_a_transposed_leaf_is_checked_too():
    x = np.ones((1500, 900), np.float32)
    x[1499, 0] = NAN
    assert not all_finite(mx.array(x).T).item()


@pytest.mark.parametrize(
    "tree", [{}, [], {"a": [], "b": {}}, mx.zeros((0, 3)), mx.array([1, 2])]
)
def test_what_holds_no_floats_is_finite(tree):
    assert all_finite(tree).item()
    assert nonfinite(tree) == []


def test_finite_values_whose_sum_overflows_are_finite():
    assert all_finite(mx.full((1000,), 60000.0, mx.float16)).item()
    assert all_finite(mx.full((10,), 3e38)).item()


def test_float64_and_complex_leaves():
    with mx.stream(mx.cpu):
        assert all_finite(mx.array([1e300], mx.float64)).item()
        assert not all_finite(mx.array([INF], mx.float64)).item()
    assert all_finite(mx.array(1 + 2j)).item()
    assert not all_finite(mx.array([complex(1, NAN)])).item()
    assert nonfinite(mx.array([complex(1, NAN)]))[0].nan == 1


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=5),
    st.floats(2.0**-126, 2.0**127, width=32),
)
def test_a_product_that_overflows_is_not_finite(values, factor):
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.float32(values) * np.float32(factor)
    found = module.all_finite_times(mx.array(values), mx.array(factor))
    assert found.item() == np.isfinite(products).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_product_of_halves_overflows_in_float32(dtype):
    tree = {"w": mx.array([-4.0], dtype), "i": mx.array([9])}
    assert module.all_finite_times(tree, mx.array(2.0**125)).item()
    assert not module.all_finite_times(tree, mx.array(2.0**126)).item()
    # The reciprocal of a scale can underflow, and inf times zero is a negative NaN.
    assert not module.all_finite_times([mx.array(INF, dtype)], mx.array(0.0)).item()


def test_global_norm_is_the_norm_and_tells_overflow():
    tree = [mx.full((1000,), 3.0, mx.float16), mx.full((1000,), 4.0)]
    norm = module.global_norm(tree, mx.array(0.5))
    assert norm.item() == pytest.approx(0.5 * 5 * 1000**0.5, rel=1e-6)
    for value in BAD_VALUES.values():
        bad = module.global_norm([*tree, mx.array(value)], mx.array(0.5))
        assert not mx.isfinite(bad).item()


def test_nonfinite_names_and_counts():
    tree = {
        "good": mx.ones(3),
        "layers": [{"w": mx.array([[NAN, 1.0], [INF, -INF]], mx.float16)}],
        "ints": mx.array([1]),
    }
    assert nonfinite(tree) == [NonFinite("layers.0.w", (2, 2), mx.float16, 1, 1, 1)]
    assert nonfinite(tree)[0].count == 3


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"'a\.b'"):
        all_finite({"a": {"b": 1.0}})


def test_what_else_is_no_array_is_an_error_of_mlx():
    with pytest.raises(ValueError, match="arrays"):
        module.all_finite_times([mx.ones(2)], object())


def test_all_finite_is_lazy_and_compiles():
    step = mx.compile(lambda x: all_finite({"x": x, "y": x * 2}))
    assert step(mx.ones(3)).item()
    assert not step(mx.array([1.0, INF, 1.0])).item()


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_gradient_is_read_once_and_leaves_are_joined(dtype):
    leaves = [mx.ones((64, 64), dtype) for _ in range(32)]
    mx.eval(leaves)
    found = kernels(mx.compile(all_finite)(leaves))
    # Four kernels join eight leaves each to what the one before has left, the first to
    # zeros, and one reduces; the scalar is compared.
    assert found.count("Max") == 1
    assert len(found) <= 4 + 2 + 1 + 1
    # Two eights are joined as they are.
    assert len(kernels(mx.compile(all_finite)(leaves[:16]))) == 2 + 1 + 1 + 1
