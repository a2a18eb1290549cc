"""Find the first layer with a non-finite value in the forward or backward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.forward import Casting
from ..core.gradients import check_loss_fn
from ..files.text import list_some, power
from ..float32.report import Float32Search
from ..float32.search import search
from ..float32.trial import Trial
from ..float32.where import TO, is_inside, ordered_modules
from .reading import scale_of

# A model that skips steps may have unusual weights, so allow more than the search does.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class OverflowReport:
    """The result of :func:`explain_overflow`; print it for a summary.

    Attributes:
        cause (str): "nothing", "batch", "parameters", "forward", "loss", "gradients" or
            "derivative".
        layer (str or None): The path of the layer at the first bad value. "" is the
            model, and None the loss function or no layer.
        where (str): The first bad value, its location and what helps, in words.
        loss (float): The loss.
        scale (float): The loss scale passed to :func:`explain_overflow`, or 1.0.
        search (Float32Search): The search for float32 layers on this batch.
    """

    cause: str
    layer: str | None
    where: str
    loss: float
    scale: float
    search: Float32Search = field(default_factory=lambda: Float32Search([]))

    @property
    def fix(self) -> list[str] | None:
        """The layers to pass to ``float32_layers``, verified on this batch, or None."""
        return self.search.where or None

    @property
    def line(self) -> str:
        """The code that fixes the overflow, and where to add it; "" if none."""
        return self.search.line

    def __str__(self) -> str:
        first = f"The loss is {self.loss:.6g} at a loss scale of {power(self.scale)}."
        return "\n".join(filter(None, [first, self.where, self.line]))


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

    The report says which layer computed the value. It also compares the batch with
    float32, because an overflow inside a layer may leave the loss finite but wrong, and
    advises only what it has tried. The model and the random state do not change. This
    takes the time of about four training steps for a batch that matches float32, and of
    at most about fifty. The model must fit into memory in float32.

    Args:
        model (nn.Module): The model.
        loss_fn (Callable): Same as in ``nn.value_and_grad``, not from ``scale_loss``.
        *batch (Any): The arguments of ``loss_fn``. For mlx-lm's losses, the model is
            the first argument.
        scale (float, GradScaler or LossScaleOptimizer): The loss scale. A scaler lowers
            its scale after an overflow, so pass the scale of the skipped step as a
            number. Default: ``1.0``.
        compute_dtype (Dtype, optional): Same as in ``value_and_grad``.
        keep (Callable, optional): Same as in ``value_and_grad``.
        cast_inputs (bool): Same as in ``value_and_grad``.
        **named (Any): Keyword arguments of ``loss_fn``.

    Returns:
        OverflowReport: The cause, the layer and a fix; print it for a summary.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import explain_overflow
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model.layers[1].weight = mx.array([[6000.0, 6000.0]])
        >>> def loss_fn(x):
        ...     return 0.01 * model(x).astype(mx.float32).sum()
        >>> report = explain_overflow(model, loss_fn, mx.ones((1, 2)), scale=65536.0,
        ...                           compute_dtype=mx.float16)
        >>> report.cause, report.layer
        ('gradients', 'layers.0')
    """
    check_loss_fn(loss_fn)
    number = 1.0 if scale is None else scale_of(scale)
    trial = Trial(
        model, loss_fn, batch, named, Casting(compute_dtype, keep, cast_inputs)
    )
    with trial.in_float32() as exact:
        expected = float(exact.differentiate()[0])
    found = trial.check(expected, _TOLERANCE, number)
    report = partial(OverflowReport, loss=found.loss, scale=number)
    if found.is_good:
        return report(
            "nothing",
            None,
            "The loss and the gradients match float32. If training skipped this batch, "
            "pass the compute_dtype= that training uses, and the scale= of that step.",
        )
    bad = found.bad_gradients[::-1]  # in the order of the backward pass
    if bad or not math.isfinite(found.loss):
        text, paths = trial.find_bad_input()
        if text:
            cause = "parameters" if paths else "batch"
            return report(cause, _owner(model, paths), text)
    overflow = f"The gradients of {list_some(bad)} are NaN or inf. " if bad else ""
    if not found.is_loss_off:
        scaled = trial.verify(expected, _TOLERANCE)
        if scaled.is_good:
            result = Float32Search([], scale=scaled.scale)
            text = f"At a loss scale of {power(scaled.scale)}, they match float32."
            if not bad:
                text = f"Small gradients underflow. {text}"
                return report("nothing", None, text, search=result)
            text = f"{overflow}{text} A dynamic scaler finds such a scale by itself."
            return report("gradients", _owner(model, bad), text, search=result)
    result = search([trial], _TOLERANCE)
    if not result.where:
        cause = "loss" if found.is_loss_off else "derivative" if bad else "nothing"
        text = f"{overflow}Neither loss scaling nor float32 layers help. "
        text += result.problem
        return report(cause, _owner(model, bad), text, search=result)
    entry, why = next(iter(result.reasons.items()))
    why += " Loss scaling affects only gradients and cannot help."
    if why.startswith("The loss function"):
        return report("loss", None, why, search=result)
    layer = entry.partition(TO)[0]
    return report("forward", layer, f"{layer or 'The model'}: {why}", search=result)


def _owner(model: nn.Module, parameters: list[str]) -> str | None:
    """Return the layer of the first of some parameters, or None without any."""
    paths = [path for path, _ in ordered_modules(model)]
    found = [path for path in paths if parameters and is_inside(parameters[0], path)]
    return max(found, key=len, default=None)
