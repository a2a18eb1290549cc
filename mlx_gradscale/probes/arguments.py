"""Which arguments of a loss function do not fit in the dtype they are cast to."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..precision import is_leaf


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments in one tree, whose paths are as ``args[1].mask.0``."""
    return {f"args[{i}]": x for i, x in enumerate(args)} | kwargs


def too_large(arguments: dict[str, Any], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Return the arrays in which a finite value is not finite as ``dtype``."""
    leaves = tree_flatten(arguments, is_leaf=is_leaf)
    return {path: x for path, x in leaves if _is_too_large(x, dtype)}


def largest(x: mx.array, dtype: mx.Dtype) -> float:
    """Return the largest, by magnitude, of the values that do not fit."""
    values = mx.where(_overflows(x, dtype), x, 0).reshape(-1)
    return float(values[mx.argmax(mx.abs(values))])


def made_small(tree: Any, dtype: mx.Dtype) -> Any:
    """Return a tree of arguments with the signs of each array that does not fit."""

    def small(x: Any) -> Any:
        return mx.sign(x) if _is_too_large(x, dtype) else x

    return tree_map(small, tree, is_leaf=is_leaf)


def _is_too_large(x: Any, dtype: mx.Dtype) -> bool:
    floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
    return floating and bool(mx.any(_overflows(x, dtype)).item())


def _overflows(x: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.isfinite(x) & ~mx.isfinite(x.astype(dtype))
