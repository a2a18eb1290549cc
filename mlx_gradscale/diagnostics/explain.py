"""Find the first layer with a non-finite value in the forward or backward pass."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.scale import SMALLEST_SCALE
from ..files.text import align, dtype_name, power
from ..float32_layers.faults import find_fault
from ..float32_layers.report import WHOLE_MODEL, Float32Search
from ..float32_layers.search import search
from ..float32_layers.trial import Trial
from ..nonfinite import NonFinite
from .reading import scale_of

# Multiplied by this factor, a loss scale is too small to cause an overflow.
_SMALLER = 2.0**-40
_MAX_ROWS = 20

_ADVICE = {
    "nothing": "The gradients are finite too. If training skipped this batch, pass the "
    "compute_dtype= that training uses, and the scale= of that step.",
    "batch": "No loss scale can fix this.",
    "arguments": "The arguments are finite, but overflow in compute_dtype, which no "
    "loss scale can fix. Normalize them, or call value_and_grad(..., "
    "cast_inputs=False) and cast the model's inputs in the loss function.",
    "parameters": "No loss scale can fix this.",
    "forward": "Loss scaling affects only gradients and cannot help. If the value "
    "overflowed, compute the layers that produce and read it in float32, make their "
    "inputs smaller, or compute in bfloat16.",
    "loss": "The model's outputs are finite, but the loss is not. Loss scaling cannot "
    "help. Compute the loss in float32, from logits.astype(mx.float32), and look for a "
    "logarithm of zero or a division by zero.",
    "gradients": "Only the gradients overflow. A smaller loss scale fixes this, and a "
    "dynamic scaler finds one by itself.",
    "derivative": "The gradients are non-finite at any loss scale, because a "
    "derivative itself is inf or NaN. Examples are the derivatives of sqrt and of a "
    "norm at zero, which an epsilon fixes.",
}


@dataclass(frozen=True)
class OverflowReport:
    """The result of :func:`explain_overflow`; print it for a summary.

    Attributes:
        cause (str): "nothing", "batch", "arguments", "parameters", "forward", "loss",
            "gradients" or "derivative".
        layer (str or None): The path of the layer that computed or owns the first
            non-finite value. "" is the model, and None the loss function or no layer.
        where (str): The first non-finite value and its location, in words.
        loss (float): The loss.
        scale (float): The loss scale passed to :func:`explain_overflow`, or 1.0.
        leaves (list): The non-finite leaves of the batch, the parameters or the
            gradients. In a path such as ``args[1].mask``, ``args[1]`` is the second
            argument of the loss function.
        cure (list or None): The layers to pass to ``float32_layers``, verified on this
            batch. None if no layers help or are needed.
        problem (str): What is non-finite even in float32; "" if nothing is.
    """

    cause: str
    layer: str | None
    where: str
    loss: float
    scale: float
    leaves: list[NonFinite] = field(default_factory=list)
    cure: list[str] | None = None
    problem: str = ""

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss itself is finite."""
        return math.isfinite(self.loss)

    @property
    def scaling_helps(self) -> bool:
        """Whether a smaller loss scale makes the gradients finite."""
        return self.cause == "gradients"

    @property
    def line(self) -> str:
        """The line of code that fixes the overflow, and where to add it; "" if none."""
        if self.cure is None:
            return ""
        where = self.cure[0] if len(self.cure) == 1 else self.cure
        lines = [WHOLE_MODEL] if Float32Search(self.cure).is_whole_model else []
        lines += [
            "Add this line before the first step, and before the step is compiled:",
            f"    mlx_gradscale.float32_layers(model, {where!r})",
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        scale = f"at a loss scale of {power(self.scale)}"
        if self.loss_is_finite:
            first = f"The loss is finite ({self.loss:.6g}) {scale}."
        else:
            first = f"The loss itself is {self.loss} {scale}, so the step is skipped."
        advice = _ADVICE[self.cause]
        if self.problem:
            advice = f"Neither loss scaling nor float32 layers help. {self.problem}"
        lines = [first, self.where, advice, self.line]
        if self.leaves:
            lines.append(_table(self.leaves))
        return "\n".join(filter(None, lines))


def explain_overflow(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *batch: Any,
    scale: Any = None,
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
    **named: Any,
) -> OverflowReport:
    """Rerun one batch, and report the first non-finite value and how to fix it.

    The report says whether the loss itself is finite, and which layer computed the
    value. The model and the random state do not change. This function may run the batch
    several times, so call it after a skipped step, not on every step.

    Args:
        model (nn.Module): The model.
        loss_fn (Callable): As for ``nn.value_and_grad``. It returns the loss, or a
            tuple that starts with the loss.
        *batch (Any): The arguments of ``loss_fn``. For mlx-lm's losses, the model is
            the first argument.
        scale (float, GradScaler or LossScaleOptimizer): The loss scale. A scaler lowers
            its scale after an overflow, so pass the scale of the skipped step as a
            number. Omit the scale if ``loss_fn`` was returned by ``scale_loss``.
            Default: ``1.0``.
        compute_dtype (Dtype, optional): As for ``GradScaler.value_and_grad``.
        keep (Callable, optional): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        **named (Any): Keyword arguments of ``loss_fn``.

    Returns:
        OverflowReport: The cause, the layer and a fix; print it for a summary.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import explain_overflow
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model.layers[1].weight = mx.array([[6000.0, 6000.0]])
        >>> report = explain_overflow(
        ...     model,
        ...     lambda x: 0.01 * model(x).astype(mx.float32).sum(),
        ...     mx.ones((1, 2)),
        ...     scale=65536.0,
        ...     compute_dtype=mx.float16,
        ... )
        >>> report.cause, report.layer
        ('gradients', 'layers.1')
    """
    trial = Trial(model, loss_fn, batch, named, compute_dtype, cast_inputs, keep)
    if scale is not None and hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "This loss function was returned by scale_loss() and has its own scale. "
            "Omit scale=, or pass the original function."
        )
    number = 1.0 if scale is None else scale_of(scale)
    result = trial.run(scale=number)
    fault = find_fault(trial, result)
    if fault is None:
        return OverflowReport("nothing", None, "", result.loss, number)
    cause = fault.cause
    if cause == "gradients":
        smaller = max(number * _SMALLER, SMALLEST_SCALE)
        if find_fault(trial, trial.run(scale=smaller)) is not None:
            cause = "derivative"
    cure, problem = None, ""
    if cause in ("forward", "loss"):
        original = inspect.unwrap(
            loss_fn, stop=lambda f: not hasattr(f, "has_scaled_gradient")
        )
        # A model that skips steps may have unusual weights, so use a large tolerance.
        trial = replace(trial, loss_fn=original)
        found = search([trial], tolerance=0.1)
        cure = found.where or None
        # Without rows, the search has ended because float32 overflows as well.
        problem = "" if found.rows else found.problem
    text, leaves = fault.text, fault.leaves
    return OverflowReport(
        cause, fault.layer, text, result.loss, number, leaves, cure, problem
    )


def _table(leaves: list[NonFinite]) -> str:
    rows: list[tuple[Any, ...]] = [("name", "dtype", "nan", "+inf", "-inf", "of")]
    for x in leaves[:_MAX_ROWS]:
        counts = (x.nan, x.positive_inf, x.negative_inf, math.prod(x.shape))
        rows.append((x.path, dtype_name(x.dtype), *counts))
    more = len(leaves) - _MAX_ROWS
    return align(rows) + (f"\n... and {more} more" if more > 0 else "")
