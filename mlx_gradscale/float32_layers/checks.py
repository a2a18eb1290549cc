"""Check batches, weights and float32 itself before anything is blamed on float16."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..core.finite import NonFinite, is_floating, nonfinite
from ..core.masters import HALF
from .finder import first_backward, first_forward, is_nonfinite
from .probes import is_module
from .trial import Batch, Run, Setting
from .where import is_inside, ordered_modules

LARGEST = 65504.0


class NoCureFound(Exception):
    """The reason why no layers in float32 make the model train in float16."""


def checked_batches(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    compute_dtype: mx.Dtype | None,
    margin: float,
    tolerance: float,
) -> list[Batch]:
    """Return the batches of ``find_float32_layers``, or raise if an argument is bad."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be an mlx.nn.Module, got {model!r}.")
    if not callable(loss_fn) or hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "loss_fn must be the function that computes the loss, without "
            f"scale_loss(), got {loss_fn!r}."
        )
    if not margin >= 1.0 or not math.isfinite(margin):
        raise ValueError(f"margin must be at least 1, for example 2.0, got {margin!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    if not tree_flatten(model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    if compute_dtype is None:
        if not any(x.dtype in HALF for _, x in tree_flatten(model.parameters())):
            raise ValueError(
                "No parameter of the model is in half precision: pass compute_dtype="
                "mx.float16, or call model.set_dtype(mx.float16) before."
            )
    elif not isinstance(compute_dtype, mx.Dtype) or compute_dtype not in HALF:
        raise ValueError(
            f"compute_dtype must be mx.float16 or mx.bfloat16, got {compute_dtype!r}."
        )
    if isinstance(batches, (mx.array, dict, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be a list whose elements are the arguments of loss_fn, got "
            f"{type(batches).__name__}."
        )
    checked = [_as_batch(batch) for batch in batches]
    if not checked:
        raise ValueError("There are no batches: pass at least one.")
    return checked


def _as_batch(batch: Any) -> Batch:
    if isinstance(batch, (tuple, list)):
        return Batch(tuple(batch))
    # A model is a dict, too.
    return Batch((), batch) if type(batch) is dict else Batch((batch,))


def check_parameters(setting: Setting) -> None:
    """Raise if a parameter is not finite."""
    found = nonfinite(setting.model.parameters())
    if found:
        names = ", ".join(leaf.path for leaf in found[:5])
        raise NoCureFound(
            f"Parameters are not finite: {names}. No dtype helps: return to weights "
            "from before that."
        )


def check_batch(setting: Setting, batch: Batch, name: str) -> None:
    """Raise if an argument of a batch is not finite, or not any more when cast."""
    for leaf in nonfinite_arguments(batch):
        raise NoCureFound(
            f"{leaf.path} of {name} is not finite: leave such samples out, or repair "
            "them."
        )
    for path, x in too_large_arguments(setting, batch).items():
        largest = float(mx.max(x))
        # A mask of -1e9 may become -inf.
        if largest > LARGEST:
            raise NoCureFound(
                f"{path} of {name} reaches {largest:.6g} and is not finite after the "
                "cast to compute_dtype: normalise it, or pass cast_inputs=False."
            )


def check_reference(reference: Run, name: str) -> None:
    """Raise if the loss or gradients are not finite even in float32."""
    loss_is_finite = math.isfinite(reference.loss)
    if loss_is_finite and reference.has_finite_gradients:
        return
    place = first_forward(reference, lambda v: is_nonfinite(v, loss_is_finite))
    if place is None and loss_is_finite:
        place = first_backward(reference, lambda v: not v.is_finite)
    if place is not None:
        raise NoCureFound(
            f"{name} is not finite in float32 either, first in {place.text}: "
            f"{place.value}. Look for a logarithm, a division or a root of zero."
        )
    raise NoCureFound(
        f"The loss of {name} is {reference.loss} in float32, too. Look at the loss "
        "function for a logarithm or a division of zero, and for a cast to half "
        "precision."
    )


def named_arguments(batch: Batch) -> dict[str, mx.array]:
    """Return the arrays of a batch by names such as ``args[1].mask.0``."""
    tree = {f"args[{i}]": x for i, x in enumerate(batch.args)} | batch.kwargs
    leaves = tree_flatten(tree, is_leaf=is_module)
    return {path: x for path, x in leaves if isinstance(x, mx.array)}


def nonfinite_arguments(batch: Batch) -> list[NonFinite]:
    """Return the arguments with NaN or +inf; -inf is a mask."""
    found = nonfinite(named_arguments(batch))
    return [leaf for leaf in found if leaf.nan or leaf.positive_inf]


def too_large_arguments(setting: Setting, batch: Batch) -> dict[str, mx.array]:
    """Return the arguments with a value that ``compute_dtype`` makes infinite."""
    dtype = setting.compute_dtype
    if dtype is None or not setting.cast_inputs:
        return {}
    arguments = named_arguments(batch)
    return {path: x for path, x in arguments.items() if _is_too_large(x, dtype)}


def replace_too_large(batch: Batch, dtype: mx.Dtype) -> Batch:
    """Return the batch with the signs of each argument that is too large."""

    def to_signs(x: Any) -> Any:
        return mx.sign(x) if _is_too_large(x, dtype) else x

    return Batch(*tree_map(to_signs, (batch.args, batch.kwargs), is_leaf=is_module))


def overflows(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return where a finite element is not finite in another dtype."""
    return mx.isfinite(x) & ~mx.isfinite(x.astype(dtype))


def _is_too_large(x: Any, dtype: mx.Dtype) -> bool:
    is_array = isinstance(x, mx.array) and is_floating(x)
    return is_array and bool(mx.any(overflows(x, dtype)).item())


def computed_parameters(setting: Setting) -> dict[str, mx.array]:
    """Return the parameters as the forward pass computes with them, by path."""
    parameters: dict[str, mx.array] = dict(tree_flatten(setting.model.parameters()))
    dtype, keep = setting.compute_dtype, setting.keep
    if dtype is None:
        return parameters
    float32 = [
        path
        for path, module in ordered_modules(setting.model)
        if getattr(module, "computes_in_float32", False)
    ]
    for path, x in tree_flatten(setting.model.trainable_parameters()):
        is_kept = any(is_inside(path, outer) for outer in float32)
        is_kept = is_kept or bool(keep and keep(path, x))
        if is_floating(x) and not is_kept:
            parameters[path] = x.astype(dtype)
    return parameters
