"""What can be wrong before a search: batches, weights, and float32 itself."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..finite import nonfinite
from ..masters import HALF
from ..precision import is_leaf
from ..probes import by_name, too_large
from .measure import Batch, Run, Setting
from .report import LARGEST


class NoSetHelps(Exception):
    """Why no layers in float32 make the model train in float16."""


def checked_batches(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    compute_dtype: mx.Dtype | None,
    margin: float,
    tolerance: float,
) -> list[Batch]:
    """Return the batches to try, or raise if an argument cannot be used."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a module of mlx.nn, got {model!r}.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}.")
    if hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "The gradient of this loss function is scaled already: give the plain "
            "function, without scale_loss()."
        )
    if not margin >= 1.0 or not math.isfinite(margin):
        raise ValueError(f"margin must be at least 1, as 2.0, got {margin!r}.")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    parameters = [x for _, x in tree_flatten(model.trainable_parameters())]
    if not parameters:
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    if compute_dtype is None:
        every = tree_flatten(model.parameters())
        if not any(x.dtype in HALF for _, x in every):
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
            "batches must be a list, of which each element is the arguments of "
            f"loss_fn, got {type(batches).__name__}."
        )
    checked = [_as_batch(batch) for batch in batches]
    if not checked:
        raise ValueError("There are no batches: give at least one.")
    return checked


def _as_batch(batch: Any) -> Batch:
    if isinstance(batch, (tuple, list)):
        return Batch(tuple(batch))
    # A model is a dict, and so is a batch with names.
    if type(batch) is dict:
        return Batch((), batch)
    return Batch((batch,))


def check_parameters(setting: Setting) -> None:
    """Raise if a parameter is not finite."""
    found = nonfinite(setting.model.parameters())
    if found:
        names = ", ".join(leaf.path for leaf in found[:5])
        raise NoSetHelps(
            f"Parameters are not finite: {names}. No dtype helps: go back to weights "
            "from before that."
        )


def check_arguments(setting: Setting, batch: Batch, name: str) -> None:
    """Raise if an argument of a batch holds NaN or +inf."""
    arguments = by_name(batch.args, batch.kwargs)
    leaves = tree_flatten(arguments, is_leaf=is_leaf)
    arrays = {path: x for path, x in leaves if isinstance(x, mx.array)}
    for leaf in nonfinite(arrays):
        # A mask of -inf is no fault.
        if leaf.nan or leaf.positive_inf:
            raise NoSetHelps(
                f"{leaf.path} of {name} is not finite: leave such samples out, or "
                "repair them."
            )
    if setting.compute_dtype is None or not setting.cast_inputs:
        return
    for path, x in too_large(arguments, setting.compute_dtype).items():
        largest = float(mx.max(x))
        if largest > LARGEST:
            raise NoSetHelps(
                f"{path} of {name} reaches {largest:.6g} and is not finite "
                "where compute_dtype casts it: normalise it, or leave arguments alone "
                "with cast_inputs=False."
            )


def check_reference(reference: Run, name: str) -> None:
    """Raise if loss or gradients are not finite even in float32."""
    if math.isfinite(reference.loss) and reference.gradients_are_finite():
        return
    sound = math.isfinite(reference.loss)
    for value in [*reference.forward, *(reference.backward if sound else [])]:
        if value.nan or value.positive_inf:
            place = value.event.path or "the model"
            raise NoSetHelps(
                f"{name} is not finite in float32 either, first at {place}: "
                f"{value.event}. Look for a logarithm, a division or a root of zero."
            )
    raise NoSetHelps(
        f"The loss of {name} is {reference.loss} in float32, too. Look at the loss "
        "function for a logarithm or a division of zero, and for a cast to half "
        "precision."
    )
