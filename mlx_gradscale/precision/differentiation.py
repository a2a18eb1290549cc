"""Differentiate a model in a compute dtype: the true loss, and true gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..finite import is_floating
from ..islands import kept_in_float32
from ..masters import to_float32
from ..state_tree import leaves_of, slots, write_all, writing
from ..tracing import broadcasts


@mx.custom_function
def scale_gradient(value: mx.array, scale: mx.array) -> mx.array:
    """Return ``value``; its gradient is ``scale`` times as large."""
    return value


@scale_gradient.vjp
def _scale_gradient_vjp(
    primals: list[mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    _, scale = primals
    return cotangent * scale, mx.zeros_like(scale)


def true_gradient(gradient: mx.array, inverse_scale: mx.array) -> mx.array:
    """Return a scaled gradient unscaled in float32, with NaN where it is not finite.

    An inf would become the limit in somebody's elementwise clip and so be applied; a
    NaN stays one.
    """
    if not is_floating(gradient):
        return gradient
    gradient = to_float32(gradient) * inverse_scale
    # Bit for bit what it was if it is finite, -0.0 too; inf minus inf is NaN.
    return gradient - (gradient - gradient)


@mx.compile
def true_gradients(gradients: Any, inverse_scale: mx.array) -> Any:
    """Return the tree with every leaf as :func:`true_gradient` makes it."""
    inverse = broadcasts(inverse_scale)
    return tree_map(lambda g: true_gradient(g, inverse(g.shape)), gradients)


def with_loss(
    loss_fn: Callable[..., Any], change: Callable[[mx.array], mx.array]
) -> Callable[..., Any]:
    """Return ``loss_fn`` with its loss changed, and what comes with the loss as it is.

    Args:
        loss_fn (Callable): Returns a scalar loss, or a tuple that starts with it.
        change (Callable): Is given the loss at each call, and returns it.
    """

    @wraps(loss_fn)
    def changed_loss_fn(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_fn(*args, **kwargs)
        loss, *aux = outputs if isinstance(outputs, tuple) else (outputs,)
        if not isinstance(loss, mx.array):
            raise TypeError(
                f"The loss must be an array, got {loss!r}. Return the loss, or a "
                "tuple whose first element is the loss."
            )
        loss = change(loss)
        if hasattr(outputs, "_fields"):
            return type(outputs)(loss, *aux)
        return (loss, *aux) if isinstance(outputs, tuple) else loss

    return changed_loss_fn


def mark_scaled(loss_fn: Any) -> None:
    """Have :func:`refuse_scaled` know this function, whose gradient is scaled."""
    loss_fn.has_scaled_gradient = True


def refuse_scaled(loss_fn: Callable[..., Any]) -> None:
    """Raise if this is no loss function, or one whose gradient is scaled already."""
    if not callable(loss_fn):
        raise TypeError(
            f"Expected the function that computes the loss, got {loss_fn!r}. A loss "
            "that is computed already can only be scaled by scale() of a GradScaler."
        )
    if hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "The gradient of this loss function is scaled already. scale_loss() once "
            "is enough, and value_and_grad() does it by itself: give it the plain "
            "function."
        )


def with_scaled_gradient(
    loss_fn: Callable[..., Any],
    get_scale: Callable[[], mx.array],
    see_loss: Callable[[mx.array], mx.array] = lambda loss: loss,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: (
        function
    ),
) -> Callable[..., Any]:
    """Return ``loss_fn`` with the same value and a gradient that is scaled.

    Args:
        loss_fn (Callable): Returns a scalar loss, or a tuple that starts with it.
        get_scale (Callable): Returns the scale, at each call.
        see_loss (Callable): Is given each loss as it comes out of ``loss_fn``, and
            returns it.
        wrap (Callable): Is given ``loss_fn``, and returns it.
    """
    refuse_scaled(loss_fn)

    def scale(loss: mx.array) -> mx.array:
        # In float32 before the scale comes in: 65536 is inf in float16.
        scaled = scale_gradient(see_loss(loss).astype(mx.float32), get_scale())
        return cast(mx.array, scaled)

    scaled_loss_fn = with_loss(wrap(loss_fn), scale)
    mark_scaled(scaled_loss_fn)
    return scaled_loss_fn


@dataclass
class Passes:
    """What became of parameters whose gradients are to be unscaled on the way out.

    Attributes:
        unscaled (int): How many gradients came by. None, if something else was
            differentiated: another model, or parameters that the loss function took as
            an argument.
    """

    unscaled: int = 0


@contextmanager
def unscaled_gradients(
    model: nn.Module, inverse_scale: mx.array, passes: Passes
) -> Iterator[None]:
    """Have the gradients of the model's parameters unscaled, in float32.

    For as long as the loss is computed, in whoever's differentiation. The parameters
    are what they were afterwards.
    """

    @mx.custom_function
    def unscale_gradient(parameter: mx.array, inverse_scale: mx.array) -> mx.array:
        return parameter

    @unscale_gradient.vjp
    def unscale_gradient_vjp(
        primals: list[mx.array], cotangent: mx.array, _: mx.array
    ) -> tuple[mx.array, mx.array]:
        passes.unscaled += 1
        _, inverse_scale = primals
        return true_gradient(cotangent, inverse_scale), mx.zeros_like(inverse_scale)

    trained = ids_of_trained(model.trainable_parameters())
    own = [(box, key, x) for _, box, key, x in arrays_of(model) if id(x) in trained]
    changed = [(box, key, unscale_gradient(p, inverse_scale)) for box, key, p in own]
    put_back = writing(own)
    try:
        write_all(changed)
        yield
    finally:
        put_back()


# An array of a model: its path, its container, the key in that, and itself.
Found = tuple[tuple[Any, ...], Any, Any, mx.array]


def arrays_of(model: nn.Module) -> list[Found]:
    """Return where the arrays of a model are that can be written to."""
    return [
        (path, box, key, box[key])
        for path, box, key in slots(model)
        if not isinstance(box, tuple)
    ]


def ids_of_trained(parameters: Any) -> set[int]:
    """Return which arrays these are, without those that have no gradient."""
    return {id(x) for x in leaves_of(parameters) if is_floating(x)}


def arrays_among(arguments: Any) -> list[mx.array]:
    """Return the arrays among a call's arguments, without those of models."""
    leaves = tree_flatten(arguments, is_leaf=is_leaf)
    return [x for _, x in leaves if isinstance(x, mx.array)]


def models_among(arguments: Any) -> list[nn.Module]:
    """Return the models among a call's arguments, without those inside others."""
    leaves = tree_flatten(arguments, is_leaf=is_leaf)
    found = {id(x): x for _, x in leaves if isinstance(x, nn.Module)}
    inside = {
        id(module)
        for model in found.values()
        for module in model.modules()
        if module is not model
    }
    return [model for key, model in found.items() if key not in inside]


def value_and_grad(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
    cast_inputs: bool = True,
    *,
    look: Callable[[list[Found], set[int]], None] = lambda found, trained: None,
) -> Callable[..., Any]:
    """Like ``nn.value_and_grad``, with the forward and backward pass in another dtype.

    Floating trainable parameters and floating array arguments are cast inside the
    differentiated function, so gradients come back in the parameters' own dtype.
    The model has its own parameters again afterwards, also after an error.

    Args:
        model (nn.Module): The model; its parameters keep their dtype.
        loss_fn (Callable): As for ``nn.value_and_grad``.
        compute_dtype (Dtype, optional): ``mx.float16`` or ``mx.bfloat16``, or
            ``mx.float32`` for a model that is stored in half precision. Default: each
            parameter's own, and nothing is cast.
        keep (Callable, optional): Told the path and value of a parameter, returns
            True to leave it in its own dtype. The layer that it belongs to computes in
            float32 and casts what it returns to ``compute_dtype``.
        cast_inputs (bool): Whether to cast floating arguments of ``loss_fn`` as well,
            targets and masks among them. Default: ``True``.
        look (Callable): Is given :func:`arrays_of` the model before each pass, and
            which are trained.
    """
    _check_how(compute_dtype, keep, cast_inputs)

    def cast(x: Any) -> Any:
        floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        return x.astype(compute_dtype) if floating else x

    # What stands in the model's parameters' place while the loss is computed.
    put: list[mx.array] = []

    def differentiate(
        parameters: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A layer with kept parameters is a float32 island: it casts back.
        with kept_in_float32(model, compute_dtype, keep) as kept:

            def cast_parameter(path: str, parameter: mx.array) -> mx.array:
                return parameter if kept(path, parameter) else cast(parameter)

            def cast_loss_fn(parameters: Any, args: Any, kwargs: Any) -> Any:
                if compute_dtype is not None:
                    parameters = tree_map_with_path(cast_parameter, parameters)
                    if cast_inputs:
                        args, kwargs = tree_map(cast, (args, kwargs), is_leaf=is_leaf)
                else:
                    put.extend(leaves_of(parameters))
                model.update(parameters)
                return loss_fn(*args, **kwargs)

            return mx.value_and_grad(cast_loss_fn)(parameters, args, kwargs)

    @wraps(loss_fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        # Everything, because a forward pass may replace buffers as well:
        # BatchNorm's running statistics hold traced values if loss_fn fails.
        found = arrays_of(model)
        parameters = model.trainable_parameters()
        trained = ids_of_trained(parameters)
        look(found, trained)
        borrowed = [(box, key, x) for _, box, key, x in found]
        put_back = writing(borrowed)
        try:
            result = differentiate(parameters, args, kwargs)
            # What the forward pass itself wrote to a trainable array stays, as in MLX,
            # unless it was cast: then it cannot be told from what a checkpointed layer
            # puts there.
            ours = None if compute_dtype is not None else set(map(id, put))
            borrowed[:] = [
                (box, key, x)
                for box, key, x in borrowed
                if id(x) in trained and (ours is None or id(box[key]) in ours)
            ]
            return result
        finally:
            put_back()
            put.clear()

    return value_and_grad_fn


def _check_how(compute_dtype: Any, keep: Any, cast_inputs: bool) -> None:
    if compute_dtype is None and (keep is not None or not cast_inputs):
        raise ValueError(
            "keep= and cast_inputs= have no meaning without compute_dtype=."
        )
    if keep is not None and not callable(keep):
        raise TypeError(
            "keep must be a function of path and parameter, as lambda path, x: 'norm' "
            f"in path, got {keep!r}."
        )
    if compute_dtype is not None and (
        not isinstance(compute_dtype, mx.Dtype)
        or not mx.issubdtype(compute_dtype, mx.floating)
    ):
        raise ValueError(
            f"compute_dtype must be a floating dtype of MLX, as mx.float16, got "
            f"{compute_dtype!r}."
        )


def is_leaf(x: Any) -> bool:
    """Tell whether ``x``, among arguments, is not to be looked into."""
    # A model among the arguments is a dict to tree_map, which would rebuild it
    # as a plain one; so would any other subclass lose its class.
    return type(x) not in (dict, list, tuple) and not hasattr(x, "_fields")
