"""Is this tree finite, how long is it, and which leaves are not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .state_tree import leaves_of

# The bits of |x| compare as integers like |x| itself, with inf above every
# finite number and NaN above inf: one integer maximum finds both, exactly.
# Signed, because the vector units of older CPUs compare only that. Each with the
# bits of a magnitude and those of inf.
_BITS = {
    mx.float16: (mx.int16, 0x7FFF, 0x7C00),
    mx.bfloat16: (mx.int16, 0x7FFF, 0x7F80),
    mx.float32: (mx.int32, 0x7FFFFFFF, 0x7F800000),
    mx.float64: (mx.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}

# Eight leaves joined elementwise before the reduction cost an eighth of a pass
# more than reading them; with more the CPU's compiler stops vectorising.
_JOIN = 8
# What is joined one after the other; a GPU can do several of these at a time.
_CHAIN = 8 * _JOIN
# A leaf this large is cut into eight and joined with itself, or its masked
# copy alone would cost two more passes.
_CUT_SIZE = 2**20


@dataclass(frozen=True)
class NonFinite:
    """A leaf that holds values which are not finite.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import nonfinite
        >>> leaf = nonfinite({"w": mx.array([1.0, float("-inf")])})[0]
        >>> leaf.path, leaf.negative_inf, leaf.count
        ('w', 1, 1)
    """

    path: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    nan: int
    positive_inf: int
    negative_inf: int

    @property
    def count(self) -> int:
        """How many values are not finite."""
        return self.nan + self.positive_inf + self.negative_inf


def all_finite(tree: Any) -> mx.array:
    """Tell, lazily, whether every floating value in ``tree`` is finite.

    Args:
        tree (Any): A tree of arrays. Leaves that are not floating count as
            finite, and so does an empty tree.

    Returns:
        array: A 0-d bool array. Nothing is read from the device.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import all_finite
        >>> all_finite({"w": mx.array([1.0, 2.0])})
        array(True, dtype=bool)
        >>> all_finite([mx.array(1.0), {"b": mx.array(float("nan"))}])
        array(False, dtype=bool)
    """
    return _checked(_all_finite, tree)


def all_finite_times(tree: Any, factor: mx.array) -> mx.array:
    """Tell, lazily, whether every floating value is finite in ``tree * factor``.

    The product is what an optimizer gets from a scaler: with a scale below 1 a finite
    gradient can overflow in it. A float64 value that does not fit in float32 counts
    as inf.

    Args:
        tree (Any): A tree of arrays.
        factor (array): A positive 0-d float32 array.
    """
    return _checked(_all_finite_times, tree, factor)


def is_finite_magnitude(x: mx.array) -> mx.array:
    """Like ``mx.isfinite`` for float32 that is not negative, by the bits: no
    compiler's fast maths, which may assume that there is no NaN, can touch it.
    """
    return x.view(mx.uint32) < mx.array(_BITS[mx.float32][2], mx.uint32)


def arrays(tree: Any) -> list[mx.array]:
    """Return the leaves of ``tree``; raise where one is not an array."""
    found = leaves_of(tree)
    if not all(isinstance(leaf, mx.array) for leaf in found):
        path, leaf = next(
            item for item in tree_flatten(tree) if not isinstance(item[1], mx.array)
        )
        where = f" at {path!r}" if path else ""
        raise TypeError(f"Expected a tree of arrays, got {leaf!r}{where}.")
    return found


def is_floating(x: mx.array) -> bool:
    """Tell whether ``x`` can hold an inf or a NaN."""
    return mx.issubdtype(x.dtype, mx.inexact)


def nonfinite(tree: Any) -> list[NonFinite]:
    """List the leaves of ``tree`` that hold NaN or inf, with their counts.

    This reads from the device, once for the whole tree: call it after a skipped
    step, not on every step.

    Args:
        tree (Any): A tree of arrays, usually gradients.

    Returns:
        list[NonFinite]: One for each leaf that is not finite, in the order
        of the tree.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import nonfinite
        >>> grads = {"a": mx.ones(3), "b": [mx.array([float("inf"), 1.0])]}
        >>> [(r.path, r.nan, r.positive_inf) for r in nonfinite(grads)]
        [('b.0', 0, 1)]
    """
    arrays(tree)
    leaves = [(path, x) for path, x in tree_flatten(tree) if is_floating(x)]
    if not leaves:
        return []
    counts = np.array(mx.stack([_count_nonfinite(x) for _, x in leaves]))
    return [
        NonFinite(path, x.shape, x.dtype, *map(int, row))
        for (path, x), row in zip(leaves, counts, strict=True)
        if row.any()
    ]


def _count_nonfinite(x: mx.array) -> mx.array:
    if x.dtype == mx.complex64:
        return _count_nonfinite(mx.real(x)) + _count_nonfinite(mx.imag(x))
    kinds = (mx.isnan(x), mx.isposinf(x), mx.isneginf(x))
    return mx.stack([mx.sum(kind) for kind in kinds])


def global_norm(tree: Any, factor: mx.array) -> mx.array:
    """Return the norm of ``tree * factor`` over all leaves, as lazy 0-d float32.

    It is inf or NaN where a value in the tree is, and where the sum of squares
    does not fit in float32.
    """
    return _checked(_norm, tree, factor)


def _checked(
    compiled: Callable[..., mx.array], tree: Any, *factor: mx.array
) -> mx.array:
    # mx.compile walks the tree faster than Python does, but names nothing.
    try:
        return compiled(tree, *factor)
    except ValueError:
        arrays(tree)
        raise


@mx.compile
def _all_finite(tree: Any) -> mx.array:
    flags = []
    for dtype, largest in _largest_bits(tree, _upper_half):
        bits, _, inf = _BITS[dtype]
        inf = inf if largest.dtype == bits else inf >> 16
        flags.append(largest < mx.array(inf, largest.dtype))
    return reduce(mx.logical_and, flags) if flags else mx.array(True)


def _masked(x: mx.array, mask: mx.array) -> mx.array:
    return x.view(mask.dtype) & mask


def _upper_half(bits: mx.array) -> mx.array:
    # Of 32 bits these tell finite from not, and half as much has to be written.
    return (bits >> 16).astype(mx.int16) if bits.dtype == mx.int32 else bits


@mx.compile
def _all_finite_times(tree: Any, factor: mx.array) -> mx.array:
    # Rounding is monotonic: if the largest stays finite, all do.
    flags = [
        is_finite_magnitude(largest.view(dtype).astype(mx.float32) * factor)
        for dtype, largest in _largest_bits(tree)
    ]
    return reduce(mx.logical_and, flags) if flags else mx.array(True)


def _unchanged(x: mx.array) -> mx.array:
    return x


def _largest_bits(
    tree: Any, shorten: Callable[[mx.array], mx.array] = _unchanged
) -> list[tuple[mx.Dtype, mx.array]]:
    """Return each dtype with the bits of the largest magnitude of it."""
    largest: dict[mx.Dtype, list[mx.array]] = {}
    for pieces in _alike(arrays(tree)):
        dtype = pieces[0].dtype
        bits, mask, _ = _BITS[dtype]
        magnitude = partial(_masked, mask=mx.array(mask, bits))
        joined = _join(mx.maximum, pieces, magnitude, shorten)
        largest.setdefault(dtype, []).append(mx.max(joined))
    return [(dtype, _join(mx.maximum, found)) for dtype, found in largest.items()]


@mx.compile
def _norm(tree: Any, factor: mx.array) -> mx.array:
    sums = []
    for pieces in _alike(arrays(tree)):
        squares = _join(mx.add, pieces, lambda x: mx.square(_own_float32(x) * factor))
        sums.append(mx.sum(squares))
    return mx.sqrt(_join(mx.add, sums)) if sums else mx.array(0.0)


def _own_float32(x: mx.array) -> mx.array:
    # By way of a view, so that mx.compile does not merge this cast with that of the
    # update: the common result would be a float32 copy of every gradient.
    if x.dtype in (mx.float16, mx.bfloat16):
        x = x.view(mx.uint16).view(x.dtype)
    return x.astype(mx.float32)


def _alike(leaves: list[mx.array]) -> Iterable[list[mx.array]]:
    alike: dict[Any, list[mx.array]] = {}
    for leaf in leaves:
        if not is_floating(leaf) or not leaf.size:
            continue
        if leaf.dtype == mx.complex64:
            leaf = leaf.reshape(-1).view(mx.float32)
        for piece in _cut(leaf):
            alike.setdefault((piece.dtype, piece.shape), []).append(piece)
    return alike.values()


def _cut(leaf: mx.array) -> list[mx.array]:
    # Along the last axis where it is long: the gradient of a Linear layer's
    # weight is a transposed view, contiguous in its columns.
    if leaf.size < _CUT_SIZE:
        return [leaf]
    axis = -1 if leaf.shape[-1] >= 64 or leaf.shape[0] < 64 else 0
    length = leaf.shape[axis] // _JOIN
    if length == 0:
        return [leaf]
    cuts = [length * i for i in range(1, _JOIN + 1)]
    return [x for x in mx.split(leaf, cuts, axis=axis) if x.size]


def _join(
    operation: Callable[[mx.array, mx.array], mx.array],
    leaves: list[mx.array],
    prepare: Callable[[mx.array], mx.array] = _unchanged,
    finish: Callable[[mx.array], mx.array] = _unchanged,
) -> mx.array:
    """Return the leaves, each prepared, joined to one of their shape.

    Args:
        operation (Callable): Has 0 for its neutral element.
        leaves (list): Of one dtype and shape.
        prepare (Callable): Is given a leaf.
        finish (Callable): Is given some leaves that are joined.
    """
    while len(leaves) > _JOIN:
        chains = [leaves[i : i + _CHAIN] for i in range(0, len(leaves), _CHAIN)]
        leaves = [_join_chain(operation, each, prepare, finish) for each in chains]
        prepare = finish = _unchanged
    return finish(_join_pairwise(operation, [prepare(x) for x in leaves]))


def _join_chain(
    operation: Callable[[mx.array, mx.array], mx.array],
    leaves: list[mx.array],
    prepare: Callable[[mx.array], mx.array],
    finish: Callable[[mx.array], mx.array],
) -> mx.array:
    groups = [
        finish(_join_pairwise(operation, [prepare(x) for x in leaves[i : i + _JOIN]]))
        for i in range(0, len(leaves), _JOIN)
    ]
    if len(groups) <= 2:
        return _join_pairwise(operation, [_end_kernel(group) for group in groups])
    # Each kernel joins eight leaves to what those before it have left, so that all are
    # one and the same kernel, which is compiled once: hence the zeros in front.
    joined = _zeros_laid_out_as(leaves[0], groups[0].dtype)
    for group in groups:
        joined = _end_kernel(operation(group, joined))
    return joined


def _zeros_laid_out_as(leaf: mx.array, dtype: mx.Dtype) -> mx.array:
    # Where a leaf is transposed, other zeros would have a kernel go through strides.
    # Single operations, which are no kernels to compile.
    bits = leaf.view(_BITS[leaf.dtype][0]) if leaf.dtype in _BITS else leaf
    return _end_kernel(_end_kernel(bits ^ bits).astype(dtype))


def _end_kernel(x: mx.array) -> mx.array:
    # Neither fusible nor a copy.
    return mx.contiguous(x, allow_col_major=True)


def _join_pairwise(
    operation: Callable[[mx.array, mx.array], mx.array], values: list[mx.array]
) -> mx.array:
    # Pairwise, because a fused kernel is at most 11 operations deep.
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        odd = values[len(values) & ~1 :]
        values = [operation(a, b) for a, b in pairs] + odd
    return values[0]
