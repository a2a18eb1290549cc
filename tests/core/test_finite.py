"""The finite check agrees with ``mx.isfinite`` on everything."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import BAD_VALUES, INF, NAN

from mlx_gradscale import NonFinite, all_finite, nonfinite
from mlx_gradscale.core.finite import all_finite_times, arrays, global_norm

HALVES = [mx.float16, mx.bfloat16]
FLOATS = [*HALVES, mx.float32]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_bit_pattern_is_classified_as_by_isfinite(dtype):
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
def test_float32_bit_patterns_are_classified_as_by_isfinite(patterns):
    x = mx.array(np.array(patterns, np.uint32)).view(mx.float32)
    assert all_finite({"x": x}).item() == mx.all(mx.isfinite(x)).item()


@pytest.mark.parametrize(
    "pattern", [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]
)
def test_float32_at_the_edge_of_inf_is_classified_as_by_isfinite(pattern):
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
def test_a_tree_without_floating_values_is_finite(tree):
    assert all_finite(tree).item()
    assert nonfinite(tree) == []


def test_finite_values_whose_sum_overflows_are_finite():
    assert all_finite(mx.full((1000,), 60000.0, mx.float16)).item()
    assert all_finite(mx.full((10,), 3e38)).item()


def test_float64_and_complex_leaves_are_checked():
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
    found = all_finite_times([mx.array(values)], mx.array(factor), [])
    assert found.item() == np.isfinite(products).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_product_of_halves_overflows_in_float32(dtype):
    leaves = [mx.array([-4.0], dtype), mx.array([9])]
    assert all_finite_times(leaves, mx.array(2.0**125), []).item()
    assert not all_finite_times(leaves, mx.array(2.0**126), []).item()
    # The reciprocal of a scale can underflow, and inf times zero is a negative NaN.
    assert not all_finite_times([mx.array(INF, dtype)], mx.array(0.0), []).item()


def test_scaled_and_unscaled_leaves_are_checked_together():
    factor = mx.array(2.0**100)
    for scaled, others, finite in [
        ([mx.array(1.0)], [mx.array(2.0**100)], True),
        ([mx.array(2.0**100)], [mx.array(1.0)], False),
        ([mx.array(1.0)], [mx.array(NAN)], False),
        ([], [mx.array(2.0**100)], True),
    ]:
        assert all_finite_times(scaled, factor, others).item() == finite


@pytest.mark.compiles
def test_global_norm_is_that_of_unscaled_gradients_and_non_finite_where_one_is():
    tree = [mx.full((1000,), 3.0, mx.float16), mx.full((1000,), 4.0)]
    norm = global_norm(tree, mx.array(0.5), [mx.array(7.0)])
    expected = (0.25 * 25 * 1000 + 49) ** 0.5
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    for value in BAD_VALUES.values():
        for scaled, others in (([mx.array(value)], []), ([], [mx.array(value)])):
            bad = global_norm([*tree, *scaled], mx.array(0.5), others)
            assert not mx.isfinite(bad).item()


def test_nonfinite_reports_paths_and_counts():
    tree = {
        "good": mx.ones(3),
        "layers": [{"w": mx.array([[NAN, 1.0], [INF, -INF]], mx.float16)}],
        "ints": mx.array([1]),
    }
    assert nonfinite(tree) == [NonFinite("layers.0.w", (2, 2), mx.float16, 1, 1, 1)]
    assert nonfinite(tree)[0].count == 3


@pytest.mark.compiles
def test_all_finite_is_lazy_and_compiles():
    step = mx.compile(lambda x: all_finite({"x": x, "y": x * 2}))
    assert step(mx.ones(3)).item()
    assert not step(mx.array([1.0, INF, 1.0])).item()


@pytest.mark.compiles
@pytest.mark.parametrize("count", [3, 9])
def test_a_bad_value_in_any_one_of_many_leaves(count):
    for bad in range(count):
        leaves = [mx.full((2,), NAN if i == bad else 1.0) for i in range(count)]
        assert not all_finite(leaves).item(), bad
        assert not all_finite_times(arrays(leaves), mx.array(1.0), []).item(), bad
        assert mx.isnan(global_norm(arrays(leaves), mx.array(1.0), [])).item(), bad
    good = [mx.full((2,), float(i)) for i in range(count)]
    assert all_finite(good).item()
    expected = np.sqrt(2.0 * sum(i * i for i in range(count)))
    assert global_norm(arrays(good), mx.array(1.0), []).item() == pytest.approx(
        expected, rel=1e-6
    )


SHAPES = [(2**20, 1), (7, 149797), (5, 5, 41944), (4, 2**18, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_leaf_is_checked_and_measured_to_its_end(shape):
    size = int(np.prod(shape))
    for index in (0, size // 2, size - 2, size - 1):
        flat = np.ones(size, np.float32)
        flat[index] = INF
        assert not all_finite(mx.array(flat.reshape(shape))).item(), index
    norm = global_norm(arrays([mx.ones(shape)]), mx.array(2.0), []).item()
    assert norm == pytest.approx(2 * size**0.5, rel=1e-5)


def test_float64_at_the_edge_of_inf_is_classified_rightly():
    bits = [0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF0000000000001, 2**64 - 1]
    with mx.stream(mx.cpu):
        for pattern in bits:
            x = mx.array(np.array([pattern], np.uint64)).view(mx.float64)
            assert all_finite(x).item() == (pattern == bits[0])
        # It is stepped in float32, where that is inf.
        wide = mx.array(np.array([1e300]), mx.float64)
        assert not all_finite_times(arrays(wide), mx.array(1.0), []).item()


def test_the_norm_of_empty_trees_and_leaves_is_zero():
    for tree in ({}, [mx.zeros((0, 3))], [mx.array([3])]):
        assert global_norm(arrays(tree), mx.array(1.0), []).item() == 0
        assert all_finite_times(arrays(tree), mx.array(1.0), []).item()
    assert global_norm(
        arrays([mx.array(3 + 4j)]), mx.array(1.0), []
    ).item() == pytest.approx(5)


def test_one_bad_leaf_of_any_dtype_in_a_mixed_tree_is_found():
    tree = {"h": mx.ones(2, mx.float16), "b": mx.ones(2, mx.bfloat16), "f": mx.ones(2)}
    assert all_finite(tree).item()
    for name in tree:
        bad = tree | {name: mx.array([1.0, NAN], tree[name].dtype)}
        assert not all_finite(bad).item()
        assert not all_finite_times(arrays(bad), mx.array(1.0), []).item()
        assert [record.path for record in nonfinite(bad)] == [name]


def test_nonfinite_counts_both_parts_of_a_complex_array():
    (record,) = nonfinite(mx.array([complex(INF, -INF), complex(NAN, NAN), 1]))
    assert (record.path, record.nan, record.positive_inf) == ("", 2, 1)
    assert (record.negative_inf, record.count) == (1, 4)


def test_what_is_no_array_is_refused_with_its_path():
    with pytest.raises(TypeError, match=r"got 1\.0\.$"):
        arrays(1.0)
    with pytest.raises(TypeError, match=r"got None at 'a'\.$"):
        arrays({"a": None})
    with pytest.raises(TypeError, match=r"got 1\.0 at 'a\.b'\.$"):
        all_finite({"a": {"b": 1.0}})
    with pytest.raises(TypeError, match=r"got 'x' at 'b\.0'\.$"):
        nonfinite({"b": ["x"]})
