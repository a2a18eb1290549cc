"""Find the first layer, forward or backward, where a value is not finite."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import precision
from ..files.text import dtype_name, power
from ..finite import NonFinite, all_finite, nonfinite
from ..float16.measure import Batch, Setting
from ..islands import kept_in_float32
from ..probes import (
    Probes,
    by_name,
    largest,
    made_small,
    probed,
    too_large,
    unchanged,
)
from ..scale import SMALLEST_SCALE
from .cure import api_in_use, find_cure, keep_line, line_to_paste
from .first_place import Place, first_backward, first_forward
from .overflow import nonfinite_table
from .reading import scale_of

# Small enough that what overflowed at the scale asked for cannot any more.
_SMALLER = 2.0**-40

_NOWHERE: Place = (None, "")

_ADVICE = {
    "nothing": "Loss and gradients are finite.",
    "batch": "The batch holds values that are not finite. No loss scale helps: leave "
    "such samples out, or repair them.",
    "arguments": "Arguments are finite, and no longer so where compute_dtype casts "
    "them. No loss scale helps: scale or normalise them; or leave arguments alone with "
    "value_and_grad(..., cast_inputs=False), and cast in the loss function what the "
    "model needs.",
    "parameters": "Parameters are not finite in the forward pass, the table says "
    "which. No loss scale helps: go back to a checkpoint from before, or keep them in "
    "float32 if they are finite there and too large for float16.",
    "forward": "The forward pass overflows. Loss scaling works on gradients and cannot "
    "help: let the layers that make and take this value compute in float32, make their "
    "inputs smaller, or compute in bfloat16.",
    "loss": "The model's outputs are finite and the loss is not. Loss scaling cannot "
    "help: compute the loss in float32, from logits.astype(mx.float32), and look for a "
    "logarithm or a division of zero.",
    "gradients": "Only the gradients overflow; loss and forward pass are finite. A "
    "smaller loss scale helps, and a dynamic scaler finds it by itself.",
    "derivative": "Loss and forward pass are finite, but the gradients are not at any "
    "loss scale: a derivative itself is infinite or NaN, as that of sqrt or of a norm "
    "at zero. Loss scaling cannot help: add an epsilon there.",
}


@dataclass(frozen=True)
class OverflowReport:
    """What :func:`explain_overflow` found; print it to read it.

    Attributes:
        cause (str): "nothing", "batch", "arguments", "parameters", "forward", "loss",
            "gradients" or "derivative".
        layer (str or None): The path of the layer that made the first value that is not
            finite; "" is the model itself, None the loss function or none at all.
        where (str): The same in words, with what was found there; or how it was run, if
            nothing was.
        loss (float): The true loss.
        scale (float): The loss scale, without that of a function from ``scale_loss``.
        leaves (list): The leaves that are not finite, of the batch, the parameters or
            the gradients, whichever the cause is in. ``args[1].mask`` is in the second
            argument of the loss function.
        cure (list or None): The layers that, in float32, make loss and gradients of
            this batch finite; what ``float32_layers`` takes. Tried, and None where none
            do or none are needed.
        line (str): Where to put which line of code; "" if none helps.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import explain_overflow
        >>> model = nn.Linear(2, 1)
        >>> report = explain_overflow(model, lambda x: mx.log(model(x) * 0).sum(),
        ...                           mx.ones((1, 2)))
        >>> report.cause, report.scaling_helps
        ('loss', False)
    """

    cause: str
    layer: str | None
    where: str
    loss: float
    scale: float
    leaves: list[NonFinite] = field(default_factory=list)
    cure: list[Any] | None = None
    line: str = ""

    @property
    def scaling_helps(self) -> bool:
        """Whether a smaller loss scale makes the gradients finite."""
        return self.cause == "gradients"

    def __str__(self) -> str:
        lines = [_ADVICE[self.cause], self.where, self.line]
        lines.append(
            f"The loss is {self.loss:.6g}, the loss scale {power(self.scale)}."
        )
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
    """Rerun one batch, name the layer where a value stops being finite, and a cure.

    The pass is run layer by layer without compilation and keeps what is needed to
    look at each; where the forward pass overflows, it is run several times to find
    layers that cure it in float32. Use it on a batch that was skipped, not on every
    one. Model and random state are the same after it, also if it fails.

    Args:
        model (nn.Module): The model.
        loss_fn (Callable): As for ``nn.value_and_grad``: is called with the batch
            and returns the loss, or a tuple that starts with it.
        *batch (Any): What ``loss_fn`` takes. mlx-lm's losses take the model first.
        scale (float, GradScaler or LossScaleOptimizer): The loss scale; after an
            overflow a scaler has lowered its own already. Leave it out if
            ``loss_fn`` comes from ``scale_loss``. Default: none.
        compute_dtype (Dtype, optional): As for ``GradScaler.value_and_grad``.
        keep (Callable, optional): As for ``GradScaler.value_and_grad``.
        cast_inputs (bool): As for ``GradScaler.value_and_grad``.
        **named (Any): What ``loss_fn`` takes by keyword.

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
    how = _how_it_runs(model, loss_fn, scale, compute_dtype)
    api = api_in_use(model, loss_fn, batch, scale, compute_dtype)
    given = Setting(model, loss_fn, compute_dtype, cast_inputs, keep)
    if scale is None:
        trial = _Trial(_as_unscaled(given), Batch(batch, named), 1.0)
    else:
        trial = _Trial(given, Batch(batch, named), scale_of(scale))
    if not tree_flatten(model.trainable_parameters()):
        raise ValueError("The model has no trainable parameters: unfreeze some.")
    loss, found = _diagnose(trial, how)
    cure, line = None, found.line
    if found.cause in ("forward", "loss"):
        cure = find_cure(given, trial.batch)
        line = line_to_paste(cure, api) if cure else ""
    return OverflowReport(
        found.cause, *found.place, loss, trial.scale, found.leaves, cure, line
    )


@dataclass(frozen=True)
class _Finding:
    cause: str
    place: Place = _NOWHERE
    leaves: list[NonFinite] = field(default_factory=list)
    line: str = ""


@dataclass(frozen=True)
class _Trial:
    """One batch, and how it is run."""

    setting: Setting
    batch: Batch
    scale: float

    def probe(self) -> tuple[float, list[NonFinite], Probes]:
        """Return the loss, the gradients that are not finite, and what layers did."""
        with probed(self.setting.model) as probes:
            loss_fn = probes.ends_with(self.setting.loss_fn)
            loss, grads = self._differentiate(loss_fn, self.scale, self.batch)
            probes.read()
        return float(loss), nonfinite(grads), probes

    def scaling_helps(self, batch: Batch) -> bool:
        """Tell whether a smaller scale makes loss and gradients of a batch finite."""
        smaller = max(self.scale * _SMALLER, SMALLEST_SCALE)
        with unchanged(self.setting.model):
            results = self._differentiate(self.setting.loss_fn, smaller, batch)
            return bool(all_finite(results).item())

    def _differentiate(
        self, loss_fn: Callable[..., Any], scale: float, batch: Batch
    ) -> tuple[mx.array, Any]:
        how = self.setting
        scaled = precision.with_scaled_gradient(loss_fn, lambda: mx.array(scale))
        if how.compute_dtype is None:
            function = nn.value_and_grad(how.model, scaled)
        else:
            function = precision.value_and_grad(
                how.model, scaled, how.compute_dtype, how.keep, how.cast_inputs
            )
        outputs, grads = function(*batch.args, **batch.kwargs)
        return outputs[0] if isinstance(outputs, tuple) else outputs, grads


def _diagnose(trial: _Trial, how: str) -> tuple[float, _Finding]:
    """Return the loss, and the first of the causes, in the order values are made."""
    loss, leaves, probes = trial.probe()
    sound = math.isfinite(loss)
    if sound and not leaves:
        return loss, _Finding("nothing", (None, how))
    found = _fault_of_arguments(trial) or _fault_of_parameters(trial.setting)
    if found:
        return loss, found
    place = first_forward(probes, sound)
    if place:
        return loss, _Finding("forward", place, leaves)
    if not sound:
        return loss, _Finding("loss", _NOWHERE, leaves)
    helps = trial.scaling_helps(trial.batch)
    cause = "gradients" if helps else "derivative"
    return loss, _Finding(cause, first_backward(probes, leaves), leaves)


def _fault_of_arguments(trial: _Trial) -> _Finding | None:
    setting, batch = trial.setting, trial.batch
    arguments = by_name(batch.args, batch.kwargs)
    # A mask of -inf is no fault.
    found = [x for x in nonfinite(_arrays(arguments)) if x.nan or x.positive_inf]
    if found:
        return _Finding("batch", _NOWHERE, found)
    dtype = setting.compute_dtype if setting.cast_inputs else None
    large = too_large(arguments, dtype) if dtype is not None else {}
    if dtype is None or not large:
        return None
    # Nor is a mask of -1e9: look whether all is well with small arguments.
    small = Batch(*made_small((batch.args, batch.kwargs), dtype))
    if trial.scaling_helps(batch) or not trial.scaling_helps(small):
        return None
    found = nonfinite({path: x.astype(dtype) for path, x in large.items()})
    return _Finding("arguments", (None, _sizes(large, dtype)), found)


def _fault_of_parameters(setting: Setting) -> _Finding | None:
    found = nonfinite(_as_computed(setting.model, setting.compute_dtype, setting.keep))
    if not found:
        return None
    path = found[0].path
    finite = not nonfinite({"x": _parameters(setting.model)[path]})
    line = keep_line(path) if finite else ""
    return _Finding("parameters", (path.rpartition(".")[0], ""), found, line)


def _how_it_runs(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    scale: Any,
    compute_dtype: mx.Dtype | None,
) -> str:
    """Say what the user may have left out."""
    hows, missing = [], []
    dtypes = {x.dtype for _, x in tree_flatten(model.trainable_parameters())}
    if compute_dtype is None and mx.float32 in dtypes:
        hows.append("in the dtypes that model and arguments have")
        missing.append("compute_dtype= (as for value_and_grad)")
    if scale is None and not hasattr(loss_fn, "has_scaled_gradient"):
        hows.append("without a loss scale")
        missing.append("scale= (the scaler or the LossScaleOptimizer)")
    if not missing:
        return ""
    return (
        f"It was run {', and '.join(hows)}. To run it as in training, pass "
        f"{' and '.join(missing)}."
    )


def _as_unscaled(setting: Setting) -> Setting:
    # Without its mark, which refuses a second scale: that is 1 here.
    loss_fn = setting.loss_fn
    return replace(setting, loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs))


def _arrays(arguments: dict[str, Any]) -> dict[str, mx.array]:
    leaves = tree_flatten(arguments, is_leaf=lambda x: isinstance(x, nn.Module))
    return {path: x for path, x in leaves if isinstance(x, mx.array)}


def _sizes(large: dict[str, mx.array], dtype: mx.Dtype) -> str:
    reached = [f"{path} reaches {largest(x, dtype):.6g}" for path, x in large.items()]
    name = dtype_name(dtype)
    return f"{', '.join(reached)}; {name} ends at {mx.finfo(dtype).max:.6g}."


def _as_computed(
    model: nn.Module,
    compute_dtype: mx.Dtype | None,
    keep: Callable[[str, mx.array], bool] | None,
) -> Any:
    """Return the parameters as the forward pass has them."""
    parameters = _parameters(model)
    if compute_dtype is not None:
        with kept_in_float32(model, compute_dtype, keep) as kept:
            for path, x in tree_flatten(model.trainable_parameters()):
                floating = mx.issubdtype(x.dtype, mx.floating)
                if floating and not kept(path, x):
                    parameters[path] = x.astype(compute_dtype)
    return parameters


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return tree_flatten(model.parameters(), destination={})
