"""The finite check agrees with ``mx.isfinite`` on everything."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import BAD_VALUES, INF, NAN

from mlx_gradscale import all_finite
from mlx_gradscale.core.finite import all_finite_times, arrays, global_norm
from mlx_gradscale.diagnostics.nonfinite_leaves import NonFinite, nonfinite

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


EDGES = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]


@given(
    st.lists(
        st.integers(0, 2**32 - 1) | st.sampled_from(EDGES), min_size=1, max_size=30
    )
)
def test_float32_bit_patterns_are_classified_as_by_isfinite(patterns):
    x = mx.array(np.array(patterns, np.uint32)).view(mx.float32)
    assert all_finite({"x": x}).item() == mx.all(mx.isfinite(x)).item()


def every_check(tree):
    """Return the verdict of each of the three checks, which have to agree."""
    leaves, one = arrays(tree), mx.array(1.0)
    found = {
        all_finite(tree).item(),
        all_finite_times(leaves, one, []).item(),
        all_finite_times([], one, leaves).item(),
        mx.isfinite(global_norm(leaves, one, [])).item(),
    }
    [verdict] = found
    assert (nonfinite(tree) == []) == verdict
    return verdict


SHAPES = [(), (1,), (7, 130), (2**20 + 5,), (7, 149797), (5, 5, 41944), (4, 2**18, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_bad_value_anywhere_is_found(dtype, value, shape):
    ones = np.ones(shape, np.float32)
    for index in {0, ones.size // 2, ones.size - 1}:
        bad = ones.copy()
        bad.reshape(-1)[index] = value
        # Transposed, so that it is not contiguous.
        assert not every_check(mx.array(bad).astype(dtype).T)
    assert every_check(mx.array(ones).astype(dtype))


@pytest.mark.parametrize("count", [3, 11, pytest.param(9, marks=pytest.mark.compiles)])
def test_bad_leaf_among_many_of_mixed_dtypes_is_found(count):
    leaves = [mx.ones(2, FLOATS[i % 3]) for i in range(count)]
    assert every_check(leaves)
    assert every_check({"integers": mx.array([1]), "leaves": leaves})
    for i, x in enumerate(leaves):
        tree = [*leaves[:i], mx.array([1.0, NAN], x.dtype), *leaves[i + 1 :]]
        assert not every_check(tree), i
        assert [record.path for record in nonfinite(tree)] == [str(i)]


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        *[(1 + 2j, True), (complex(1, NAN), False), (complex(INF, 1), False)],
        # The bits of float64: the largest, the smallest infinity, and two NaNs.
        (np.uint64(0x7FEFFFFFFFFFFFFF), True),
        *[(np.uint64(x), False) for x in (0x7FF << 52, (0x7FF << 52) + 1, 2**64 - 1)],
    ],
)
def test_complex_and_float64_leaves_are_checked(value, finite):
    with mx.stream(mx.cpu):
        x = mx.array(np.array([value]))
        x = x.view(mx.float64) if x.dtype == mx.uint64 else x
        assert all_finite(x).item() == finite
        # A float64 is stepped in float32, where the largest is inf.
        stepped = all_finite_times([x], mx.array(1.0), []).item()
        assert stepped == (finite and x.dtype != mx.float64)


LARGE = mx.full((1000,), 60000.0, mx.float16)  # its sum is not finite in float16


@pytest.mark.parametrize(
    "tree", [{}, [], {"a": [], "b": {}}, mx.zeros((0, 3)), mx.array([1, 2]), LARGE]
)
def test_empty_integer_and_large_leaves_are_finite(tree):
    assert every_check(tree)
    assert all_finite([tree, mx.full((10,), 3e38)]).item()


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=5),
    st.floats(2.0**-126, 2.0**127, width=32),
)
def test_product_that_overflows_is_not_finite(values, factor):
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.float32(values) * np.float32(factor)
    found = all_finite_times([mx.array(values)], mx.array(factor), [])
    assert found.item() == np.isfinite(products).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("scaled", "factor", "others", "finite"),
    [
        (-4.0, 2.0**125, 1.0, True),
        (-4.0, 2.0**126, 1.0, False),  # in float32, whatever the dtype
        (INF, 0.0, 1.0, False),  # inf times zero is a negative NaN
        (1.0, 2.0**100, NAN, False),
    ],
)
def test_products_of_scaled_leaves_are_checked_together_with_other_leaves(
    dtype, scaled, factor, others, finite
):
    found = all_finite_times(
        [mx.array([scaled], dtype), mx.array([9])], mx.array(factor), [mx.array(others)]
    )
    assert found.item() == finite


@pytest.mark.compiles
def test_global_norm_is_the_norm_of_the_unscaled_gradients():
    tree = [mx.full((1000,), 3.0, mx.float16), mx.full((1000,), 4.0)]
    norm = global_norm(tree, mx.array(0.5), [mx.array(7.0), mx.array(3 + 4j)])
    expected = (0.25 * 25 * 1000 + 49 + 25) ** 0.5
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    for shape in SHAPES:
        norm = global_norm([mx.ones(shape)], mx.array(2.0), []).item()
        assert norm == pytest.approx(2 * np.prod(shape) ** 0.5, rel=1e-5)
    for empty in ([], [mx.zeros((0, 3))], [mx.array([3])]):
        assert global_norm(empty, mx.array(1.0), []).item() == 0


def test_nonfinite_reports_paths_and_counts():
    tree = {
        "good": mx.ones(3),
        "layers": [{"w": mx.array([[NAN, 1.0], [INF, -INF]], mx.float16)}],
        "ints": mx.array([1]),
        # Both parts of a complex number count.
        "z": mx.array([complex(INF, -INF), complex(NAN, NAN), 1]),
    }
    half = NonFinite("layers.0.w", (2, 2), mx.float16, 1, 1, 1)
    assert nonfinite(tree) == [half, NonFinite("z", (3,), mx.complex64, 2, 1, 1)]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (1.0, r"got 1\.0 \(float\)\.$"),
        ({"a": None}, r"got None \(NoneType\) at 'a'\.$"),
        ({"a": {"b": 1.0}}, r"got 1\.0 \(float\) at 'a\.b'\.$"),
        ({"b": ["x"]}, r"got 'x' \(str\) at 'b\.0'\.$"),
    ],
)
def test_finite_checks_name_the_path_of_a_leaf_that_is_not_an_array(tree, message):
    for check in (arrays, all_finite, nonfinite):
        with pytest.raises(TypeError, match=message):
            check(tree)
