"""The finite check at its edges: every leaf, every cut, every dtype's largest."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import INF, NAN

from mlx_gradscale import all_finite, nonfinite
from mlx_gradscale.finite import all_finite_times, arrays, global_norm


@pytest.mark.parametrize("count", [3, 9])
def test_a_bad_value_in_any_one_of_many_leaves(count):
    for bad in range(count):
        leaves = [mx.full((2,), NAN if i == bad else 1.0) for i in range(count)]
        assert not all_finite(leaves).item(), bad
        assert not all_finite_times(leaves, mx.array(1.0)).item(), bad
        assert mx.isnan(global_norm(leaves, mx.array(1.0))).item(), bad
    good = [mx.full((2,), float(i)) for i in range(count)]
    assert all_finite(good).item()
    expected = np.sqrt(2.0 * sum(i * i for i in range(count)))
    assert global_norm(good, mx.array(1.0)).item() == pytest.approx(expected, rel=1e-6)


SHAPES = [(2**20, 1), (7, 149797), (5, 5, 41944), (4, 2**18, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_leaf_is_checked_and_measured_to_its_end(shape):
    # From 2**20 on a leaf is cut into pieces; these leave rests, or have no
    # axis that is long enough.
    size = int(np.prod(shape))
    for index in (0, size // 2, size - 2, size - 1):
        flat = np.ones(size, np.float32)
        flat[index] = INF
        assert not all_finite(mx.array(flat.reshape(shape))).item(), index
    norm = global_norm([mx.ones(shape)], mx.array(2.0)).item()
    assert norm == pytest.approx(2 * size**0.5, rel=1e-5)


def test_the_edges_of_float64():
    bits = [0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF0000000000001, 2**64 - 1]
    with mx.stream(mx.cpu):
        for pattern in bits:
            x = mx.array(np.array([pattern], np.uint64)).view(mx.float64)
            assert all_finite(x).item() == (pattern == bits[0])
        # It is stepped in float32, where that is inf.
        wide = mx.array(np.array([1e300]), mx.float64)
        assert not all_finite_times(wide, mx.array(1.0)).item()


def test_empty_trees_and_leaves_have_no_norm():
    for tree in ({}, [mx.zeros((0, 3))], [mx.array([3])]):
        assert global_norm(tree, mx.array(1.0)).item() == 0
        assert all_finite_times(tree, mx.array(1.0)).item()
    assert global_norm([mx.array(3 + 4j)], mx.array(1.0)).item() == pytest.approx(5)


def test_dtypes_are_decided_each_by_itself():
    tree = {"h": mx.ones(2, mx.float16), "b": mx.ones(2, mx.bfloat16), "f": mx.ones(2)}
    assert all_finite(tree).item()
    for name in tree:
        bad = tree | {name: mx.array([1.0, NAN], tree[name].dtype)}
        assert not all_finite(bad).item()
        assert not all_finite_times(bad, mx.array(1.0)).item()
        assert [record.path for record in nonfinite(bad)] == [name]


def test_counts_of_a_complex_leaf_and_of_a_bare_array():
    (record,) = nonfinite(mx.array([complex(INF, -INF), complex(NAN, NAN), 1]))
    assert (record.path, record.nan, record.positive_inf) == ("", 2, 1)
    assert (record.negative_inf, record.count) == (1, 4)


def test_what_is_no_array_is_named_where_it_has_a_name():
    with pytest.raises(TypeError, match=r"got 1\.0\.$"):
        arrays(1.0)
    with pytest.raises(TypeError, match=r"got None at 'a'\.$"):
        global_norm({"a": None}, mx.array(1.0))
    with pytest.raises(TypeError, match=r"got 'x' at 'b\.0'\.$"):
        nonfinite({"b": ["x"]})
