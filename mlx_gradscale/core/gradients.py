"""Differentiate a loss, starting from its scale instead of from 1.

MLX differentiates the loss times the scale, but never evaluates this product: the
functions here return the loss itself. ``value_and_grad`` returns the gradients
unscaled. ``scale_loss`` wraps a loss that a trainer differentiates. The wrapped
function differentiates itself and, in the trainer's backward pass, passes on unscaled
gradients. The scale never leaves the function.

Gradients are unscaled lazily: each refers to the scaled array it came from. If a step
receives the gradient unmodified, it reads the scaled array and, on a GPU, unscales it
inside the update kernel, so MLX never computes the float32 copy. After clipping,
accumulation or averaging, a step uses the gradient as is.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .forward import Alias, Casting, aliases, forward_pass, is_opaque, rebuild
from .fusion import each_use
from .masters import to_float32
from .notices import UpdateWatch, WarnOnce, check_dtypes, check_loss
from .trees import commit, is_floating, leaves, slots, tree_like


class LazyGradient(Alias):
    """An unscaled gradient that refers to the scaled one until it may have changed.

    Its source is the scaled gradient, and the reciprocal of the scale.
    """


class Backward:
    """Scale the backward passes of a scaler, whose state is ``state``.

    If the scaler is disabled, the scale is 1, and ``value_and_grad`` returns gradients
    in the dtypes of their parameters, as MLX does.
    """

    def __init__(self, state: dict[str, mx.array], is_enabled: bool):
        self._state = state if is_enabled else {"scale": mx.array(1.0)}
        self._is_enabled = is_enabled
        self._has_seen_loss = False
        self.is_dynamic = True
        self.warn_once = WarnOnce()

    def value_and_grad(
        self, model: nn.Module, loss_fn: Callable[..., Any], casting: Casting
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``, with casts and loss scaling."""
        is_checked = casting.compute_dtype is not None  # then, all inputs are cast
        watch = UpdateWatch()

        @wraps(loss_fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked
            if not is_checked:
                check_dtypes(model, args, self.warn_once)
                is_checked = True
            scale, own = self._state["scale"], model.trainable_parameters()
            parameters = cast = leaves(own)
            if casting.compute_dtype is not None:
                cast = leaves(casting.cast_parameters(model, own))

            # MLX traces the arguments too, as in nn.value_and_grad, but does not
            # differentiate by them. An inner gradient ends the tracing of the
            # parameters, and MLX differentiates a compiled function, such as nn.relu,
            # only if one of its inputs is traced.
            every = dict(enumerate((*args, *kwargs.values())))
            given = {i: x for i, x in every.items() if isinstance(x, mx.array)}

            def run(traced: list[mx.array], others: dict[int, mx.array]) -> Any:
                model.update(tree_like(own, aliases(traced, parameters)))
                values = [*(every | others).values()]
                named = zip(kwargs, values[len(args) :], strict=True)
                return loss_fn(*values[: len(args)], **dict(named))

            forward = forward_pass([model], parameters, casting)
            outputs, scaled = self._differentiate(run, cast, scale, forward, given)
            if self._is_enabled:
                watch.look(scale, parameters, self.warn_once)
                gradients = unscale(scaled, 1.0 / scale)
            else:
                pairs = zip(scaled, parameters, strict=True)
                gradients = [g.astype(x.dtype) for g, x in pairs]
            return outputs, tree_like(own, gradients)

        return value_and_grad_fn

    def scale_loss(
        self, loss_fn: Callable[..., Any], model: Any, casting: Casting
    ) -> Callable[..., Any]:
        """Wrap ``loss_fn`` to scale its backward pass and unscale the gradients.

        ``loss_fn`` receives its arrays behind ``stop_gradient``. Their gradients come
        from the vjp of an identity around the loss. Everything else keeps MLX's own
        gradient.
        """

        @wraps(loss_fn)
        def scaled_loss_fn(*args: Any, **kwargs: Any) -> Any:
            scale = self._state["scale"]
            flat = tree_flatten((model, args, kwargs), is_leaf=is_opaque)
            models = [x for _, x in flat if isinstance(x, nn.Module)]
            own = [x.trainable_parameters() for x in models]
            parameters = leaves(own)
            given = {id(x): x for x in (*parameters, *(x for _, x in flat))}
            traced = {i: x for i, x in given.items() if is_traced(x)}
            originals = list(traced.values())
            refuse = _refuse_derivatives_of(originals)

            def run(stopped: list[mx.array], _: Any) -> Any:
                stand_ins = dict(zip(traced, stopped, strict=True))

                def replace(x: Any) -> Any:
                    return stand_ins.get(id(x), x)

                for each, tree in zip(models, own, strict=True):
                    new = casting.cast_parameters(each, tree_map(replace, tree))
                    each.update(tree_like(tree, aliases(leaves(new), leaves(tree))))
                new_args, new_kwargs = rebuild((args, kwargs), replace)
                return loss_fn(*new_args, **new_kwargs)

            stopped = list(map(mx.stop_gradient, originals))
            forward = forward_pass(models, parameters, casting, refuse)
            outputs, scaled = self._differentiate(run, stopped, scale, forward, {})
            if not originals:
                return outputs
            loss = _with_gradients(loss_of(outputs), originals, scaled, scale)
            return _replace_loss(rebuild(outputs, refuse), loss)

        return scaled_loss_fn

    def scaled(self, output: mx.array) -> mx.array:
        """Multiply an output by the scale in float32."""
        if not self._has_seen_loss:
            self._check_loss(output, self._state["scale"])
        return to_float32(output) * self._state["scale"]

    def _differentiate(
        self,
        run: Callable[..., Any],
        arrays: list[mx.array],
        scale: mx.array,
        forward: AbstractContextManager[Callable[[], None]],
        others: dict[int, mx.array],
    ) -> tuple[Any, list[mx.array]]:
        """Return the outputs, with a float32 loss, and the scaled gradients.

        The gradients are those of ``arrays``. MLX traces ``others`` too.
        """
        outputs: list[Any] = []

        def loss_fn(arrays: list[mx.array], others: Any) -> mx.array:
            found = run(arrays, others)
            end_forward()
            loss = loss_of(found)
            if not self._has_seen_loss:
                self._check_loss(loss, scale)
            loss = loss.astype(mx.float32)
            outputs.append(_replace_loss(found, loss))
            return loss * scale

        gradients: list[mx.array] = []
        with forward as end_forward:
            if arrays:
                # Copies, because MLX replaces the arrays in them.
                _, gradients = mx.value_and_grad(loss_fn)([*arrays], dict(others))
            else:  # MLX cannot differentiate by nothing
                loss_fn([], others)
        return outputs.pop(), gradients

    def _check_loss(self, loss: mx.array, scale: mx.array) -> None:
        self._has_seen_loss = True  # so that the scale is read only once
        check_loss(loss, scale, self.is_dynamic, self.warn_once)


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError(
        "A loss function from scale_loss() has only first derivatives, in reverse "
        "mode, and only of its loss. If you add an array to the loss, such as one that "
        "a layer stores in the model, include it in the returned loss. Take inner "
        "gradients inside the function, and gradients inside mx.vmap, not outside. "
        "mx.checkpoint also stores parameters in the model; use "
        "mlx_gradscale.grad_checkpoint instead."
    )


def _no_gradient(function: Callable[..., Any]) -> Any:
    """Return a function of which no derivative can be taken."""
    custom = mx.custom_function(function)
    custom.vjp(_refuse)
    custom.jvp(_refuse)
    return custom


# An array that depends on others, though it is computed from nothing. If one of them is
# differentiated, so is what depends on the token.
_token = _no_gradient(lambda arrays: mx.array(0.0))
_token.vmap(lambda arrays, axes: (_token(arrays), None))
# The first array, as one that depends on the second, a token.
_value = _no_gradient(lambda x, token: x)
_value.vmap(lambda inputs, axes: (_value(*inputs), axes[0]))


def _refuse_derivatives_of(originals: list[mx.array]) -> Callable[[mx.array], mx.array]:
    """Return an identity that raises if its result is differentiated by one of these.

    Not if nobody differentiates, when there are no originals.
    """
    token = _token(originals)

    def refuse(x: mx.array) -> mx.array:
        value: mx.array = _value(x, token) if originals and is_floating(x) else x
        return value

    return refuse


def _with_gradients(
    loss: mx.array, originals: list[mx.array], scaled: list[mx.array], scale: mx.array
) -> mx.array:
    """Return the loss with these gradients, unscaled, for the originals."""

    def vjp(_: Any, cotangent: mx.array, __: Any) -> Any:
        unscaled = map(unscale_array, scaled, each_use(cotangent / scale))
        return cotangent, list(map(_refuse_derivatives_of(originals), unscaled))

    identity: Any = mx.custom_function(lambda loss, originals: loss)
    identity.vjp(vjp)
    identity.jvp(_refuse)
    # Without this rule, MLX would put the plain function in place of the identity: a
    # gradient taken outside mx.vmap would be zero instead of raising.
    identity.vmap(lambda xs, axes: (_value(xs[0], _token(xs[1])), axes[0]))
    outer: mx.array = identity(loss, originals)
    return outer


_asked = threading.local()


@mx.compile
def _ask(x: mx.array) -> mx.array:
    _asked.is_run = True
    return x


def is_traced(x: Any) -> bool:
    """Return whether a floating-point array is being differentiated or compiled.

    Evaluates nothing. A wrong answer is always True, which only costs memory.
    """
    if not isinstance(x, mx.array) or not is_floating(x):
        return False
    # MLX runs the Python code of a compiled function again for each tracer, and
    # otherwise only for the first array of a dtype.
    for _ in range(2 if x.size else 0):
        _asked.is_run = False
        _ask(x[(0,) * x.ndim])
        if not _asked.is_run:
            return False
    return True


def check_loss_fn(loss_fn: Any) -> None:
    """Raise if this is no function, such as the loss itself."""
    if not callable(loss_fn):
        raise TypeError(
            "Expected the loss function, which returns the loss, got "
            f"{type(loss_fn).__name__}. To scale a loss as in PyTorch, use "
            "GradScaler.scale()."
        )


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


def _replace_loss(outputs: Any, loss: mx.array) -> Any:
    """Return the output of a loss function with its loss replaced."""
    if hasattr(outputs, "_fields"):
        return type(outputs)(loss, *outputs[1:])
    return (loss, *outputs[1:]) if isinstance(outputs, tuple) else loss


def unscale(scaled: list[mx.array], inverse: mx.array) -> Sequence[mx.array]:
    """Lazily unscale gradients; lazy gradients stay unscaled."""
    gradients, sources = [], []
    for old, x in zip(scaled, _unscale_arrays(scaled, inverse), strict=True):
        known = old.source if isinstance(old, LazyGradient) else None
        gradients.append(x if known is None else old)
        # Another object, because the user may change the scaled gradient in place.
        sources.append(known or (old.astype(old.dtype), inverse))
    return aliases(gradients, sources, LazyGradient)


def unscale_in_place(gradients: Any, inverse: mx.array) -> Any:
    """Unscale and return a tree, in place unless it is an array or contains tuples."""
    unscaled = unscale(leaves(gradients), inverse)
    tree = [gradients]  # a container even for a single array
    places = slots(tree)
    if any(isinstance(box, tuple) for _, box, _ in places):
        return tree_like(gradients, unscaled)
    pairs = zip(places, unscaled, strict=True)
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
