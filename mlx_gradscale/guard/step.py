"""One step of an optimizer, or none: which of the two is decided on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from ..finite import is_floating
from ..masters import Masters, join_kept, to_float32
from ..state_tree import (
    Slot,
    Writes,
    at_once,
    copies,
    dotted,
    flatten,
    leaves_of,
    restoring,
    slots,
    write_all,
)
from ..tracing import broadcasts, refuse_shapeless, renewed
from .autocompile import autocompiled
from .fitting import fitting_parameters, parameter_places
from .initialization import check_supported, initialize
from .mlx_optimizers import (
    is_mlx_own,
    parts,
    restoring_insides,
    schedules,
    set_scheduled,
    single_optimizers,
)
from .other_optimizers import apply as apply_other
from .select import arrays_by_owner, select_parameter, select_state

# What is kept of each master, by name, by the path of its parameter.
Kept = dict[str, dict[str, mx.array]]
# From a shape to an array of it.
_Broadcast = Callable[[tuple[int, ...]], mx.array]


def unscale(gradients: Any, factor: mx.array | None) -> Any:
    """Return the gradients in float32, times ``factor`` if there is one.

    Leaves that are not floating pass through: ``mx.grad`` gives integer zeros
    for integer parameters, and a product would make them float.
    """
    return _times(None if factor is None else broadcasts(factor), gradients)


def _times(factor_of: _Broadcast | None, gradients: Any) -> Any:
    def unscaled(gradient: mx.array) -> mx.array:
        if not is_floating(gradient):
            return gradient
        gradient = to_float32(gradient)
        return gradient * factor_of(gradient.shape) if factor_of else gradient

    return tree_map(unscaled, gradients)


def _broadcast_for(optimizer: Optimizer, factor: mx.array) -> _Broadcast:
    # GCC, which compiles the kernels of MLX's CPU backend, vectorises a loop up to 10
    # pairs of pointers that may overlap, one of them written to. An update with one
    # moment writes two float32 arrays and reads five: with the factor 11 pairs, and
    # Lion takes 5 times as long. What is written as float32 is not read as float64.
    moments = arrays_by_owner(optimizer.state, set())
    has_one = all(len(own) == 1 for path, own in moments.items() if path)
    if not has_one or mx.default_device() != mx.Device(mx.cpu):
        return broadcasts(factor)
    exact = renewed(factor.astype(mx.float64))

    def broadcast(shape: tuple[int, ...]) -> mx.array:
        # For each leaf its own, or the cast would be computed once, as a whole array.
        own = mx.depends(next(exact), [])
        return mx.broadcast_to(own, shape).astype(mx.float32)

    return broadcast


@dataclass
class PlannedStep:
    """What a step would write, and has not written yet.

    Attributes:
        gradients (Any): The gradients that it is made of.
        fitting (Any): Their :func:`fitting_parameters`, as they are.
        new (dict): The new parameters by their path.
        writes (list): All else, as (container, key, value). Callers add their own.
    """

    gradients: Any
    fitting: Any
    new: dict[str, mx.array]
    writes: Writes

    def carry_out(self) -> Any:
        """Write it all, and return the new parameters in the gradients' tree."""
        write_all(self.writes)
        return tree_map_with_path(
            lambda path, _, p: self.new.get(path, p), self.gradients, self.fitting
        )

    def carry_out_on(self, model: Any) -> None:
        """Write it all, the new parameters to a model."""
        places = parameter_places(self.gradients, model)
        new = [(box, k, self.new[path]) for path, box, k in places if path in self.new]
        write_all([*new, *self.writes])


def guarded_apply(
    optimizer: Optimizer,
    gradients: Any,
    parameters: Any,
    factor: mx.array | None,
    apply: mx.array,
    masters: Masters | None = None,
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
        masters (Masters, optional): Those of half parameters; written in place.

    Returns:
        Any: A tree of new parameters with the structure of ``gradients``.
    """
    fitting = fitting_parameters(gradients, parameters)
    plan = planned_step(optimizer, gradients, fitting, factor, apply, masters)
    return plan.carry_out()


def planned_step(
    optimizer: Optimizer,
    gradients: Any,
    fitting: Any,
    factor: mx.array | None,
    apply: mx.array,
    masters: Masters | None = None,
) -> PlannedStep:
    """Return what :func:`guarded_apply` would write.

    So that a caller writes all that belongs together at once. Takes what
    :func:`guarded_apply` takes, but of the parameters only the ``fitting`` ones.
    """
    check_supported(optimizer)
    refuse_shapeless()
    leaves = flatten(gradients)
    if len(dict(leaves)) < len(leaves):
        raise ValueError(
            "Two gradients have the same path when it is written with dots, as those "
            "of {'a.b': x, 'a': {'b': y}}. Rename one of the parameters."
        )
    # Integer parameters are no business of an optimizer, also where clipping by hand
    # has made their gradients floating.
    pairs = zip(leaves, leaves_of(fitting), strict=True)
    kinds = {(g.dtype, p.dtype): (g, p) for (_, g), p in pairs}
    are_trained = [_is_trained(*kind) for kind in kinds.values()]
    if not any(are_trained):
        return PlannedStep(gradients, fitting, {}, [])
    initialize(optimizer, fitting)
    trained = gradients
    if not all(are_trained):
        # An empty dict is how MLX's own trees mark a leaf that is not trained.
        trained = tree_map(
            lambda g, p: g if _is_trained(g, p) else {}, gradients, fitting
        )
    places = [(box, key) for _, box, key in slots(optimizer.state)]
    each_part = list(parts(optimizer, trained))
    step = autocompiled(_run, optimizer, each_part)
    new, kept, state = step(
        [box[key] for box, key in places],
        # Outside of what is compiled: a schedule is Python and may read anything.
        [
            {name: mx.array(fn(part.step)) for name, fn in schedules(part).items()}
            for part, _ in each_part
        ],
        trained,
        fitting,
        masters.kept_of(flatten(fitting)) if masters else {},
        factor,
        apply,
    )
    writes = [(*place, x) for place, x in zip(places, state, strict=True)]
    if masters:
        for path in kept:
            writes += masters.writes(path, kept[path], new[path])
    return PlannedStep(gradients, fitting, new, writes)


def _is_trained(gradient: mx.array, parameter: mx.array) -> bool:
    return is_floating(gradient) and is_floating(parameter)


def _run(
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    gradients: Any,
    parameters: Any,
    kept: Kept,
    factor: mx.array | None,
    apply: mx.array,
) -> tuple[dict[str, mx.array], Kept, list[mx.array]]:
    """Step from ``state`` and select; the optimizer itself comes out untouched."""
    singles = list(single_optimizers(optimizer))
    # With what each container holds, because a step may replace containers.
    back = restoring(pair for part in singles for pair in copies(part.state))
    back += [call for part in singles for call in restoring_insides(part)]
    put_back = at_once(back)
    places = slots(optimizer.state)
    given = [_alias(x) for x in state]
    try:
        write_all((*place, x) for (_, *place), x in zip(places, given, strict=True))
        set_scheduled(singles, scheduled)
        before = dict(flatten(parameters))
        old = {path: join_kept(x, kept.get(path, {})) for path, x in before.items()}
        full = tree_map_with_path(lambda path, _: old[path].master, parameters)
        steps = _step_each(optimizer, gradients, full, factor, apply)
        applies = broadcasts(apply)
        new_state, untouched = _select_states(optimizer, places, state, given, applies)
        outputs: dict[str, mx.array] = {}
        new_kept: Kept = {}
        for part, tree, new in steps:
            # SGD has moments also without momentum: no kernel has to read them.
            moments = arrays_by_owner(part.state, untouched)
            after = dict(flatten(new))
            for path, gradient in flatten(tree):
                _check_shape(path, before[path], after[path])
                outputs[path], keep = select_parameter(
                    before[path],
                    kept.get(path, {}),
                    old[path],
                    after[path],
                    applies(before[path].shape),
                    gradient,
                    moments.get(path, []),
                )
                if keep:
                    new_kept[path] = keep
        return outputs, new_kept, new_state
    finally:
        put_back()


def _step_each(
    optimizer: Optimizer,
    gradients: Any,
    full: Any,
    factor: mx.array | None,
    apply: mx.array,
) -> list[tuple[Optimizer, Any, Any]]:
    """Return each single optimizer with its gradients and what it makes of them."""
    # One by one and joined by path: the tree_merge of a MultiOptimizer's own
    # apply_gradients fails where a list has a frozen module in a gap.
    steps = []
    for part, tree in parts(optimizer, gradients):
        factor_of = None if factor is None else _broadcast_for(part, factor)
        tree = _times(factor_of, tree)
        if not is_mlx_own(part):
            # An SVD of NaN raises, and what reads its gradients may.
            tree = tree_map(lambda g: mx.where(apply, g, 0), tree)
        steps.append((part, tree, _apply(part, tree, tree_map(_alias, full))))
    return steps


def _alias(x: mx.array) -> mx.array:
    # The same array in another Python object: ``parameter -= update`` in an optimizer
    # changes the object that it was given, and a skipped step needs the old value.
    return x.astype(x.dtype)


def _select_states(
    optimizer: Optimizer,
    places: list[Slot],
    state: list[mx.array],
    given: list[mx.array],
    applies: _Broadcast,
) -> tuple[list[mx.array], set[int]]:
    """Put what is selected into an optimizer's state, after a step, and return it.

    Also the ids of those arrays that the step has left alone.
    """
    stepped = {path: (box, key) for path, box, key in slots(optimizer.state)}
    _check_same_paths(optimizer, [path for path, *_ in places], stepped)
    # Only of MLX's own is it known that none writes to its state in place.
    known = all(map(is_mlx_own, single_optimizers(optimizer)))
    selected = []
    untouched = set()
    for (path, *_), old, alias in zip(places, state, given, strict=True):
        box, key = stepped[path]
        if box[key].shape != old.shape:
            raise ValueError(
                f"{dotted(path)} in the optimizer's state has shape {old.shape}, "
                f"and a step would give it {box[key].shape}, which a skipped step "
                "cannot. Make a new optimizer if the model has changed."
            )
        if known and box[key] is alias:
            box[key] = old
            untouched.add(id(old))
        else:
            box[key] = select_state(old, box[key], applies(old.shape))
        selected.append(box[key])
    return selected, untouched


def _check_same_paths(
    optimizer: Optimizer,
    before: list[tuple[Any, ...]],
    after: dict[tuple[Any, ...], Any],
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


def _check_shape(path: str, parameter: mx.array, new: mx.array) -> None:
    if new.shape != parameter.shape:
        raise ValueError(
            f"{path!r} has shape {parameter.shape}, and a step would give it "
            f"{new.shape}: the optimizer was initialised for another shape. Make a new "
            "optimizer for the changed model."
        )


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
