"""Report the dtype in which each layer computes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.forward import Casting
from ..files.text import align, dtype_name
from ..float32.trace import Call, trace
from ..float32.trial import Trial


@dataclass(frozen=True)
class DtypeReport:
    """The result of :func:`compute_dtypes`; print it for a table.

    Attributes:
        layers (tuple): The layer calls, in order of return. Layers selected with
            ``float32_layers`` are left out.
    """

    layers: tuple[Call, ...]

    @property
    def first(self) -> Call | None:
        """The first half-precision layer with a float32 output, or None."""
        half = (layer for layer in self.layers if layer.parameters is not None)
        return next((layer for layer in half if mx.float32 in layer.outputs), None)

    def __str__(self) -> str:
        rows = [["layer", "parameters", "inputs", "outputs"]]
        for layer in self.layers:
            own = [layer.parameters] if layer.parameters else []
            dtypes = map(_names, (own, layer.inputs, layer.outputs))
            rows.append([layer.path or "(model)", *dtypes])
        text = (
            "No layer computes in half precision. Pass compute_dtype=mx.float16, or "
            "call model.set_dtype(mx.float16)."
        )
        if any(layer.parameters is not None for layer in self.layers):
            text = "No layer with half-precision parameters computes in float32."
        if self.first is not None:
            half = _names([self.first.parameters])
            text = (
                f"{self.first.path or 'The model'} has {half} parameters but returns "
                f"float32, from inputs of {_names(self.first.inputs)}. So does "
                "everything computed from its output, which costs time and memory. "
                f"Cast its float32 inputs to {half}, typically batches, masks, "
                "positions or outputs of frozen layers or another model; or its output."
            )
        return f"{align(rows, left=4)}\n{text}"


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
        model (nn.Module): The model, which is not changed.
        loss_fn (Callable): Same as in ``value_and_grad``.
        *args (Any): The arguments of ``loss_fn``, such as a batch.
        compute_dtype (Dtype, optional): Same as in ``value_and_grad``.
        keep (Callable, optional): Same as in ``value_and_grad``.
        cast_inputs (bool): Same as in ``value_and_grad``.
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
    casting = Casting(compute_dtype, keep, cast_inputs)
    root, _ = trace(Trial(model, loss_fn, args, kwargs, casting))
    *calls, _ = root.walk()  # without the call of the loss function
    return DtypeReport(tuple(call for call in calls if not call.is_float32))


def _names(dtypes: Any) -> str:
    return ", ".join(dict.fromkeys(map(dtype_name, dtypes))) or "-"
