"""Recompute layers in the backward pass instead of keeping their activations.

A layer runs again after its random key, the arrays in its modules and arguments, and
the dicts and lists that hold them were given the values that they had before; then they
get their present values back. So gradients, random numbers and buffers are those
without recomputation. Two dependencies in the graph save memory: a layer is recomputed
after the gradient of its outputs is known, and the gradients of its inputs wait for
those of its weights, so that it is done before the next one is recomputed.
"""

from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .core.forward import is_opaque
from .core.intercept import get_handlers, set_handlers
from .core.trees import CONTAINERS, Snapshot, is_floating, leaves

# What arguments may consist of. A layer may write to any other object, such as a cache.
_PLAIN = (mx.array, mx.Dtype, bool, int, float, complex, str, bytes, NoneType)


class GradCheckpoint:
    """Recomputed layers, until ``undo()`` is called or a ``with`` block ends."""

    def __init__(self, modules: list[nn.Module]):
        self._modules = modules
        for module in modules:
            # Outermost, so that a float32 layer casts again and keeps no casts.
            set_handlers(module, (*get_handlers(module), _recompute))

    def undo(self) -> None:
        """Stop the recomputation of the layers for which this call started it."""
        for module in self._modules:
            others = (x for x in get_handlers(module) if x is not _recompute)
            set_handlers(module, tuple(others))

    def __enter__(self) -> "GradCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def grad_checkpoint(layers: Any) -> GradCheckpoint:
    """Recompute layers in the backward pass, to save memory at the cost of time.

    Only the inputs of these layers are kept for the backward pass. Loss, gradients,
    random numbers and buffers stay the same, also inside ``mx.compile``. Freeze
    parameters that you do not train, or their gradients are computed too. If you call
    this function after compiling a step, compile the step again.

    Calls with an argument that is neither an array, a number or a string nor a list,
    tuple or dict of these, such as a cache, are not recomputed. A cache object that a
    layer keeps as an attribute is written again when the layer is recomputed. Random
    numbers that do not come from MLX differ then.

    Args:
        layers (nn.Module or list): A module, a list of modules, or a model whose
            ``layers`` are recomputed one by one.

    Returns:
        GradCheckpoint: A handle. Call its ``undo()``, or use it in a ``with``
        statement, to stop the recomputation.

    Raises:
        TypeError: If a layer is not a module, or cannot be called.
        ValueError: If the list is empty.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import grad_checkpoint
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
        >>> loss_and_grad = nn.value_and_grad(model, lambda x: model(x).sum())
        >>> with grad_checkpoint(model):
        ...     loss, gradients = loss_and_grad(mx.ones((1, 2)))
    """
    inner = getattr(layers, "layers", None)
    modules = inner if isinstance(inner, list | tuple) else layers
    modules = modules if isinstance(modules, list | tuple) else [modules]
    if not modules:
        raise ValueError("There are no layers to recompute: the list is empty.")
    for module in modules:
        if not isinstance(module, nn.Module) or not callable(module):
            raise TypeError(
                "Expected a module with __call__, a list of such modules, or a model "
                f"with layers, got {type(module).__name__}."
            )
    state: Any = mx.random.state
    if _random_state()[0] is not state[0]:
        raise RuntimeError(
            "This version of MLX stores its random key in a place that is not known "
            "here. Install another version of mlx_gradscale or MLX."
        )
    new = {id(x): x for x in modules if _recompute not in get_handlers(x)}
    return GradCheckpoint(list(new.values()))


def _recompute(module: nn.Module, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Handler that calls a function, and calls it again in the backward pass."""
    arguments = [x for _, x in tree_flatten((args, kwargs), is_leaf=is_opaque)]
    if not all(isinstance(x, _PLAIN) for x in arguments):
        return function(*args, **kwargs)
    # The random key is one of the arrays.
    before, arrays = _look([args, kwargs, module, _random_state()])
    floating = [i for i, x in arrays.items() if is_floating(x)]
    results: list[Any] = []

    def forward(_: list[mx.array]) -> list[mx.array]:
        results.append(function(*args, **kwargs))
        return _arrays(results[0]) or [mx.zeros(())]

    def backward(inputs: Any, cotangents: Any, _: Any) -> list[mx.array]:
        ready = [x for x in cotangents if is_floating(x)]
        # One call for each array: evaluating one of several evaluates them all.
        new = {i: mx.depends(x, ready) for i, x in zip(arrays, inputs, strict=True)}
        trainable: set[int] = set()

        def run(*primals: mx.array) -> list[mx.array]:
            _restore(before)
            _assign(arrays, new | dict(zip(floating, primals, strict=True)))
            trainable.update(map(id, leaves(module.trainable_parameters())))
            outputs = _arrays(function(*args, **kwargs))
            # mx.vjp skips outputs of mx.stop_gradient, and then gives their cotangents
            # to the next outputs.
            return [mx.depends(x, []) for x in outputs if is_floating(x)]

        after = [(box, type(copy)(box)) for box, copy in before]
        values = {i: x.astype(x.dtype) for i, x in arrays.items()}
        try:
            _, found = mx.vjp(run, [new[i] for i in floating], ready)
        finally:
            _assign(arrays, values)
            _restore(after)
        gradients = dict(zip(floating, found, strict=True))
        weights = [x for i, x in gradients.items() if i in trainable]
        for i in gradients.keys() & map(id, arguments):
            gradients[i] = mx.depends(gradients[i], weights)
        return [gradients.get(i, mx.zeros_like(x)) for i, x in new.items()]

    recomputed: Any = mx.custom_function(forward)
    recomputed.vjp(backward)
    outputs = iter(recomputed(list(arrays.values())))
    return tree_map(
        lambda x: next(outputs) if isinstance(x, mx.array) else x,
        results[0],
        is_leaf=is_opaque,
    )


def _look(stack: list[Any]) -> tuple[Snapshot, dict[int, mx.array]]:
    """Record each dict and list below these, with the attributes of modules.

    Returns these with copies of their contents, and all arrays below them, by id.
    """
    boxes: dict[int, tuple[Any, Any]] = {}
    arrays: dict[int, mx.array] = {}
    while stack:
        box = stack.pop()
        if id(box) in boxes:
            continue
        copy: Any = dict(box) if isinstance(box, dict) else list(box)
        boxes[id(box)] = box, copy
        for x in copy.values() if isinstance(copy, dict) else copy:
            if isinstance(x, mx.array):
                arrays[id(x)] = x
            elif isinstance(x, CONTAINERS):
                stack.append(x)
        if isinstance(box, nn.Module):
            stack.append(vars(box))
    return list(boxes.values()), arrays


def _restore(saved: Snapshot) -> None:
    """Give each dict and list the contents of its copy."""
    for box, copy in saved:
        if isinstance(box, dict):
            for name in box.keys() - copy.keys():
                del box[name]
            dict.update(box, copy)  # a module's own update() does something else
        elif isinstance(box, list):
            box[:] = copy


def _assign(arrays: dict[int, mx.array], values: dict[int, mx.array]) -> None:
    """Replace the values of arrays by id, wherever the arrays are, without a copy."""
    for i, x in arrays.items():
        # Not the method of a subclass, which may watch what changes the array.
        mx.array.__setitem__(x, ..., values[i])


def _arrays(tree: Any) -> list[mx.array]:
    found = tree_flatten(tree, is_leaf=is_opaque)
    return [x for _, x in found if isinstance(x, mx.array)]


def _random_state() -> list[mx.array]:
    """Return the list that holds this thread's random key."""
    # Assignments to mx.random.state itself raise an error.
    state: Any = mx.random.state
    thread_state: list[mx.array] = iter(state).__reduce__()[1][0]
    return thread_state
