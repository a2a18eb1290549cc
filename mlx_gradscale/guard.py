"""Apply any ``mlx.optimizers`` optimizer to a tree, or leave everything as it was."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from .finite import is_floating

HALF = (mx.float16, mx.bfloat16)
_CONTAINERS = (dict, list, tuple)


def unscale(gradients: Any, inverse_scale: mx.array) -> Any:
    """Return the gradients times ``inverse_scale`` in float32.

    Leaves that are not floating pass through: ``mx.grad`` gives integer zeros
    for integer parameters, and a product would make them float.
    """
    return tree_map(
        lambda g: to_float32(g) * inverse_scale if is_floating(g) else g, gradients
    )


def to_float32(x: mx.array) -> mx.array:
    """Return ``x`` in float32; complex and integer arrays stay as they are."""
    return x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x


def guarded_apply(
    optimizer: Optimizer,
    gradients: Any,
    parameters: Any,
    inverse_scale: mx.array,
    apply: mx.array,
    masters: dict[str, mx.array] | None = None,
) -> Any:
    """Return the parameters after one optimizer step, or before it.

    Where ``apply`` is true this is ``optimizer.apply_gradients`` on the gradients
    times ``inverse_scale``, all in float32, with each new parameter cast back to
    its own dtype. Where it is false, parameters and optimizer state come out
    bit-identical. Which of the two is decided on the device.

    The work is compiled on the second call with the same optimizer and the same
    Python hyperparameters, so that hyperparameters that change on every step
    never compile.

    Args:
        optimizer (Optimizer): Any optimizer; its state is written in place.
        gradients (Any): The scaled gradients.
        parameters (Any): A tree that holds at least the gradients' leaves.
        inverse_scale (array): What to multiply the gradients with.
        apply (array): A 0-d bool array.
        masters (dict, optional): Float32 masters of parameters, by their path;
            written in place.

    Returns:
        Any: A tree of new parameters with the structure of ``gradients``.
    """
    if not isinstance(gradients, dict):
        raise TypeError(
            f"The gradients must be a dict, as value_and_grad returns for a model, "
            f"got {type(gradients).__name__}."
        )
    parameters = fitting_parameters(gradients, parameters)
    leaves = tree_flatten(gradients)
    if len(dict(leaves)) < len(leaves):
        raise ValueError(
            "Two gradients have the same path when it is written with dots, as those "
            "of {'a.b': x, 'a': {'b': y}}. Rename one of the parameters."
        )
    if not any(is_floating(g) for _, g in leaves):
        return tree_map(lambda _, p: p, gradients, parameters)
    initialize(optimizer, parameters)
    # Integer leaves are no business of an optimizer. An empty dict in their
    # place is how MLX's own trees mark a leaf that is not trained.
    trained = tree_map(lambda g: g if is_floating(g) else {}, gradients)
    slots = list(_slots(optimizer.state))
    masters = {} if masters is None else masters
    step = _stepper(optimizer, trained)
    new, new_masters, state = step(
        _read(slots),
        _scheduled(optimizer, trained),
        trained,
        parameters,
        masters,
        inverse_scale,
        apply,
    )
    _write(slots, state)
    masters.update(new_masters)
    return tree_map_with_path(
        lambda path, _, p: new.get(path, p), gradients, parameters
    )


def fitting_parameters(gradients: Any, parameters: Any, path: str = "") -> Any:
    """Return the part of ``parameters`` that has gradients; raise if some do not fit.

    Args:
        gradients (Any): A tree of arrays.
        parameters (Any): A tree or a model, at least as large.
        path (str): Where in the whole tree this is, for the error.
    """
    if isinstance(gradients, _CONTAINERS):
        if not isinstance(parameters, _CONTAINERS):
            raise ValueError(f"There are gradients below {path!r} but no parameters.")
        part = {}
        for key, gradient in _items(gradients):
            if isinstance(gradient, _CONTAINERS) and not gradient:
                # Frozen or not a parameter at all: mlx-lm's Llama has strings there.
                part[key] = gradient
                continue
            where = f"{path}.{key}" if path else str(key)
            try:
                parameter = parameters[key]
            except (KeyError, IndexError, TypeError):
                raise ValueError(
                    f"There is a gradient for {where!r} but no such parameter. Pass "
                    "gradients and parameters of the same model."
                ) from None
            part[key] = fitting_parameters(gradient, parameter, where)
        return part if isinstance(gradients, dict) else list(part.values())
    if not isinstance(gradients, mx.array):
        raise TypeError(
            f"The gradient of {path!r} must be an array, got {gradients!r}. Pass the "
            "tree of gradients that value_and_grad returned."
        )
    if not isinstance(parameters, mx.array):
        raise ValueError(f"There is a gradient for {path!r} but no such parameter.")
    if gradients.shape != parameters.shape:
        raise ValueError(
            f"The gradient of {path!r} has shape {gradients.shape}, the parameter "
            f"has {parameters.shape}."
        )
    return parameters


def initialize(optimizer: Optimizer, parameters: Any, again: bool = False) -> None:
    """Make sure that the optimizer has a float32 state for every parameter.

    With ``again`` also for those that came after its first initialisation.

    MLX itself initialises from the gradients, in their dtype: Adam's second
    moment in float16 is zero for every gradient below 2.4e-4.
    """
    for part, tree in _parts(optimizer, parameters):
        if again or not part._initialized:
            floating = tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree)
            part.init(floating)
    for box, key in _slots(optimizer.state):
        if box[key].dtype in HALF:
            box[key] = box[key].astype(mx.float32)


def _parts(optimizer: Optimizer, tree: Any) -> Iterator[tuple[Optimizer, Any]]:
    if isinstance(optimizer, MultiOptimizer):
        parts = optimizer._split_dictionary(tree)
        for inner, part in zip(optimizer.optimizers, parts, strict=True):
            yield from _parts(inner, part)
    else:
        yield optimizer, tree


def _slots(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) for every array in an optimizer's state."""
    for key, value in _items(state):
        if isinstance(value, mx.array):
            yield state, key
        elif isinstance(value, _CONTAINERS):
            yield from _slots(value)


def _items(tree: Any) -> Any:
    return tree.items() if isinstance(tree, dict) else enumerate(tree)


def _read(slots: list[tuple[Any, Any]]) -> list[mx.array]:
    return [box[key] for box, key in slots]


def _write(slots: list[tuple[Any, Any]], values: list[mx.array]) -> None:
    for (box, key), value in zip(slots, values, strict=True):
        box[key] = value


def _run(
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    gradients: Any,
    parameters: Any,
    masters: dict[str, mx.array],
    inverse_scale: mx.array,
    apply: mx.array,
) -> tuple[dict[str, mx.array], dict[str, mx.array], list[mx.array]]:
    """Step from ``state`` and select; the optimizer itself comes out untouched."""
    slots = list(_slots(optimizer.state))
    before = _read(slots)
    schedulers = [part._schedulers for part, _ in _parts(optimizer, gradients)]
    _write(slots, state)
    for (part, _), values in zip(_parts(optimizer, gradients), scheduled, strict=True):
        part._schedulers = {k: lambda _, x=x: x for k, x in values.items()}
    try:
        full = tree_map_with_path(
            lambda path, p: _full_precision(p, masters.get(path)), parameters
        )
        # One by one and joined by path: the tree_merge of a MultiOptimizer's own
        # apply_gradients fails where a list has a frozen module in a gap.
        unscaled = unscale(gradients, inverse_scale)
        steps = [
            (part, tree, _apply(part, tree, full))
            for part, tree in _parts(optimizer, unscaled)
        ]
        known = {(id(box), key) for box, key in slots}
        added = [s for s in _slots(optimizer.state) if (id(s[0]), s[1]) not in known]
        if added:
            for box, key in added:
                del box[key]
            raise TypeError(
                f"{type(optimizer).__name__} added {added[0][1]!r} to its state in a "
                "step, which a skipped step cannot take back. Make it in init_single."
            )
        for (box, key), old in zip(slots, state, strict=True):
            if box[key] is not old:
                box[key] = mx.where(apply, box[key], old).astype(old.dtype)
        outputs: dict[str, mx.array] = {}
        new_masters: dict[str, mx.array] = {}
        for part, tree, new in steps:
            moments = _arrays_by_owner(part.state)

            def select(path, _, parameter, new, moments=moments):
                if path in masters:
                    new = new_masters[path] = mx.where(apply, new, masters[path])
                # In float32, then cast: a skipped half comes back bit for bit, and
                # a select on float16 is 10 percent of the whole step on a CPU.
                keep = _rooted(to_float32(parameter), moments.get(path, []))
                outputs[path] = mx.where(apply, new, keep).astype(parameter.dtype)

            tree_map_with_path(select, tree, parameters, new)
        return outputs, new_masters, _read(slots)
    finally:
        _write(slots, before)
        for (part, _), old in zip(
            _parts(optimizer, gradients), schedulers, strict=True
        ):
            part._schedulers = old


def _scheduled(optimizer: Optimizer, gradients: Any) -> list[dict[str, mx.array]]:
    # Outside of what is compiled: a schedule is Python and may read anything.
    return [
        {name: mx.array(fn(part.step)) for name, fn in part._schedulers.items()}
        for part, _ in _parts(optimizer, gradients)
    ]


def _full_precision(parameter: mx.array, master: mx.array | None) -> mx.array:
    """Return the master, or the parameter where it is not the master's rounding.

    So a weight that the user replaced counts, and its old master does not, element
    by element, also in a step that is compiled.
    """
    value = to_float32(parameter)
    if master is None:
        return value
    # Nothing but the cast itself rounds as it does. On a GPU that is free; MLX's
    # CPU backend casts float16 in scalar code, for a third of the step's time.
    rounded = to_float32(master.astype(parameter.dtype))
    return mx.where(rounded == value, master, value)


def _apply(optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
    try:
        return optimizer.apply_gradients(gradients, parameters)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"The optimizer has no state for {error.args[0]!r}. If the parameter was "
            "added or unfrozen after the optimizer's init, make a new optimizer or "
            "call optimizer.init(model.trainable_parameters()) again."
        ) from error


def _rooted(parameter: mx.array, moments: list[mx.array]) -> mx.array:
    # Equal to the parameter, bit for bit, but computed from its new moments too.
    # mx.compile fuses a node only into a kernel that holds all its consumers;
    # with this common root a parameter and its moments become one kernel instead
    # of five. The last moment comes outermost, hence first in the fuser's walk:
    # AdaDelta's u is computed from v, and 11 levels are all a kernel may have.
    never = mx.array(False)
    for moment in moments:
        if moment.shape == parameter.shape:
            parameter = mx.where(never, moment, parameter)
    return parameter


def _arrays_by_owner(state: Any) -> dict[str, list[mx.array]]:
    owned: dict[str, list[mx.array]] = {}
    for path, value in tree_flatten(state):
        if isinstance(value, mx.array):
            owned.setdefault(path.rpartition(".")[0], []).append(value)
    return owned


# Held by the optimizer's life alone: neither the marks nor the compiled
# functions may keep the optimizer, or a model in its closures, alive.
_steppers: weakref.WeakKeyDictionary[Optimizer, tuple[Any, Callable | None]] = (
    weakref.WeakKeyDictionary()
)


def _stepper(optimizer: Optimizer, gradients: Any) -> Callable:
    mark = _fingerprint(optimizer, gradients)
    if type(optimizer).__hash__ is None:
        return partial(_run, optimizer)
    last_mark, compiled = _steppers.get(optimizer, (None, None))
    if mark is None or mark != last_mark:
        _steppers[optimizer] = (mark, None)
        return partial(_run_plain, optimizer)
    return compiled or partial(_compile_and_run, optimizer, mark)


def _compile_and_run(optimizer: Optimizer, mark: Any, *inputs: Any) -> Any:
    owner = weakref.ref(optimizer)

    def step(*inputs: Any) -> Any:
        return _run(owner(), *inputs)

    compiled = mx.compile(step)
    try:
        results = compiled(*inputs)
    except ValueError:
        # An optimizer that reads an array in its step cannot be compiled.
        results, compiled = step(*inputs), step
    _steppers[optimizer] = (mark, compiled)
    return results


def _run_plain(optimizer: Optimizer, *inputs: Any) -> Any:
    # An optimizer that draws random numbers would draw the same ones in every call
    # of a compiled function: without a mark it is never compiled.
    before = mx.random.state[0]
    results = _run(optimizer, *inputs)
    if mx.random.state[0] is not before:
        _steppers[optimizer] = (None, None)
    return results


class _Opaque(Exception):
    """A hyperparameter whose changes cannot be seen."""


def _fingerprint(optimizer: Optimizer, gradients: Any) -> Any:
    """Return what a trace of the optimizer depends on besides arrays, or None."""
    try:
        return [
            (
                type(part),
                _mark({k: v for k, v in vars(part).items() if k not in _NOT_SETTINGS}),
                _mark([v for v in _state_leaves(part) if not isinstance(v, mx.array)]),
                [path for path, _ in tree_flatten(tree)],
            )
            for part, tree in _parts(optimizer, gradients)
        ]
    except _Opaque:
        return None


def _state_leaves(optimizer: Optimizer) -> list[Any]:
    return [value for _, value in tree_flatten(optimizer.state)]


_NOT_SETTINGS = ("_state", "_initialized", "_schedulers")
_PLAIN = (type(None), bool, int, float, complex, str, mx.Dtype, np.generic)


def _mark(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return [(key, _mark(x)) for key, x in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value), *(_mark(x) for x in value)]
    if isinstance(value, FunctionType) and not value.__closure__:
        return weakref.ref(value)
    raise _Opaque
