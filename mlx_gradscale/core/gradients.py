"""Differentiate a scaled loss and unscale the gradients lazily.

Each gradient that ``unscale`` returns refers to the scaled array it came from. If a
step receives the gradient unmodified, it reads the scaled array and, on a GPU, unscales
it inside the update kernel, so MLX never computes the float32 copy. After clipping,
accumulation or averaging, a step uses the gradient as is.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .forward import Casting, Entrance, is_opaque, preserve
from .fusion import each_use
from .masters import HALF, to_float32
from .notices import SKIPS_TO_WARN, WarnOnce
from .trees import Leaf, commit, flatten, is_floating, leaves, read, slots

# Methods that modify an array in place or expose its memory.
_CHANGES_IN_PLACE = (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__"),
    *("__irshift__", "__setitem__", "__dlpack__", "__buffer__"),
)


class LazyGradient(mx.array):
    """An unscaled gradient that refers to the scaled one until it may have changed."""

    # The scaled gradient and the reciprocal of the scale.
    source: tuple[mx.array, mx.array] | None = None


def _forget_source(name: str) -> Callable[..., Any]:
    method = getattr(mx.array, name)

    def forget_source(self: LazyGradient, *args: Any, **kwargs: Any) -> Any:
        self.source = None
        return method(self, *args, **kwargs)

    return forget_source


for _name in _CHANGES_IN_PLACE:
    # Before Python 3.12, a class cannot see that its buffer is exported, so a step
    # ignores what is written through a NumPy view.
    if hasattr(mx.array, _name):
        setattr(LazyGradient, _name, _forget_source(_name))


class Backward:
    """Scale losses for the backward pass and unscale the gradients."""

    def __init__(self, state: dict[str, mx.array]):
        self._state = state
        # Whether the last backward pass of scale_loss() since the last step unscaled a
        # gradient; None if there was no such pass.
        self._has_unscaled: bool | None = None
        # The container's id and the key of each parameter that any such pass unscales.
        self._places: set[Any] = set()
        self._has_derivative = False
        self._has_seen_loss = False
        self.warn_once = WarnOnce()

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
        updates, last_scale, last_weights = 0, None, 0
        entrance = Entrance(casting) if is_cast and casting.cast_inputs else None

        @wraps(loss_fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked, updates, last_scale, last_weights
            if not is_checked:
                self._warn_about_dtypes(model, args)
                is_checked = True
            scale = self._state["scale"] if is_enabled else mx.array(1.0)
            own = model.trainable_parameters()
            cast = casting.cast_parameters(model, own) if is_cast else own

            def scaled_loss(cast: Any, args: Any, kwargs: Any) -> tuple[mx.array, ...]:
                substitutes.extend(leaves(cast))
                model.update(cast)
                outputs = loss_fn(*args, **kwargs)
                if entrance is not None:
                    entrance.is_backward = True
                loss = loss_of(outputs)
                return loss.astype(mx.float32) * scale, loss, outputs

            with (
                preserve([model], own, is_cast) as (places, substitutes),
                nullcontext() if entrance is None else entrance.open(model),
            ):
                scaled = mx.value_and_grad(scaled_loss)(cast, args, kwargs)
            (_, loss, outputs), gradients = scaled
            if is_cast and loss.dtype != mx.float32:
                outputs = replace_loss(outputs, loss.astype(mx.float32))
            if not is_enabled:
                return outputs, tree_map(lambda g, x: g.astype(x.dtype), gradients, own)
            self._warn_about_loss(loss)
            self._places.update(places)
            # Count updates that bypass the scaler: the weights are new arrays, but the
            # scale is still the same one. A step replaces it, even by the same value.
            weights = id(next(iter(places.values()))[2]) if places else 0
            is_changed = weights != last_weights
            updates = updates + is_changed if scale is last_scale else 0
            last_scale, last_weights = scale, weights
            if updates == SKIPS_TO_WARN:
                self._warn_about_updates()
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
            scale = self._state["scale"]
            given = tree_flatten((model, args, kwargs), is_leaf=is_opaque)
            models = [x for _, x in given if isinstance(x, nn.Module)]
            parameters = [x.trainable_parameters() for x in models]

            def unscale_gradient(cotangent: mx.array, inverse: mx.array) -> Any:
                self._has_unscaled = True
                return _unscale_and_scale_next(cotangent, inverse)

            def scale_gradient(cotangent: mx.array, scale: mx.array) -> mx.array:
                self._has_unscaled = False
                self._places.update(places)
                return cotangent * scale

            wrap = partial(_with_gradient, 1.0 / scale, unscale_gradient)
            args, kwargs = tree_map(wrap, (args, kwargs), is_leaf=is_opaque)
            with preserve(models, parameters) as (places, substitutes):
                own = [(box, key, wrap(x)) for box, key, x in places.values()]
                substitutes.extend(x for _, _, x in own)
                commit(own)
                outputs = loss_fn(*args, **kwargs)
            loss = loss_of(outputs)
            self._warn_about_loss(loss)
            outputs = replace_loss(outputs, loss.astype(mx.float32))
            # Scale the other outputs too, in case the caller adds them to the loss.
            scale_output = partial(_with_gradient, scale, scale_gradient)
            return tree_map(scale_output, outputs, is_leaf=is_opaque)

        scaled_loss_fn.has_scaled_gradient = True  # type: ignore[attr-defined]
        return scaled_loss_fn

    def check_unscaled(self, leaves: list[Leaf]) -> None:
        """Raise if ``scale_loss()`` left a gradient of this step scaled.

        A parameter that it did not find has a scaled gradient, or zero if the loss does
        not depend on it. Inside ``mx.compile``, no value can be read, and either is an
        error: passing the whole model is always right.
        """
        has_unscaled, self._has_unscaled = self._has_unscaled, None
        places, self._places = self._places, set()
        if has_unscaled is None:
            return  # scale_loss() was not differentiated since the last step
        floating = [leaf for leaf in leaves if is_floating(leaf.gradient)]
        missed = [x for x in floating if (id(x.container), x.key) not in places]
        if has_unscaled and len(missed) == len(floating):
            return  # a parameter tree, or a model with gradients from elsewhere
        # If nothing was unscaled at all, no place is a proof.
        for leaf in missed if has_unscaled else floating:
            is_lazy = isinstance(leaf.gradient, LazyGradient)
            if not is_lazy and read(mx.any(leaf.gradient)) is not False:
                raise RuntimeError(
                    f"The gradient of {leaf.path!r} is still scaled, because "
                    "scale_loss() did not find this parameter. Pass the whole model, "
                    "scale_loss(loss_fn, model), or pass the parameters to the loss "
                    "function as an argument."
                )

    def scaled(self, output: mx.array) -> Any:
        """Multiply an output by the scale, and record whether it is differentiated."""
        self._warn_about_loss(output)

        def note(cotangent: mx.array, _: mx.array) -> mx.array:
            self._has_derivative = True
            return cotangent

        scaled = to_float32(output) * self._state["scale"]
        return _with_gradient(mx.array(1.0), note, scaled)

    def inverse_scale(self) -> mx.array:
        """Return 1 / scale; warn if no result of ``scale()`` was differentiated."""
        if not self._has_derivative:
            self.warn_once(
                "not differentiated",
                "scale() was called, but its result was never differentiated, so these "
                "gradients were not scaled, and unscaling makes them too small. Call "
                "scale() in the differentiated function, or use value_and_grad().",
            )
        return 1.0 / self._state["scale"]

    def _warn_about_loss(self, loss: mx.array) -> None:
        if self._has_seen_loss:
            return
        self._has_seen_loss = True  # so that the scale is read only once
        scale = read(self._state["scale"]) if loss.dtype == mx.float16 else 0.0
        if scale is None or scale > 65504:
            self.warn_once(
                "float16 loss",
                "The loss is float16, so the backward pass overflows and steps are "
                "skipped while the scale is above 65504. Compute the loss in float32, "
                "for example from logits.astype(mx.float32).",
            )

    def _warn_about_updates(self) -> None:
        self.warn_once(
            "no step",
            f"The weights changed {SKIPS_TO_WARN} times without a step of this scaler, "
            "so a gradient that overflows writes NaN into them. Instead of update() of "
            "the optimizer itself, call step() and update() of the GradScaler, or "
            "update() of a LossScaleOptimizer.",
        )

    def _warn_about_dtypes(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        half = [
            path.rpartition(".")[0]
            for path, x in flatten(model)
            if path.endswith("running_var") and isinstance(x, mx.array)
            if x.dtype == mx.float16
        ]
        if half:
            self.warn_once(
                "float16 statistics",
                f"{type(model).__name__} has BatchNorm layers with float16 running "
                "statistics, where a variance above 65504 is inf. To compute them in "
                f"float32, call mlx_gradscale.float32_layers(model, {half}).",
            )
        given = next((x for x in args if isinstance(x, mx.array)), None)
        if given is None or given.dtype != mx.float32:
            return
        floating = [x for x in leaves(model.parameters()) if is_floating(x)]
        if floating and all(x.dtype in HALF for x in floating):
            dtype = str(floating[0].dtype).removeprefix("mlx.core.")
            self.warn_once(
                "float32 inputs",
                f"{type(model).__name__} has {dtype} parameters, but the first array "
                "argument is float32, so MLX may compute in float32. Cast the inputs, "
                f"or pass compute_dtype=mx.{dtype}. To see the dtype of each layer, "
                "call mlx_gradscale.diagnostics.compute_dtypes().",
            )


def _with_gradient(
    factor: mx.array, gradient: Callable[[mx.array, mx.array], mx.array], x: Any
) -> Any:
    """Return a floating array with ``gradient(cotangent, factor)`` as its gradient."""
    if not isinstance(x, mx.array) or not is_floating(x):
        return x
    identity = mx.custom_function(lambda x, factor: x)
    zero = mx.zeros_like(factor)
    identity.vjp(lambda primals, cotangent, _: (gradient(cotangent, primals[1]), zero))
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
    # next() gets the old leaf as its default and never returns it.
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
# An unscaled gradient is an output like the loss: what differentiates it is scaled in
# turn, by inverse * scale, until it reaches an array that unscales its gradient.
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


def refuse_scaled(loss_fn: Any) -> None:
    """Raise if a loss function was returned by ``scale_loss()``."""
    if hasattr(loss_fn, "has_scaled_gradient"):
        raise TypeError(
            "This loss function was returned by scale_loss() and would be scaled "
            "twice. Pass the original function."
        )
