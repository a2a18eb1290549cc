"""Differentiate a model in a compute dtype, with the true loss and scaled gradients."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map, tree_map_with_path


@mx.custom_function
def scale_gradient(value: mx.array, scale: mx.array) -> mx.array:
    """Return ``value``; its gradient is ``scale`` times as large."""
    return value


@scale_gradient.vjp
def _scale_gradient_vjp(primals, cotangent, _):
    _, scale = primals
    return cotangent * scale, mx.zeros_like(scale)


def with_scaled_gradient(
    loss_fn: Callable,
    get_scale: Callable[[], mx.array],
    see_loss: Callable[[mx.array], mx.array] = lambda loss: loss,
) -> Callable:
    """Wrap ``loss_fn`` so that its value stays and its gradient is scaled.

    Args:
        loss_fn (Callable): Returns a scalar loss, or a tuple that starts with it.
        get_scale (Callable): Returns the scale, at each call.
        see_loss (Callable): Is given each loss as it comes out of ``loss_fn``, and
            returns it.
    """
    if hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "The gradient of this loss function is scaled already. scale_loss() once "
            "is enough, and value_and_grad() of a scaler does it by itself: give it "
            "the plain function."
        )

    @wraps(loss_fn)
    def scaled_loss_fn(*args, **kwargs):
        outputs = loss_fn(*args, **kwargs)
        loss, *aux = outputs if isinstance(outputs, tuple) else (outputs,)
        if not isinstance(loss, mx.array):
            raise TypeError(
                f"The loss must be an array, got {loss!r}. Return the loss, or a "
                "tuple whose first element is the loss."
            )
        # In float32 before the scale comes in: 65536 is inf in float16.
        loss = scale_gradient(see_loss(loss).astype(mx.float32), get_scale())
        if hasattr(outputs, "_fields"):
            return type(outputs)(loss, *aux)
        return (loss, *aux) if isinstance(outputs, tuple) else loss

    scaled_loss_fn.has_scaled_gradient = True
    return scaled_loss_fn


def value_and_grad(
    model: nn.Module,
    loss_fn: Callable,
    compute_dtype: mx.Dtype,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
) -> Callable:
    """Like ``nn.value_and_grad``, with the forward and backward pass in another dtype.

    Floating trainable parameters and floating array arguments are cast inside the
    differentiated function, so gradients come back in the parameters' own dtype.
    The model has its own parameters again afterwards, also after an error.

    Args:
        model (nn.Module): The model; its parameters keep their dtype.
        loss_fn (Callable): As for ``nn.value_and_grad``.
        compute_dtype (Dtype): ``mx.float16`` or ``mx.bfloat16``, or ``mx.float32``
            for a model that is stored in half precision.
        keep (Callable, optional): Told the path and value of a parameter, returns
            True to leave it in its own dtype.
        cast_inputs (bool): Whether to cast floating arguments of ``loss_fn`` as well,
            targets and masks among them. Default: ``True``.
    """
    if keep is not None and not callable(keep):
        raise TypeError(
            "keep must be a function of path and parameter, as lambda path, x: 'norm' "
            f"in path, got {keep!r}."
        )
    known = isinstance(compute_dtype, mx.Dtype)
    if not known or not mx.issubdtype(compute_dtype, mx.floating):
        raise ValueError(
            f"compute_dtype must be a floating dtype of MLX, as mx.float16, got "
            f"{compute_dtype!r}."
        )

    def cast(x: Any) -> Any:
        floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        return x.astype(compute_dtype) if floating else x

    def cast_parameter(path: str, parameter: mx.array) -> mx.array:
        return parameter if keep and keep(path, parameter) else cast(parameter)

    def cast_loss_fn(parameters, args, kwargs):
        model.update(tree_map_with_path(cast_parameter, parameters))
        if cast_inputs:
            args, kwargs = tree_map(cast, (args, kwargs), is_leaf=is_leaf)
        return loss_fn(*args, **kwargs)

    differentiate = mx.value_and_grad(cast_loss_fn)

    @wraps(loss_fn)
    def value_and_grad_fn(*args, **kwargs):
        # Everything, because a forward pass may replace buffers as well:
        # BatchNorm's running statistics hold traced values if loss_fn fails.
        everything = tree_map(lambda x: x, model.parameters())
        parameters = model.trainable_parameters()
        try:
            result = differentiate(parameters, args, kwargs)
        except BaseException:
            model.update(everything)
            raise
        model.update(parameters)
        return result

    return value_and_grad_fn


def is_leaf(x: Any) -> bool:
    """Tell whether ``x``, among arguments, is not to be looked into."""
    # A model among the arguments is a dict to tree_map, which would rebuild it
    # as a plain one; so would any other subclass lose its class.
    return type(x) not in (dict, list, tuple) and not hasattr(x, "_fields")
