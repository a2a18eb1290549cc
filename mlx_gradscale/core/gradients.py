"""Differentiate a scaled loss and unscale the gradients lazily.

Each gradient that ``unscale`` returns refers to the scaled array it came from. If a
step receives the gradient unmodified, it reads the scaled array and, on a GPU, unscales
it inside the update kernel, so MLX never computes the float32 copy. After clipping,
accumulation or averaging, a step uses the gradient as is.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from .finite import all_finite
from .fusion import each_use
from .masters import HALF, to_float32
from .notices import warn_user
from .trees import Writes, commit, flatten, is_floating, leaves, slots


class Casting(NamedTuple):
    """The casts that ``value_and_grad`` applies for the forward pass."""

    compute_dtype: mx.Dtype | None = None
    keep: Callable[[str, mx.array], bool] | None = None
    cast_inputs: bool = True

    def check(self) -> None:
        """Raise if ``compute_dtype`` is invalid, or is missing where it is required."""
        dtype = self.compute_dtype
        if dtype is None and (self.keep is not None or not self.cast_inputs):
            raise ValueError("keep= and cast_inputs=False require compute_dtype=.")
        is_dtype = isinstance(dtype, mx.Dtype) and mx.issubdtype(dtype, mx.floating)
        if dtype is not None and not is_dtype:
            raise ValueError(f"compute_dtype must be a float mx.Dtype, got {dtype!r}.")

    def parameters(self, model: nn.Module, parameters: Any) -> Any:
        """Return the trainable parameters in the dtypes of the forward pass."""
        if self.compute_dtype is None:
            return parameters
        # float32_layers() marks the layers that compute in float32.
        float32 = tuple(
            f"{path}." if path else ""
            for path, module in model.named_modules()
            if getattr(module, "computes_in_float32", False)
        )

        def cast_parameter(path: str, x: mx.array) -> Any:
            is_kept = self.keep is not None and self.keep(path, x)
            return x if is_kept or path.startswith(float32) else self._cast(x)

        return tree_map_with_path(cast_parameter, parameters)

    def inputs(self, inputs: Any) -> Any:
        """Return the loss function's arguments in the dtypes of the forward pass."""
        if self.compute_dtype is None or not self.cast_inputs:
            return inputs
        return tree_map(self._cast, inputs, is_leaf=is_opaque)

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating)
        return x.astype(self.compute_dtype) if floating else x


class LazyGradient(mx.array):
    """An unscaled gradient that refers to the scaled one until modified in place."""

    # The scaled gradient and the reciprocal of the scale.
    source: tuple[mx.array, mx.array] | None = None


def _forget_source(name: str) -> Callable[..., Any]:
    change = getattr(mx.array, name)

    def change_in_place(self: LazyGradient, *args: Any) -> Any:
        self.source = None
        return change(self, *args)

    return change_in_place


for _name in dir(mx.array):
    # In-place operators such as __imul__, and __setitem__.
    is_in_place = _name.startswith("__i") and hasattr(mx.array, f"__{_name[3:]}")
    if is_in_place or _name == "__setitem__":
        setattr(LazyGradient, _name, _forget_source(_name))


class Backward:
    """Scale losses for the backward pass and unscale the gradients."""

    def __init__(self, state: dict[str, mx.array]):
        self._state = state
        # Tokens of the gradients that the last backward pass of scale_loss() unscaled.
        self._last_unscaled: set[object] | None = None
        self._has_derivative = False
        self._warned: set[str] = set()

    def warn_once(self, message: str) -> None:
        """Warn at the user's line, once per scaler and message."""
        if message not in self._warned:
            self._warned.add(message)
            warn_user(message)

    def value_and_grad(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        casting: Casting,
        is_enabled: bool,
    ) -> Callable[..., Any]:
        """Like ``nn.value_and_grad``, with casts and, if enabled, with loss scaling."""
        is_checked = casting.compute_dtype is not None or not is_enabled

        @wraps(loss_fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_checked
            if not is_checked:
                self._warn_about_dtypes(model, args)
                is_checked = True
            scale = self._state["scale"] if is_enabled else None
            outputs, grads = differentiate(model, loss_fn, args, kwargs, casting, scale)
            loss = loss_of(outputs)
            if casting.compute_dtype is not None and loss.dtype != mx.float32:
                outputs = with_loss(outputs, loss.astype(mx.float32))
            if scale is None:
                own = model.trainable_parameters()
                return outputs, tree_map(lambda g, p: g.astype(p.dtype), grads, own)
            self._check_loss_dtype(loss)
            return outputs, unscale(grads, 1.0 / scale)

        return value_and_grad_fn

    def scale_loss(
        self, loss_fn: Callable[..., Any], model: nn.Module | None
    ) -> Callable[..., Any]:
        """Wrap ``loss_fn`` to scale its backward pass and unscale the gradients."""

        @wraps(loss_fn)
        def scaled_loss_fn(*args: Any, **kwargs: Any) -> Any:
            scale = self._state["scale"]
            # A token for each gradient that the backward pass has unscaled.
            unscaled: set[object] = set()

            def scale_gradient(cotangent: mx.array, scale: mx.array) -> mx.array:
                self._last_unscaled = unscaled
                return cotangent * scale

            given = (args, kwargs) if model is None else model
            found = [x for _, x in tree_flatten(given, is_leaf=is_opaque)]
            models = [x for x in found if isinstance(x, nn.Module)]
            places = [place for each in models for place in writable_arrays(each)]
            trained = set(map(id, leaves([x.trainable_parameters() for x in models])))
            wrap = partial(_with_unscaled_gradient, 1.0 / scale, unscaled)
            if not models and args:
                args = (tree_map(wrap, args[0], is_leaf=is_opaque), *args[1:])
            own = [(box, key, wrap(x)) for box, key, x in places if id(x) in trained]
            try:
                commit(own)
                outputs = loss_fn(*args, **kwargs)
            except BaseException:
                commit(places)
                raise
            clean_up(places, trained, [x for _, _, x in own])
            loss = loss_of(outputs)
            self._check_loss_dtype(loss)
            scaled = _with_gradient(loss.astype(mx.float32), scale, scale_gradient)
            return with_loss(outputs, scaled)

        scaled_loss_fn.has_scaled_gradient = True  # type: ignore[attr-defined]
        return scaled_loss_fn

    def check_unscaled(self) -> None:
        """Raise if the last backward pass of ``scale_loss()`` unscaled no gradients."""
        unscaled, self._last_unscaled = self._last_unscaled, None
        if unscaled is not None and not unscaled:
            raise RuntimeError(
                "These gradients are still scaled, because scale_loss() did not find "
                "the differentiated parameters. Pass their model, scale_loss(loss_fn, "
                "model), or make them the first argument of the loss function."
            )

    def scaled(self, output: mx.array) -> Any:
        """Multiply an output by the scale, and record whether it is differentiated."""
        self._check_loss_dtype(output)

        def note(cotangent: mx.array, _: mx.array) -> mx.array:
            self._has_derivative = True
            return cotangent

        scaled = to_float32(output) * self._state["scale"]
        return _with_gradient(scaled, mx.array(1.0), note)

    def inverse_scale(self) -> mx.array:
        """Return 1 / scale; warn if no result of ``scale()`` was differentiated."""
        if not self._has_derivative:
            self.warn_once(
                "scale() was called, but its result was never differentiated, so these "
                "gradients were not scaled, and unscaling makes them too small. Call "
                "scale() in the differentiated function, or use value_and_grad()."
            )
        return 1.0 / self._state["scale"]

    def _check_loss_dtype(self, loss: mx.array) -> None:
        if loss.dtype == mx.float16:
            self.warn_once(
                "The loss is float16, so the backward pass overflows and steps are "
                "skipped while the scale is above 65504. Compute the loss in float32, "
                "for example from logits.astype(mx.float32)."
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
                f"{type(model).__name__} has BatchNorm layers with float16 running "
                "statistics, where a variance above 65504 is inf. To compute them in "
                f"float32, call mlx_gradscale.float32_layers(model, {half})."
            )
        given = next((x for x in args if isinstance(x, mx.array)), None)
        if given is None or given.dtype != mx.float32:
            return
        floating = [x for x in leaves(model.parameters()) if is_floating(x)]
        if floating and all(x.dtype in HALF for x in floating):
            self.warn_once(
                f"{type(model).__name__} has {floating[0].dtype} parameters, but the "
                "first array argument is float32, so MLX may compute in float32. Cast "
                "the inputs, or pass compute_dtype=. To see the dtype of each layer, "
                "call mlx_gradscale.diagnostics.compute_dtypes()."
            )


def differentiate(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casting: Casting,
    scale: mx.array | None,
) -> tuple[Any, Any]:
    """Return the output of the loss function and the gradients of the scaled loss.

    The gradients are with respect to the *cast* parameters and have their dtypes.
    If ``scale`` is None, the loss is not scaled.
    """
    places = writable_arrays(model)
    parameters = model.trainable_parameters()
    trained = set(map(id, leaves(parameters)))
    # The arrays that replace the parameters while the loss is computed.
    substitutes: list[mx.array] = []

    def scaled_loss(parameters: Any, args: Any, kwargs: Any) -> tuple[mx.array, Any]:
        substitutes.extend(leaves(parameters))
        model.update(parameters)
        outputs = loss_fn(*args, **kwargs)
        loss = loss_of(outputs).astype(mx.float32)
        return loss if scale is None else loss * scale, outputs

    args, kwargs = casting.inputs((args, kwargs))
    try:
        (_, outputs), gradients = mx.value_and_grad(scaled_loss)(
            casting.parameters(model, parameters), args, kwargs
        )
    except BaseException:
        commit(places)
        raise
    is_cast = casting.compute_dtype is not None
    clean_up(places, trained, None if is_cast else substitutes)
    return outputs, gradients


def clean_up(
    places: Writes, trained: set[int], substitutes: list[mx.array] | None
) -> None:
    """After a forward pass, restore parameters, and buffers that became non-finite.

    ``places`` contains the model's arrays before the forward pass, and ``substitutes``
    those that replaced its parameters. If the forward pass itself assigned an array to
    a parameter, the array stays, unless ``substitutes`` is None. Non-finite buffers are
    restored because BatchNorm's running statistics would otherwise stay inf or NaN.
    """
    ids = None if substitutes is None else set(map(id, substitutes))
    writes: Writes = []
    for box, key, old in places:
        new: Any = box.get(key) if isinstance(box, dict) else box[key]
        if id(old) in trained:
            if ids is None or id(new) in ids:
                writes.append((box, key, old))
            continue
        is_replaced = new is not old and isinstance(new, mx.array)
        if is_replaced and new.shape == old.shape and is_floating(new):
            safe = mx.where(all_finite([new]), new, old.astype(new.dtype))
            writes.append((box, key, safe))
    commit(writes)


def writable_arrays(model: nn.Module) -> Writes:
    """Return (container, key, array) for each model array that is not in a tuple."""
    found = slots(model)
    return [(box, k, box[k]) for _, box, k in found if not isinstance(box, tuple)]


def _with_unscaled_gradient(inverse: mx.array, unscaled: set[object], x: Any) -> Any:
    """Return ``x`` with a backward pass that unscales its gradient and records this."""
    if not isinstance(x, mx.array) or not is_floating(x):
        return x
    token = object()

    def unscale_gradient(cotangent: mx.array, inverse: mx.array) -> mx.array:
        if token in unscaled:
            raise RuntimeError(
                "A loss from scale_loss() cannot be differentiated twice: the result "
                "would be wrong by a factor of the scale. Differentiate the result of "
                "value_and_grad(), or the original loss, instead."
            )
        unscaled.add(token)
        return unscale_leaf(cotangent, inverse)

    return _with_gradient(x, inverse, unscale_gradient)


def _with_gradient(
    x: mx.array, factor: mx.array, gradient: Callable[[mx.array, mx.array], mx.array]
) -> Any:
    """Return ``x`` with ``gradient(cotangent, factor)`` as its backward pass."""
    identity = mx.custom_function(lambda x, factor: x)
    zero = mx.zeros_like(factor)
    identity.vjp(lambda primals, cotangent, _: (gradient(cotangent, primals[1]), zero))
    return identity(x, factor)


def unscale(scaled: Any, inverse: mx.array) -> Any:
    """Lazily unscale gradients that are still scaled; the results refer to them."""
    unscaled = tree_map(LazyGradient, _unscale(scaled, inverse))
    for gradient, source in zip(leaves(unscaled), leaves(scaled), strict=True):
        if (origin := getattr(source, "source", None)) is not None:
            gradient[...] = source  # which is unscaled already
        alias = source.astype(source.dtype)  # the user may change the source in place
        gradient.source = origin or (alias, inverse)
    return unscaled


def unscale_in_place(gradients: Any, inverse: mx.array) -> Any:
    """Unscale and return a tree, in place unless it is an array or contains tuples."""
    tree = [gradients]  # a container even for a single array
    places, unscaled = slots(tree), unscale(tree, inverse)
    if any(isinstance(box, tuple) for _, box, _ in places):
        return unscaled[0]
    pairs = zip(places, leaves(unscaled), strict=True)
    commit((box, key, x) for (_, box, key), x in pairs)
    return tree[0]


@mx.compile
def _unscale(gradients: Any, inverse: mx.array) -> Any:
    inverses = each_use(inverse)
    return tree_map(lambda g: unscale_leaf(g, next(inverses)), gradients)


def unscale_leaf(gradient: mx.array, inverse: mx.array) -> mx.array:
    """Unscale a floating-point gradient in float32, replacing inf with NaN.

    Elementwise clipping would turn inf into a finite value, and the step would be
    applied. NaN survives clipping, accumulation and averaging.
    """
    if not is_floating(gradient):
        return gradient
    gradient = to_float32(gradient) * inverse
    # Bit-identical for finite values, including -0.0; inf minus inf is NaN.
    return gradient - (gradient - gradient)


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


def with_loss(outputs: Any, loss: mx.array) -> Any:
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


def is_opaque(x: Any) -> bool:
    """Return whether ``tree_map`` must treat ``x`` (a model, say) as a leaf."""
    return type(x) not in (dict, list, tuple) and not hasattr(x, "_fields")
