"""Find the first layer, forward or backward, where a value is not finite."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.finite import NonFinite, nonfinite
from ..core.scale import SMALLEST_SCALE
from ..files.text import dtype_name, power
from ..float32_layers.checks import (
    computed_parameters,
    nonfinite_arguments,
    overflows,
    replace_too_large,
    too_large_arguments,
)
from ..float32_layers.finder import Place, first_backward, first_forward, is_nonfinite
from ..float32_layers.report import WHOLE_MODEL
from ..float32_layers.search import search_batches
from ..float32_layers.trial import Batch, Run, Setting, run
from ..float32_layers.where import module_path, ordered_modules
from .overflow import nonfinite_table
from .reading import scale_of

# Small enough that nothing can overflow any more because of the scale.
_SMALLER = 2.0**-40

_ADVICE = {
    "nothing": "Loss and gradients are finite.",
    "batch": "The batch holds values that are not finite. No loss scale helps: leave "
    "such samples out, or repair them.",
    "arguments": "Arguments are finite, but not after the cast to compute_dtype. No "
    "loss scale helps: normalise them; or leave arguments alone with "
    "value_and_grad(..., cast_inputs=False), and cast in the loss function what the "
    "model needs.",
    "parameters": "Parameters are not finite in the forward pass. No loss scale helps: "
    "return to an earlier checkpoint; or, if they are finite in float32 and too large "
    "for float16, let their layer compute in float32.",
    "forward": "The forward pass overflows. Loss scaling works on gradients and cannot "
    "help: let the layers that make and read this value compute in float32, make their "
    "inputs smaller, or compute in bfloat16.",
    "loss": "The model's outputs are finite. Loss scaling cannot help: compute the "
    "loss in float32, from logits.astype(mx.float32), and look for a logarithm or a "
    "division of zero.",
    "gradients": "Only gradients overflow. A smaller loss scale helps, and a dynamic "
    "scaler finds it by itself.",
    "derivative": "The gradients are not finite at any loss scale: a derivative itself "
    "is infinite or NaN, such as that of sqrt or of a norm at zero. Loss scaling "
    "cannot help: add an epsilon there.",
}


@dataclass(frozen=True)
class OverflowReport:
    """The result of :func:`explain_overflow`; print it to read it.

    Attributes:
        cause (str): "nothing", "batch", "arguments", "parameters", "forward", "loss",
            "gradients" or "derivative".
        layer (str or None): The path of the layer that computed the first non-finite
            value; "" is the model itself, None the loss function or no layer.
        where (str): The same in words, with the value found there; or how the batch was
            run, if all is finite.
        loss (float): The loss.
        scale (float): The loss scale, without that of a function from ``scale_loss``.
        leaves (list): The non-finite leaves of the batch, the parameters or the
            gradients. ``args[1].mask`` is in the second argument of the loss function.
        cure (list or None): The layers that, in float32, make loss and gradients of
            this batch finite, as ``float32_layers`` takes them. They were tried; None
            where no layers help or none are needed.
        line (str): The line of code that cures it, and where to put it; "" if none
            does.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import explain_overflow
        >>> model = nn.Linear(2, 1)
        >>> report = explain_overflow(model, lambda x: mx.log(model(x) * 0).sum(),
        ...                           mx.ones((1, 2)))
        >>> report.cause, report.loss_is_finite, report.scaling_helps
        ('loss', False, False)
    """

    cause: str
    layer: str | None
    where: str
    loss: float
    scale: float
    leaves: list[NonFinite] = field(default_factory=list)
    cure: list[str] | None = None
    line: str = ""

    @property
    def loss_is_finite(self) -> bool:
        """Whether the loss itself is finite."""
        return math.isfinite(self.loss)

    @property
    def scaling_helps(self) -> bool:
        """Whether a smaller loss scale makes the gradients finite."""
        return self.cause == "gradients"

    def __str__(self) -> str:
        scale = f"at a loss scale of {power(self.scale)}"
        if self.loss_is_finite:
            first = f"The loss is finite, {self.loss:.6g}, {scale}."
        else:
            first = f"The loss itself is {self.loss}, {scale}: every step is skipped."
        lines = [first, _ADVICE[self.cause], self.where, self.line]
        if self.leaves:
            in_batch = self.cause in ("batch", "arguments")
            what = "argument" if in_batch else "parameter"
            lines.append(nonfinite_table(self.leaves, what))
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
    """Rerun one batch and report which layer overflows first, and a cure.

    Says first whether the loss itself is finite, then names the layer. The model and
    the random state are unchanged afterwards. It reads from the device and runs the
    batch several times: call it after a skipped step, not in every step.

    Args:
        model (nn.Module): The model.
        loss_fn (Callable): As for ``nn.value_and_grad``: is called with the batch and
            returns the loss, or a tuple that starts with it.
        *batch (Any): The arguments of ``loss_fn``. mlx-lm's losses take the model
            first.
        scale (float, GradScaler or LossScaleOptimizer): The loss scale; after an
            overflow a scaler has lowered its own already. Leave it out if ``loss_fn``
            comes from ``scale_loss``. Default: none.
        compute_dtype (Dtype, optional): As for ``GradScaler.value_and_grad``.
        keep (Callable, optional): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        **named (Any): Keyword arguments of ``loss_fn``.

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
    if not tree_flatten(model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    is_scaled = hasattr(loss_fn, "has_scaled_gradient")
    if is_scaled and scale is not None:
        raise TypeError(
            "This loss function comes from scale_loss() and has its own scale: leave "
            "scale= out, or pass the original function."
        )
    setting = Setting(model, loss_fn, compute_dtype, cast_inputs, keep)
    case = _Case(
        setting, Batch(batch, named), 1.0 if scale is None else scale_of(scale)
    )
    found = case.diagnose()
    if found.cause == "nothing":
        return replace(found, where=_how_it_ran(setting, scale, is_scaled))
    if found.cause in ("forward", "loss"):
        return _with_cure(found, setting, case.batch)
    return found


@dataclass(frozen=True)
class _Case:
    """One batch, and how to run it."""

    setting: Setting
    batch: Batch
    scale: float

    def diagnose(self) -> OverflowReport:
        """Return the first cause, in the order in which values are computed."""
        result = self._run(self.batch, self.scale)
        loss_is_finite = math.isfinite(result.loss)
        if loss_is_finite and result.has_finite_gradients:
            return self._report(result, "nothing")
        found = self._check_arguments(result) or self._check_parameters(result)
        if found:
            return found
        leaves = [
            NonFinite(path, (x.count,), x.dtype, x.nan, x.positive_inf, x.negative_inf)
            for path, x in result.gradients.items()
            if not x.is_finite
        ]
        place = first_forward(result, lambda v: is_nonfinite(v, loss_is_finite))
        if place is not None:
            return self._report(result, "forward", place, leaves)
        if not loss_is_finite:
            return self._report(result, "loss", None, leaves)
        cause = "gradients" if self._scaling_helps(self.batch) else "derivative"
        place = first_backward(result, lambda v: not v.is_finite)
        return self._report(result, cause, place, leaves)

    def _check_arguments(self, result: Run) -> OverflowReport | None:
        found = nonfinite_arguments(self.batch)
        if found:
            return self._report(result, "batch", None, found)
        large = too_large_arguments(self.setting, self.batch)
        dtype = self.setting.compute_dtype
        if dtype is None or not large:
            return None
        # A mask of -1e9 is no fault: look whether small arguments cure it.
        small = replace_too_large(self.batch, dtype)
        if self._scaling_helps(self.batch) or not self._scaling_helps(small):
            return None
        leaves = nonfinite({path: x.astype(dtype) for path, x in large.items()})
        reached = [
            f"{path} reaches {_largest(x, dtype):.6g}" for path, x in large.items()
        ]
        limit = f"{dtype_name(dtype)} ends at {mx.finfo(dtype).max:.6g}"
        found_report = self._report(result, "arguments", None, leaves)
        return replace(found_report, where=f"{', '.join(reached)}; {limit}.")

    def _check_parameters(self, result: Run) -> OverflowReport | None:
        found = nonfinite(computed_parameters(self.setting))
        if not found:
            return None
        report = self._report(result, "parameters", None, found)
        modules = dict(ordered_modules(self.setting.model))
        layer = module_path(modules, found[0].path)
        is_finite = not nonfinite(self.setting.model.parameters())
        line = _line_to_paste([layer]) if is_finite else ""
        return replace(report, layer=layer, line=line)

    def _report(
        self,
        result: Run,
        cause: str,
        place: Place | None = None,
        leaves: list[NonFinite] | None = None,
    ) -> OverflowReport:
        layer = place.layer if place else None
        where = f"First in {place.text}: {place.value}." if place else ""
        return OverflowReport(
            cause, layer, where, result.loss, self.scale, leaves or []
        )

    def _scaling_helps(self, batch: Batch) -> bool:
        result = self._run(batch, max(self.scale * _SMALLER, SMALLEST_SCALE))
        return math.isfinite(result.loss) and result.has_finite_gradients

    def _run(self, batch: Batch, scale: float) -> Run:
        loss_fn = self.setting.loss_fn
        # Without the mark of scale_loss(), which refuses a second scale: it is 1 here.
        plain = replace(self.setting, loss_fn=lambda *a, **k: loss_fn(*a, **k))
        return run(plain, batch, scale=scale)


def _with_cure(
    report: OverflowReport, setting: Setting, batch: Batch
) -> OverflowReport:
    """Add the layers that cure this batch in float32, if any do."""
    loss_fn = inspect.unwrap(
        setting.loss_fn, stop=lambda f: not hasattr(f, "has_scaled_gradient")
    )
    # A model that skips steps may have odd weights: allow a large distance.
    found = search_batches(replace(setting, loss_fn=loss_fn), [batch], 1.0, 0.1)
    if not found.helps or not found.where:
        return report
    line = _line_to_paste(found.where)
    if found.is_whole_model:
        line = f"{WHOLE_MODEL}\n{line}"
    return replace(report, cure=found.where, line=line)


def _line_to_paste(where: list[str]) -> str:
    argument = where[0] if len(where) == 1 else where
    return (
        "Add this line before the first step, and before the step is compiled:\n"
        f"    mlx_gradscale.float32_layers(model, {argument!r})"
    )


def _how_it_ran(setting: Setting, scale: Any, is_scaled: bool) -> str:
    """Say which arguments the caller may have left out."""
    missing = []
    parameters = tree_flatten(setting.model.trainable_parameters())
    is_float32 = any(x.dtype == mx.float32 for _, x in parameters)
    if setting.compute_dtype is None and is_float32:
        missing.append("compute_dtype= (as for value_and_grad)")
    if scale is None and not is_scaled:
        missing.append("scale= (the scaler or the LossScaleOptimizer)")
    if not missing:
        return ""
    return f"To run the batch as in training, pass {' and '.join(missing)}."


def _largest(x: mx.array, dtype: mx.Dtype) -> float:
    values = mx.where(overflows(x, dtype), x, 0).reshape(-1)
    return float(values[mx.argmax(mx.abs(values))])
