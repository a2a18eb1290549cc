"""Report the dtype in which each layer computes."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..core.forward import is_opaque
from ..core.masters import HALF
from ..core.trees import is_floating
from ..files.text import align, dtype_name
from ..float32_layers.calls import Handler, handled, ordered_modules
from ..float32_layers.layers import first_half, is_inside_layer
from ..float32_layers.trial import Trial


@dataclass(frozen=True)
class LayerDtypes:
    """The dtypes in one call to a layer.

    Attributes:
        model (str): The class of the model that contains the layer. For another model
            passed to the loss function, the argument follows in parentheses.
        path (str): The path of the layer; "" is the whole model.
        parameters (Dtype or None): The dtype of the layer's own half-precision
            parameters; None if it has none.
        inputs (tuple): The dtypes of its floating-point inputs.
        outputs (tuple): The dtypes of its floating-point outputs.
    """

    model: str
    path: str
    parameters: mx.Dtype | None
    inputs: tuple[mx.Dtype, ...]
    outputs: tuple[mx.Dtype, ...]


@dataclass(frozen=True)
class DtypeReport:
    """The result of :func:`compute_dtypes`; print it for a table.

    Attributes:
        layers (tuple): The layer calls, in order of return. Layers selected with
            ``float32_layers`` are left out.
        half_statistics (tuple): The BatchNorm layers with running statistics in half
            precision.
    """

    layers: tuple[LayerDtypes, ...]
    half_statistics: tuple[str, ...] = ()

    @property
    def first(self) -> LayerDtypes | None:
        """The first half-precision layer with a float32 output, or None."""
        half = (layer for layer in self.layers if layer.parameters is not None)
        return next((layer for layer in half if mx.float32 in layer.outputs), None)

    def __str__(self) -> str:
        models = {layer.model for layer in self.layers}
        rows = [["layer", "parameters", "inputs", "outputs"]]
        for layer in self.layers:
            own = [layer.parameters] if layer.parameters else []
            name = layer.path or "(model)"
            name = f"{layer.model}: {name}" if len(models) > 1 else name
            rows.append([name, *map(_names, (own, layer.inputs, layer.outputs))])
        lines = [align(rows, left=4)]
        if self.first is not None:
            lines.append(_promotion_message(self.first))
        elif any(layer.parameters is not None for layer in self.layers):
            lines.append("No layer with half-precision parameters computes in float32.")
        else:
            lines.append(
                "No layer computes in half precision. Pass compute_dtype=mx.float16, "
                "or call model.set_dtype(mx.float16)."
            )
        if self.half_statistics:
            lines.append(
                f"The running statistics of {', '.join(self.half_statistics)} are in "
                "half precision, where small changes are lost and, in float16, a "
                "variance above 65504 overflows. Before training, call "
                "mlx_gradscale.float32_layers(model, "
                "lambda path, layer: isinstance(layer, nn.BatchNorm))."
            )
        return "\n".join(lines)


def compute_dtypes(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *args: Any,
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
    **kwargs: Any,
) -> DtypeReport:
    """Trace one batch and report the dtype in which each layer computes.

    A single float32 array, such as a batch, a mask or a positional encoding, promotes
    float16 results to float32, along with everything computed from them. MLX does not
    warn, and these computations take as much time and memory as in a float32 model.
    This function traces the batch without evaluating it.

    Args:
        model (nn.Module): The model, which is not changed. The report includes other
            models among the arguments of ``loss_fn``.
        loss_fn (Callable): As for ``value_and_grad``.
        *args (Any): The arguments of ``loss_fn``, such as a batch.
        compute_dtype (Dtype, optional): As for ``value_and_grad``.
        keep (Callable, optional): As for ``value_and_grad``.
        cast_inputs (bool): As for ``value_and_grad``.
        **kwargs (Any): Keyword arguments of ``loss_fn``.

    Returns:
        DtypeReport: The dtypes of each layer; print it for a table.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import compute_dtypes
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model.set_dtype(mx.float16)
        >>> report = compute_dtypes(model, lambda x: model(x).sum(), mx.ones((1, 2)))
        >>> report.first.path, report.first.inputs
        ('layers.0', (mlx.core.float32,))
    """
    calls: list[LayerDtypes] = []
    forward: list[LayerDtypes] = []

    def recorded_loss_fn(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_fn(*args, **kwargs)
        # Exclude calls of checkpointed layers in the backward pass.
        forward.extend(calls)
        return outputs

    def make_handler(model: str, path: str) -> Handler:
        def handle(module: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            if is_inside_layer.get() or module.computes_in_float32:
                return outputs
            dtypes = _dtypes((args, kwargs)), _dtypes(outputs)
            calls.append(LayerDtypes(model, path, first_half(module.values()), *dtypes))
            return outputs

        return handle

    options = compute_dtype, cast_inputs, keep
    trial = Trial(model, recorded_loss_fn, args, kwargs, *options)
    models = {type(model).__name__: model}
    parts = {id(part) for part in model.modules()}
    for name, x in trial.arguments.items():
        if isinstance(x, nn.Module) and id(x) not in parts:
            models[f"{type(x).__name__} ({name})"] = x
            parts |= {id(part) for part in x.modules()}
    with contextlib.ExitStack() as stack:
        for name, each in models.items():
            stack.enter_context(handled(each, partial(make_handler, name)))
        trial.differentiate()
    statistics = [
        path if len(models) == 1 else f"{name}: {path}"
        for name, each in models.items()
        for path, layer in ordered_modules(each)
        if isinstance(layer, nn.BatchNorm)
        and "running_mean" in layer
        and layer.running_mean.dtype in HALF
    ]
    return DtypeReport(tuple(forward), tuple(statistics))


def _dtypes(tree: Any) -> tuple[mx.Dtype, ...]:
    leaves = [x for _, x in tree_flatten(tree, is_leaf=is_opaque)]
    arrays = (x for x in leaves if isinstance(x, mx.array))
    return tuple(x.dtype for x in arrays if is_floating(x))


def _names(dtypes: Any) -> str:
    return ", ".join(dict.fromkeys(map(dtype_name, dtypes))) or "-"


def _promotion_message(layer: LayerDtypes) -> str:
    half = _names([layer.parameters])
    name = f"{layer.path!r} of {layer.model}" if layer.path else layer.model
    other = next((x for x in layer.inputs if x != layer.parameters), None)
    if other is None:
        why = "although none of its inputs is float32"
        remedy = f"Make the layer return {half}."
    else:
        why = f"because an input is {dtype_name(other)}"
        remedy = (
            f"Cast this input to {half}. Typical sources of float32 are batches, "
            "masks, positions, frozen layers and the outputs of another model."
        )
    return (
        f"{name} has {half} parameters but computes in float32, {why}. So does "
        "everything computed from its output, unless it is cast back. This costs time "
        f"and memory. {remedy}"
    )
