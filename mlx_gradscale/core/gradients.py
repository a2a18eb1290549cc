"""Differentiate a scaled loss and unscale the gradients lazily.

Each gradient that ``unscale`` returns refers to the scaled array it came from. If a
step receives the gradient unmodified, it reads the scaled array and, on a GPU, unscales
it inside the update kernel, so MLX never computes the float32 copy. After clipping,
accumulation or averaging, a step uses the gradient as is.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .forward import (
    Casting,
    Derived,
    Entrance,
    Substitution,
    forget_source,
    is_opaque,
    preserve,
)
from .fusion import each_use
from .intercept import watch as watch_calls
from .masters import to_float32
from .notices import UpdateWatch, WarnOnce, check_dtypes, check_loss
from .passes import Call, Passes
from .trees import Leaf, commit, is_floating, leaves, slots


class LazyGradient(Derived):
    """An unscaled gradient that refers to the scaled one until it may have changed."""

    # The scaled gradient and the reciprocal of the scale.
    source: tuple[mx.array, mx.array] | None = None


# What exposes the memory of an array may change it. Before Python 3.12, a class cannot
# see that its buffer is exported, so a step ignores writes through a NumPy view.
for _method in ("__dlpack__", "__buffer__"):
    if hasattr(mx.array, _method):
        forget_source(LazyGradient, _method)


class Backward:
    """Scale losses for the backward pass and unscale the gradients."""

    def __init__(self, state: dict[str, mx.array]):
        self._state = state
        self._has_derivative = False
        self._has_seen_loss = False
        self.is_dynamic = True
        self.warn_once = WarnOnce()
        self.passes = Passes()

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        casting: Casting,
        is_enabled: bool,
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``, with casts and, if enabled, with loss scaling."""
        is_cast = casting.compute_dtype is not None
        is_checked = is_cast or not is_enabled
        watch = UpdateWatch()
        is_input_cast = is_cast and casting.cast_inputs

        @wraps(loss_fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked
            if not is_checked:
                check_dtypes(model, args, self.warn_once)
                is_checked = True
            scale = self._state["scale"] if is_enabled else mx.array(1.0)
            own = model.trainable_parameters()
            cast = casting.cast_parameters(model, own) if is_cast else own
            entrance = Entrance(casting)
            modules = model.modules() if is_input_cast else []

            def scaled_loss(cast: Any, args: Any, kwargs: Any) -> tuple[mx.array, ...]:
                substitutes.extend(leaves(cast))
                model.update(cast)
                outputs = loss_fn(*args, **kwargs)
                entrance.is_backward = True
                loss = loss_of(outputs)
                return loss.astype(mx.float32) * scale, loss, outputs

            with (
                preserve([model], own, is_cast) as (places, substitutes),
                watch_calls([(module, entrance) for module in modules]),
                casting.announce(),
            ):
                scaled = mx.value_and_grad(scaled_loss)(cast, args, kwargs)
            (_, loss, outputs), gradients = scaled
            if is_cast and loss.dtype != mx.float32:
                outputs = replace_loss(outputs, loss.astype(mx.float32))
            if not is_enabled:
                return outputs, tree_map(lambda g, x: g.astype(x.dtype), gradients, own)
            if not self._has_seen_loss:
                self._check_loss(loss)
            self.passes.places.update(places)
            self.passes.has_scaled_earlier = False
            weight_id = id(next(iter(places.values()))[2]) if places else 0
            watch.look(scale, weight_id, self.warn_once)
            return outputs, unscale(gradients, 1.0 / scale)

        return value_and_grad_fn

    def scale_loss(
        self, loss_fn: Callable[..., Any], model: nn.Module | None
    ) -> Callable[..., Any]:
        """Wrap ``loss_fn`` to scale its backward pass and unscale the gradients.

        Every array that enters unscales its own gradient: the arguments, and the
        trainable parameters of ``model`` and of the models among the arguments.
        """

        @wraps(loss_fn)
        def scaled_loss_fn(*args: Any, **kwargs: Any) -> Any:
            scale, call = self._state["scale"], Call(self.passes)
            objects = tree_flatten((model, args, kwargs), is_leaf=is_opaque)
            models = [x for _, x in objects if isinstance(x, nn.Module)]
            parameters = [x.trainable_parameters() for x in models]

            def scale_gradient(cotangent: mx.array, scale: mx.array) -> mx.array:
                call.note_scaling()
                return cotangent * scale

            def unscale_gradient(cotangent: mx.array, inverse: mx.array) -> Any:
                call.note_unscaling()
                return _unscale_and_scale_next(cotangent, inverse)

            def unscale_argument(cotangent: mx.array, inverse: mx.array) -> Any:
                call.note_argument()
                return _unscale_and_scale_next(cotangent, inverse)

            wrap = partial(_with_gradient, 1.0 / scale)
            with (
                Substitution((args, kwargs), partial(wrap, unscale_argument)) as both,
                preserve(models, parameters) as (places, substitutes),
            ):
                call.places = frozenset(places)
                wrap_own = partial(wrap, unscale_gradient)
                own = [(box, key, wrap_own(x)) for box, key, x in places.values()]
                substitutes.extend(x for _, _, x in own)
                commit(own)
                args, kwargs = both
                outputs = loss_fn(*args, **kwargs)
            loss = loss_of(outputs)
            if not self._has_seen_loss:
                self._check_loss(loss)
            outputs = replace_loss(outputs, loss.astype(mx.float32))
            # Scale the other outputs too, in case the caller adds them to the loss.
            scale_output = partial(_with_gradient, scale, scale_gradient)
            return Substitution(outputs, scale_output).replace()

        scaled_loss_fn.has_scaled_gradient = True  # type: ignore[attr-defined]
        return scaled_loss_fn

    def check_unscaled(self, stepped: list[Leaf], is_model: bool) -> None:
        """Raise if ``scale_loss()`` may have left a gradient of this step scaled."""
        if self.passes.n_calls or self.passes.has_scaled_earlier:
            # Lazy gradients come from value_and_grad().
            others = [x for x in stepped if not isinstance(x.gradient, LazyGradient)]
            self.passes.check(others, is_model)

    def scaled(self, output: mx.array) -> Any:
        """Multiply an output by the scale, and record whether it is differentiated."""
        if not self._has_seen_loss:
            self._check_loss(output)

        def note(cotangent: mx.array, _: mx.array) -> mx.array:
            self._has_derivative = True
            return cotangent

        scaled = to_float32(output) * self._state["scale"]
        return _with_gradient(mx.array(1.0), note, scaled)  # the factor is not used

    def inverse_scale(self) -> mx.array:
        """Return 1 / scale; warn if no result of ``scale()`` was differentiated."""
        if not self._has_derivative:
            self.warn_once("not differentiated")
        return 1.0 / self._state["scale"]

    def _check_loss(self, loss: mx.array) -> None:
        self._has_seen_loss = True  # so that the scale is read only once
        check_loss(loss, self._state["scale"], self.is_dynamic, self.warn_once)


def _with_gradient(
    factor: mx.array, vjp: Callable[[mx.array, mx.array], mx.array], x: Any
) -> Any:
    """Return a floating array with ``vjp(cotangent, factor)`` as its gradient."""
    if not isinstance(x, mx.array) or not is_floating(x):
        return x
    # The factor is an input, because MLX does not trace what a vjp captures.
    identity = mx.custom_function(lambda x, factor: x)
    zero = mx.zeros_like(factor)
    identity.vjp(lambda primals, cotangent, _: (vjp(cotangent, primals[1]), zero))
    return identity(x, factor)


def unscale(gradients: Any, inverse: mx.array) -> Any:
    """Lazily unscale a tree of scaled gradients; lazy gradients stay unscaled."""
    arrays, unscaled = leaves(gradients), []
    for scaled, x in zip(arrays, _unscale_arrays(arrays, inverse), strict=True):
        known = scaled.source if isinstance(scaled, LazyGradient) else None
        gradient = LazyGradient(x if known is None else scaled)
        # An alias, because the user may change the scaled gradient in place.
        gradient.source = known or (scaled.astype(scaled.dtype), inverse)
        unscaled.append(gradient)
    # tree_map calls next() with the old leaf, its default, which it never returns.
    return tree_map(partial(next, iter(unscaled)), gradients)


def unscale_in_place(gradients: Any, inverse: mx.array) -> Any:
    """Unscale and return a tree, in place unless it is an array or contains tuples."""
    tree = [gradients]  # a container even for a single array
    places, unscaled = slots(tree), unscale(tree, inverse)
    if any(isinstance(box, tuple) for _, box, _ in places):
        return unscaled[0]
    pairs = zip(places, leaves(unscaled), strict=True)
    commit((box, key, x) for (_, box, key), x in pairs)
    return tree[0]


# Over a list: mx.compile does not tell a tree of lists from one of tuples.
@mx.compile
def _unscale_arrays(scaled: list[mx.array], inverse: mx.array) -> list[mx.array]:
    return list(map(unscale_array, scaled, each_use(inverse)))


def unscale_array(scaled: mx.array, inverse: mx.array) -> mx.array:
    """Unscale a floating-point gradient in float32, replacing inf with NaN.

    Elementwise clipping would turn inf into a finite value, and the step would be
    applied. NaN survives clipping, accumulation and averaging.
    """
    if not is_floating(scaled):
        return scaled
    unscaled = to_float32(scaled) * inverse
    # Bit-identical for finite values, including -0.0; inf minus inf is NaN.
    return unscaled - (unscaled - unscaled)


_unscale_and_scale_next: Any = mx.custom_function(unscale_array)
# For second derivatives. An unscaled gradient is an output like the loss, so its
# cotangent enters the scaled graph multiplied by the scale: (cotangent * inverse) *
# scale is the cotangent itself. The arrays that it reaches unscale their gradients.
_unscale_and_scale_next.vjp(lambda primals, cotangent, _: (cotangent, 0 * primals[1]))


def loss_of(outputs: Any) -> mx.array:
    """Return the loss in the output of a loss function, or raise if it is invalid."""
    loss = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
    if not isinstance(loss, mx.array):
        raise TypeError(
            "The loss function must return an mx.array, or a tuple that starts with "
            f"one; got {loss!r}."
        )
    if loss.ndim:
        raise ValueError(
            f"The loss must be a scalar, got an array of shape {loss.shape}. Reduce "
            "it, for example with loss.mean()."
        )
    return loss


def replace_loss(outputs: Any, loss: mx.array) -> Any:
    """Return the output of a loss function with its loss replaced."""
    if hasattr(outputs, "_fields"):
        return type(outputs)(loss, *outputs[1:])
    return (loss, *outputs[1:]) if isinstance(outputs, tuple) else loss


def check_loss_fn(loss_fn: Any) -> None:
    """Raise if this is not a loss function, or if ``scale_loss()`` returned it."""
    if not callable(loss_fn):
        raise TypeError(
            "Expected the loss function, which returns the loss, got "
            f"{type(loss_fn).__name__}. To scale a loss as in PyTorch, use "
            "GradScaler.scale()."
        )
    if hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "This loss function was returned by scale_loss() and would be scaled "
            "twice. Pass the original function."
        )
