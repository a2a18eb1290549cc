"""The model during a forward pass: casts before it, and what is restored after it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path

from .finite import all_finite
from .trees import Writes, commit, is_floating, slots


class Casting(NamedTuple):
    """The casts that ``value_and_grad`` applies for the forward pass."""

    compute_dtype: mx.Dtype | None = None
    keep: Callable[[str, mx.array], bool] | None = None
    cast_inputs: bool = True

    def check(self) -> None:
        """Raise if ``compute_dtype`` is invalid, or is missing where it is required."""
        dtype = self.compute_dtype
        if dtype is None and (self.keep is not None or not self.cast_inputs):
            raise ValueError("keep= and cast_inputs=False require compute_dtype=.")
        is_dtype = isinstance(dtype, mx.Dtype) and mx.issubdtype(dtype, mx.floating)
        if dtype is not None and not is_dtype:
            raise ValueError(f"compute_dtype must be a float mx.Dtype, got {dtype!r}.")

    def parameters(self, model: nn.Module, parameters: Any) -> Any:
        """Return the trainable parameters in the dtypes of the forward pass."""
        if self.compute_dtype is None:
            return parameters
        # float32_layers() marks the layers that compute in float32.
        float32 = tuple(
            f"{path}." if path else ""
            for path, module in model.named_modules()
            if getattr(module, "computes_in_float32", False)
        )

        def cast_parameter(path: str, x: mx.array) -> Any:
            is_kept = self.keep is not None and self.keep(path, x)
            return x if is_kept or path.startswith(float32) else self._cast(x)

        return tree_map_with_path(cast_parameter, parameters)

    def inputs(self, inputs: Any) -> Any:
        """Return the loss function's arguments in the dtypes of the forward pass."""
        if self.compute_dtype is None or not self.cast_inputs:
            return inputs
        return tree_map(self._cast, inputs, is_leaf=is_opaque)

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        return x.astype(self.compute_dtype) if floating else x


def clean_up(
    places: Writes, trained: set[int], substitutes: list[mx.array] | None
) -> None:
    """After a forward pass, restore parameters, and buffers that became non-finite.

    ``places`` contains the model's arrays before the forward pass, and ``substitutes``
    those that replaced its parameters. If the forward pass itself assigned an array to
    a parameter, the array stays, unless ``substitutes`` is None. Non-finite buffers are
    restored because BatchNorm's running statistics would otherwise stay inf or NaN.
    """
    ids = None if substitutes is None else set(map(id, substitutes))
    writes: Writes = []
    for box, key, old in places:
        new: Any = box.get(key) if isinstance(box, dict) else box[key]
        if id(old) in trained:
            if ids is None or id(new) in ids:
                writes.append((box, key, old))
            continue
        is_replaced = new is not old and isinstance(new, mx.array)
        if is_replaced and new.shape == old.shape and is_floating(new):
            safe = mx.where(all_finite([new]), new, old.astype(new.dtype))
            writes.append((box, key, safe))
    commit(writes)


def writable_arrays(model: nn.Module) -> Writes:
    """Return (container, key, array) for each model array that is not in a tuple."""
    found = slots(model)
    return [(box, k, box[k]) for _, box, k in found if not isinstance(box, tuple)]


def is_opaque(x: Any) -> bool:
    """Return whether ``tree_map`` must treat ``x`` (a model, say) as a leaf."""
    return type(x) not in (dict, list, tuple) and not hasattr(x, "_fields")
