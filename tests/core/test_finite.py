"""The finite check agrees with ``mx.isfinite`` on everything."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from support.helpers import BAD_VALUES, INF, NAN
from support.optimizer_helpers import HALVES, wrapped

from mlx_gradscale import all_finite
from mlx_gradscale.diagnostics.nonfinite_leaves import NonFinite, nonfinite

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


def test_float32_bit_patterns_are_classified_as_by_isfinite():
    patterns = np.random.default_rng(0).integers(0, 2**32, 500, np.uint32)
    for x in mx.array(np.concatenate([patterns, np.array(EDGES, np.uint32)])):
        x = x.view(mx.float32)
        assert all_finite({"x": x}).item() == mx.isfinite(x).item()


def every_check(tree):
    """Return the verdict and the norm of the checks of a tree and of steps with it."""
    found, weights = {all_finite(tree).item()}, tree_map(mx.zeros_like, tree)
    for max_grad_norm in (None, INF):
        optimizer = wrapped(optim.SGD(1.0), max_grad_norm=max_grad_norm)
        optimizer.apply_gradients({"tree": tree}, {"tree": weights})
        found.add(optimizer.scaler.last_step_applied.item())
    found.add(mx.isfinite(optimizer.grad_norm).item())
    [verdict] = found
    assert (nonfinite(tree) == []) == verdict
    return verdict, optimizer.grad_norm.item()


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
        assert not every_check(mx.array(bad).astype(dtype).T)[0]
    norm = pytest.approx(ones.size**0.5, rel=1e-5)
    assert every_check(mx.array(ones).astype(dtype)) == (True, norm)


@pytest.mark.parametrize("count", [3, 11, pytest.param(9, marks=pytest.mark.compiles)])
def test_bad_leaf_among_many_of_mixed_dtypes_is_found(count):
    leaves = [mx.ones(2, FLOATS[i % 3]) for i in range(count)]
    assert every_check({"integers": mx.array([1]), "leaves": leaves})[0]
    for i, x in enumerate(leaves):
        tree = [*leaves[:i], mx.array([1.0, NAN], x.dtype), *leaves[i + 1 :]]
        assert not every_check(tree)[0], i
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
        if x.dtype == mx.complex64:
            verdict, norm = every_check(x)
            assert verdict == finite
            assert not finite or norm == pytest.approx(abs(value))
            return
        optimizer = wrapped(optim.SGD(0.1))
        optimizer.apply_gradients({"x": x}, {"x": mx.zeros_like(x)})
        # It is stepped in float32, where the largest is inf.
        assert not optimizer.scaler.last_step_applied.item()


LARGE = mx.full((1000,), 60000.0, mx.float16)  # its sum is not finite in float16


@pytest.mark.parametrize(
    "tree", [{}, [], {"a": [], "b": {}}, mx.zeros((0, 3)), mx.array([1, 2]), LARGE]
)
def test_empty_integer_and_large_leaves_are_finite(tree):
    assert nonfinite(tree) == []
    assert all_finite(tree).item()
    assert every_check([tree, mx.full((10,), 1e18)])[0]
    assert all_finite([tree, mx.full((10,), 3e38)]).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("scaled", "scale", "applied"),
    [
        (-4.0, 2.0**-61, True),
        (-4.0, 2.0**-64, True),  # 2**66 would be inf in float16
        (INF, 2.0**64, False),
    ],
)
def test_products_with_the_inverse_scale_are_checked_in_float32(
    dtype, scaled, scale, applied
):
    optimizer = wrapped(optim.SGD(0.0), scale=scale)
    gradients = {"a": mx.array([scaled], dtype), "b": mx.array([9])}
    optimizer.apply_gradients(gradients, tree_map(mx.zeros_like, gradients))
    assert optimizer.scaler.last_step_applied.item() == applied


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
    for check in (all_finite, nonfinite):
        with pytest.raises(TypeError, match=message):
            check(tree)
