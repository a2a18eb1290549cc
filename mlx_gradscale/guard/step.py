"""Apply any ``mlx.optimizers`` optimizer to a tree, or leave everything as it was."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..finite import is_floating
from ..masters import HALF, full_precision, half_bits, to_float32
from ..masters.remainder import join, select_step
from ..state_tree import (
    CONTAINERS,
    Writes,
    copies,
    dotted,
    flatten,
    items,
    restore,
    slots,
    write_all,
)
from ..tracing import broadcasts, refuse_shapeless
from .autocompile import autocompiled
from .mlx_optimizers import is_mlx_own
from .other_optimizers import apply as apply_other
from .other_optimizers import prepare


def unscale(gradients: Any, factor: mx.array | None) -> Any:
    """Return the gradients in float32, times ``factor`` if there is one.

    Leaves that are not floating pass through: ``mx.grad`` gives integer zeros
    for integer parameters, and a product would make them float.
    """

    factor_of = None if factor is None else broadcasts(factor)

    def unscaled(gradient: mx.array) -> mx.array:
        if not is_floating(gradient):
            return gradient
        gradient = to_float32(gradient)
        return gradient * factor_of(gradient.shape) if factor_of else gradient

    return tree_map(unscaled, gradients)


def guarded_apply(
    optimizer: Optimizer,
    gradients: Any,
    parameters: Any,
    factor: mx.array | None,
    apply: mx.array,
    masters: dict[str, mx.array] | None = None,
    written: dict[str, mx.array] | None = None,
    remainders: dict[str, mx.array] | None = None,
) -> Any:
    """Return the parameters after one optimizer step, or before it.

    Where ``apply`` is true this is ``optimizer.apply_gradients`` on the gradients
    times ``factor``, all in float32, with each new parameter cast back to
    its own dtype. Where it is false, parameters and optimizer state come out
    bit-identical. Which of the two is decided on the device.

    With MLX's own optimizers the work compiles itself, see :func:`autocompiled`.

    Args:
        optimizer (Optimizer): Any optimizer; its state is written in place.
        gradients (Any): The gradients, scaled or not.
        parameters (Any): A tree that holds at least the gradients' leaves.
        factor (array, optional): What to multiply the gradients with: one over the
            scale of scaled gradients.
        apply (array): A 0-d bool array.
        masters (dict, optional): Float32 masters of half parameters, by their path;
            replaced in place.
        written (dict, optional): For each master, and needed with them, the
            :func:`half_bits` of the parameter as the last step left it; replaced in
            place.
        remainders (dict, optional): In the place of masters, what half parameters lack
            of theirs, by their path; replaced in place.

    Returns:
        Any: A tree of new parameters with the structure of ``gradients``.
    """
    new, writes = planned_step(
        optimizer, gradients, parameters, factor, apply, masters, written, remainders
    )
    write_all(writes)
    return in_place_of(gradients, parameters, new)


def in_place_of(gradients: Any, parameters: Any, new: dict[str, mx.array]) -> Any:
    """Return parameters, new by their path where they are, in the gradients' tree."""
    fitting = fitting_parameters(gradients, parameters)
    return tree_map_with_path(lambda path, _, p: new.get(path, p), gradients, fitting)


def planned_step(
    optimizer: Optimizer,
    gradients: Any,
    parameters: Any,
    factor: mx.array | None,
    apply: mx.array,
    masters: dict[str, mx.array] | None = None,
    written: dict[str, mx.array] | None = None,
    remainders: dict[str, mx.array] | None = None,
) -> tuple[dict[str, mx.array], Writes]:
    """Return the new parameters by path, and what :func:`guarded_apply` would write.

    So that a caller writes all that belongs together at once. Takes what
    :func:`guarded_apply` takes.
    """
    if not isinstance(gradients, dict):
        raise TypeError(
            f"The gradients must be a dict, as value_and_grad returns for a model, "
            f"got {type(gradients).__name__}."
        )
    _check_supported(optimizer)
    refuse_shapeless()
    parameters = fitting_parameters(gradients, parameters)
    leaves = flatten(gradients)
    if len(dict(leaves)) < len(leaves):
        raise ValueError(
            "Two gradients have the same path when it is written with dots, as those "
            "of {'a.b': x, 'a': {'b': y}}. Rename one of the parameters."
        )
    if not any(is_floating(g) for _, g in leaves):
        return {}, []
    initialize(optimizer, parameters)
    # Integer leaves are no business of an optimizer. An empty dict in their
    # place is how MLX's own trees mark a leaf that is not trained.
    trained = gradients
    if not all(is_floating(g) for _, g in leaves):
        trained = tree_map(lambda g: g if is_floating(g) else {}, gradients)
    places = [(box, key) for _, box, key in slots(optimizer.state)]
    flat = flatten(parameters) if masters or remainders else []
    halves = [path for path, p in flat if p.dtype in HALF]
    kept = {p: (masters[p], written[p]) for p in halves if masters and p in masters}
    lost = {p: remainders[p] for p in halves if remainders and p in remainders}
    step = autocompiled(_run, optimizer, list(_parts(optimizer, trained)))
    new, new_masters, new_remainders, state = step(
        [box[key] for box, key in places],
        _scheduled(optimizer, trained),
        trained,
        parameters,
        kept,
        lost,
        factor,
        apply,
    )
    writes = [(*place, x) for place, x in zip(places, state, strict=True)]
    for path, master in new_masters.items():
        writes.append((masters, path, master))
        writes.append((written, path, half_bits(new[path])))
    writes += [(remainders, path, x) for path, x in new_remainders.items()]
    return new, writes


def parameter_places(gradients: Any, model: Any, path: str = "") -> Iterator[tuple]:
    """Yield (path, container, key) in ``model`` for each leaf of ``gradients``."""
    for key, gradient in items(gradients):
        where = f"{path}.{key}" if path else str(key)
        if isinstance(gradient, CONTAINERS):
            if gradient:
                yield from parameter_places(gradient, model[key], where)
        else:
            yield where, model, key


def _check_supported(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer).update is not Optimizer.update:
        raise TypeError(
            f"{name} overrides update(), which a scaler does not call: move what it "
            "does to apply_gradients()."
        )
    if isinstance(optimizer, MultiOptimizer):
        if type(optimizer).apply_gradients is not MultiOptimizer.apply_gradients:
            raise TypeError(
                f"{name} overrides MultiOptimizer's apply_gradients(), whose parts are "
                "stepped one by one: override it in a part."
            )
        for part in optimizer.optimizers:
            _check_supported(part)
        return


def fitting_parameters(gradients: Any, parameters: Any, path: str = "") -> Any:
    """Return the part of ``parameters`` that has gradients; raise if some do not fit.

    Args:
        gradients (Any): A tree of arrays.
        parameters (Any): A tree or a model, at least as large.
        path (str): Where in the whole tree this is, for the error.
    """
    if isinstance(gradients, CONTAINERS):
        if not isinstance(parameters, CONTAINERS):
            raise ValueError(f"There are gradients below {path!r} but no parameters.")
        part = {}
        for key, gradient in items(gradients):
            if isinstance(gradient, CONTAINERS) and not gradient:
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
        if again or not part._initialized or is_emptied(part):
            floating = tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree)
            part.init(floating)
        for name in part._schedulers:
            # What a schedule of Python numbers left there.
            part.state[name] = mx.array(part.state[name])
        if not is_mlx_own(part):
            floating = tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree)
            prepare(part, floating)
    for path, box, key in slots(optimizer.state):
        if isinstance(box, tuple):
            raise TypeError(
                f"{type(optimizer).__name__} keeps {dotted(path)} in a tuple, which "
                "cannot be written to: use a list or a dict in its state."
            )
        if box[key].dtype in HALF:
            box[key] = box[key].astype(mx.float32)


def is_emptied(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has lost its state since it was initialised.

    As where a trace that raised was undone, in which it had been initialised.
    """
    return all(
        part._initialized
        and part.state.keys() <= {"step", "learning_rate", *part._schedulers}
        for part in single_optimizers(optimizer)
    )


def single_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, or each one in a MultiOptimizer."""
    if isinstance(optimizer, MultiOptimizer):
        for part in optimizer.optimizers:
            yield from single_optimizers(part)
    else:
        yield optimizer


def _parts(optimizer: Optimizer, tree: Any) -> Iterator[tuple[Optimizer, Any]]:
    if isinstance(optimizer, MultiOptimizer):
        parts = optimizer._split_dictionary(tree)
        for inner, part in zip(optimizer.optimizers, parts, strict=True):
            # Before MLX 0.32 a part without leaves is a list.
            yield from _parts(inner, part or {})
    else:
        yield optimizer, tree


def _run(
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    gradients: Any,
    parameters: Any,
    kept: dict[str, tuple[mx.array, mx.array]],
    lost: dict[str, mx.array],
    factor: mx.array | None,
    apply: mx.array,
) -> tuple[
    dict[str, mx.array], dict[str, mx.array], dict[str, mx.array], list[mx.array]
]:
    """Step from ``state`` and select; the optimizer itself comes out untouched."""
    parts = [part for part, _ in _parts(optimizer, gradients)]
    # With what each container holds, because a step may replace containers.
    saved = [pair for part in parts for pair in copies(part.state)]
    replaceable = [(part, part._state, part._schedulers) for part in parts]
    places = list(slots(optimizer.state))
    given = [_alias(x) for x in state]
    write_all((*place, x) for (_, *place), x in zip(places, given, strict=True))
    for part, values in zip(parts, scheduled, strict=True):
        part._schedulers = {k: lambda _, x=x: x for k, x in values.items()}
    try:
        joined = {p: join(x, lost[p]) for p, x in tree_flatten(parameters) if p in lost}
        full = tree_map_with_path(
            lambda path, p: (
                joined[path].master
                if path in joined
                else full_precision(p, *kept.get(path, ()))
            ),
            parameters,
        )
        # One by one and joined by path: the tree_merge of a MultiOptimizer's own
        # apply_gradients fails where a list has a frozen module in a gap.
        steps = []
        for part, tree in _parts(optimizer, gradients):
            tree = unscale(tree, factor)
            if not is_mlx_own(part):
                # An SVD of NaN raises, and what reads its gradients may.
                tree = tree_map(lambda g: mx.where(apply, g, 0), tree)
            steps.append((part, tree, _apply(part, tree, tree_map(_alias, full))))
        stepped = {path: (box, key) for path, box, key in slots(optimizer.state)}
        _check_same_paths(optimizer, [path for path, *_ in places], stepped)
        new_state = []
        applies = broadcasts(apply)
        # Only of MLX's own is it known that none writes to its state in place.
        known = all(map(is_mlx_own, parts))
        for (path, *_), old, alias in zip(places, state, given, strict=True):
            box, key = stepped[path]
            if box[key].shape != old.shape:
                raise ValueError(
                    f"{dotted(path)} in the optimizer's state has shape {old.shape}, "
                    f"and a step would give it {box[key].shape}, which a skipped step "
                    "cannot. Make a new optimizer if the model has changed."
                )
            untouched = known and box[key] is alias
            if not untouched:
                new = box[key]
                if new.ndim == 0 and not is_floating(new):
                    # Counted and selected are two kernels that MLX has ready; fused
                    # they would be one to build.
                    new = mx.contiguous(new)
                box[key] = mx.where(applies(old.shape), new, old)
            else:
                box[key] = old
            new_state.append(box[key])
        outputs: dict[str, mx.array] = {}
        new_masters: dict[str, mx.array] = {}
        new_remainders: dict[str, mx.array] = {}
        for part, tree, new in steps:
            moments = _arrays_by_owner(part.state)

            def select(path, gradient, parameter, full, new, moments=moments):
                if new.shape != parameter.shape:
                    raise ValueError(
                        f"{path!r} has shape {parameter.shape}, and a step would give "
                        f"it {new.shape}: the optimizer was initialised for another "
                        "shape. Make a new optimizer for the changed model."
                    )
                apply = applies(parameter.shape)
                if path in lost:
                    others = [*moments.get(path, [])[::-1], gradient]
                    outputs[path], new_remainders[path] = select_step(
                        parameter, lost[path], joined[path], new, apply, others
                    )
                    return
                if path in kept:
                    # Also in a skipped step: a replaced weight is its own master.
                    new = new_masters[path] = mx.where(apply, new, full)
                # In the parameter's own dtype: a cast there and back flushes bfloat16
                # subnormals on Apple's GPUs, and changes the bits of a float16 NaN.
                keep = _rooted(parameter, moments.get(path, []), apply)
                outputs[path] = mx.where(apply, new.astype(parameter.dtype), keep)

            tree_map_with_path(select, tree, parameters, full, new)
        return outputs, new_masters, new_remainders, new_state
    finally:
        restore(saved)
        for part, old_state, old_schedulers in replaceable:
            part._state, part._schedulers = old_state, old_schedulers


def _alias(x: mx.array) -> mx.array:
    # The same array in another Python object: ``parameter -= update`` in an optimizer
    # changes the object that it was given, and a skipped step needs the old value.
    return x.astype(x.dtype)


def _check_same_paths(
    optimizer: Optimizer, before: list[tuple], after: dict[tuple, Any]
) -> None:
    for path in before:
        if path not in after:
            raise TypeError(
                f"{type(optimizer).__name__} removed {dotted(path)} from its state in "
                "a step. Keep it, a skipped step needs it."
            )
    for path in after.keys() - set(before):
        raise TypeError(
            f"{type(optimizer).__name__} added {dotted(path)} to its state in a step, "
            "which a skipped step cannot take back. Make it in init_single."
        )


def _scheduled(optimizer: Optimizer, gradients: Any) -> list[dict[str, mx.array]]:
    # Outside of what is compiled: a schedule is Python and may read anything.
    return [
        {name: mx.array(fn(part.step)) for name, fn in part._schedulers.items()}
        for part, _ in _parts(optimizer, gradients)
    ]


def _apply(optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
    try:
        if not is_mlx_own(optimizer):
            return apply_other(optimizer, gradients, parameters)
        return optimizer.apply_gradients(gradients, parameters)
    except (KeyError, IndexError) as error:
        missing = f" for {error.args[0]!r}" if isinstance(error, KeyError) else ""
        raise ValueError(
            f"The optimizer has no state{missing}. If the parameter was added or "
            "unfrozen after the optimizer's init, make a new optimizer or call "
            "optimizer.init(model.trainable_parameters()) again."
        ) from error


def _rooted(parameter: mx.array, moments: list[mx.array], apply: mx.array) -> mx.array:
    # Where the step is not applied, and only there, the parameter, bit for bit; but
    # computed from its new moments too. mx.compile fuses a node only into a kernel
    # that holds all its consumers; with this common root a parameter and its moments
    # become one kernel instead of five. The last moment comes outermost, hence first
    # in the fuser's walk: AdaDelta's u is computed from v, and 11 levels are all a
    # kernel may have.
    for moment in moments:
        if moment.shape == parameter.shape:
            moment = moment.astype(parameter.dtype)
            parameter = mx.where(apply, moment, parameter)
    return parameter


def _arrays_by_owner(state: Any) -> dict[str, list[mx.array]]:
    owned: dict[str, list[mx.array]] = {}
    for path, value in tree_flatten(state):
        if isinstance(value, mx.array):
            owned.setdefault(path.rpartition(".")[0], []).append(value)
    return owned
