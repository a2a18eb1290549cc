"""In which dtype each layer computes, as a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import precision
from ..files.text import align, dtype_name
from ..precision.dtypes import LayerDtypes, sentence, watched_dtypes
from ..probes import unchanged


@dataclass(frozen=True)
class DtypeReport:
    """What :func:`compute_dtypes` found.

    Attributes:
        layers (tuple): Each call of a layer, in order; layers in float32 islands are
            left out.
        first (LayerDtypes or None): The first one with half-precision parameters that
            returned float32.
    """

    layers: tuple[LayerDtypes, ...]
    first: LayerDtypes | None

    def __str__(self) -> str:
        rows = [["layer", "parameters", "inputs", "outputs"]]
        for layer in self.layers:
            own = [layer.parameters] if layer.parameters else []
            cells = (own, layer.inputs, layer.outputs)
            rows.append([layer.path or "(model)", *map(_names, cells)])
        found = sentence(self.first) if self.first else "All layers compute in halves."
        return "\n".join([align(rows, left=4), found])


def _names(dtypes: Any) -> str:
    names = dict.fromkeys(dtype_name(dtype) for dtype in dtypes)
    return ", ".join(names) or "-"


def compute_dtypes(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    *args: Any,
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
    **kwargs: Any,
) -> DtypeReport:
    """Run one batch and tell in which dtype each layer computes.

    A float32 array that meets float16 makes the result float32, and with it all that
    follows: a batch, a mask, a positional encoding. Nothing says so, and from there on
    the model is as slow and as large as in float32.

    Args:
        model (nn.Module): The model; it comes out as it was.
        loss_fn (Callable): As for ``value_and_grad``.
        *args (Any): A batch, as ``loss_fn`` takes it.
        compute_dtype (Dtype, optional): As for ``value_and_grad``.
        keep (Callable, optional): As for ``value_and_grad``.
        cast_inputs (bool): As for ``value_and_grad``.
        **kwargs (Any): Of ``loss_fn``.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.diagnostics import compute_dtypes
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model.set_dtype(mx.float16)
        >>> report = compute_dtypes(model, lambda x: model(x).sum(), mx.ones((1, 2)))
        >>> report.first.path, report.first.argument
        ('layers.0', 'x')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"compute_dtypes(model, loss_fn, *batch) takes a model first, got "
            f"{type(model).__name__}."
        )
    with unchanged(model), watched_dtypes(model) as calls:
        if not calls.are_seen:
            raise RuntimeError(
                "The dtypes of layers are being looked at already, by another thread "
                "or around this call: call compute_dtypes() by itself."
            )

        def named_loss_fn(*args: Any, **kwargs: Any) -> Any:
            calls.names(loss_fn, args, kwargs)
            return loss_fn(*args, **kwargs)

        function = precision.value_and_grad(
            model, named_loss_fn, compute_dtype, keep, cast_inputs
        )
        function(*args, **kwargs)
    return DtypeReport(tuple(calls.layers), calls.first_wider())
