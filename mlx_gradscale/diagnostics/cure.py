"""What to do about a forward pass that overflows: the line of code to paste."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..float16.measure import Batch, Setting
from ..float16.search import search_batches

_BEFORE = {
    "LossScaleOptimizer": "before the first step, and before the step is compiled; "
    "optimizer and loss stay as they are",
    "compute_dtype": "before value_and_grad(model, loss_fn, compute_dtype), which "
    "stays as it is, and before the step is compiled",
    "mlx-lm": "before train(model, optimizer, ...), which stays as it is",
    "": "before the first step, and before the step is compiled",
}


def api_in_use(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: tuple[Any, ...],
    scale: Any,
    compute_dtype: mx.Dtype | None,
) -> str:
    """Tell how the model is trained, from what ``explain_overflow`` was given."""
    if any(x is model for x in batch):
        return "mlx-lm"
    if compute_dtype is not None:
        return "compute_dtype"
    if hasattr(scale, "scaler") or hasattr(loss_fn, "has_scaled_gradient"):
        return "LossScaleOptimizer"
    return ""


def find_cure(setting: Setting, batch: Batch) -> list[Any] | None:
    """Return the layers that cure one batch in float32; None if none do."""
    plain = inspect.unwrap(
        setting.loss_fn, stop=lambda f: not hasattr(f, "has_scaled_gradient")
    )
    if hasattr(plain, "has_scaled_gradient"):
        return None
    # A model that is skipping steps has weights of any kind: let it be far off.
    found = search_batches(replace(setting, loss_fn=plain), [batch], 1.0, 0.1)
    return found.where if found.helps else None


def line_to_paste(cure: list[Any], api: str) -> str:
    """Return the advice: where to put which line."""
    where = cure if len(cure) != 1 or not isinstance(cure[0], str) else cure[0]
    return (
        f"Put this line {_BEFORE[api]}:\n"
        f"    mlx_gradscale.float32_layers(model, {where!r})"
    )


def keep_line(path: str) -> str:
    """Return the advice for a parameter that is finite in float32 alone."""
    return (
        "Keep it in float32, in the call that you have:\n"
        "    value_and_grad(model, loss_fn, compute_dtype, "
        f"keep=lambda path, x: path == {path!r})"
    )
