"""Unscale gradients lazily.

Each gradient that ``unscale`` returns refers to the scaled array it came from. If a
step receives the gradient unmodified, it reads the scaled array and, on a GPU, unscales
it inside the update kernel, so MLX never computes the float32 copy. After clipping,
accumulation or averaging, a step uses the gradient as is.
"""

from typing import Any

import mlx.core as mx

from .fusion import each_use
from .masters import to_float32
from .trees import commit, is_floating, leaves, slots, tree_like


class LazyGradient(mx.array):
    """An unscaled gradient that refers to the scaled one until it may have changed."""

    # The scaled gradient and the reciprocal of the scale.
    source: tuple[mx.array, mx.array] | None = None


def _forget_source(method: str) -> None:
    function = getattr(mx.array, method)

    def forget(self: LazyGradient, *args: Any, **kwargs: Any) -> Any:
        self.source = None
        return function(self, *args, **kwargs)

    setattr(LazyGradient, method, forget)


# Methods that change the array, or expose its memory. Before Python 3.12, a class
# cannot see that its buffer is exported, so a step ignores writes through a NumPy view.
for _method in (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
    *("__irshift__", "__setitem__", "__dlpack__", "__buffer__"),
):
    if hasattr(mx.array, _method):
        _forget_source(_method)


def unscale(gradients: Any, inverse: mx.array) -> Any:
    """Lazily unscale a tree of scaled gradients; lazy gradients stay unscaled."""
    arrays, unscaled = leaves(gradients), []
    for scaled, x in zip(arrays, _unscale_arrays(arrays, inverse), strict=True):
        known = scaled.source if isinstance(scaled, LazyGradient) else None
        gradient = LazyGradient(x if known is None else scaled)
        # An alias, because the user may change the scaled gradient in place.
        gradient.source = known or (scaled.astype(scaled.dtype), inverse)
        unscaled.append(gradient)
    return tree_like(gradients, unscaled)


def unscale_in_place(gradients: Any, inverse: mx.array) -> Any:
    """Unscale and return a tree, in place unless it is an array or contains tuples."""
    tree = [gradients]  # a container even for a single array
    places, unscaled = slots(tree), unscale(tree, inverse)
    if any(isinstance(box, tuple) for _, box, _ in places):
        return unscaled[0]
    pairs = zip(places, leaves(unscaled), strict=True)
    commit((box, key, x) for (_, box, key), x in pairs)
    return tree[0]


# Over a list: mx.compile does not tell a tree of lists from one of tuples.
@mx.compile
def _unscale_arrays(scaled: list[mx.array], inverse: mx.array) -> list[mx.array]:
    return list(map(unscale_array, scaled, each_use(inverse)))


def unscale_array(scaled: mx.array, inverse: mx.array) -> mx.array:
    """Unscale a floating-point gradient in float32, replacing inf with NaN.

    Elementwise clipping would turn inf into a finite value, and the step would be
    applied. NaN survives clipping, accumulation and averaging.
    """
    if not is_floating(scaled):
        return scaled
    unscaled = to_float32(scaled) * inverse
    # Bit-identical for finite values, including -0.0; inf minus inf is NaN.
    return unscaled - (unscaled - unscaled)
