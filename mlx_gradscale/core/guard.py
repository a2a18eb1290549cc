"""One step of an optimizer, or none: decided on the device.

``inspect`` finds out whether the gradients are finite, ``plan`` computes what a step
would write, and ``Plan`` writes all of it at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from .finite import is_finite_magnitude
from .gradients import Source, each_use
from .masters import HALF, Joined, Masters, entries, joined_master, to_float32
from .optimizers import (
    Borrowed,
    autocompiled,
    is_builtin,
    parts,
    scheduled_values,
    split_paths,
)
from .ranks import Ranks
from .trees import Leaf, Slot, Writes, commit, flatten, restore, slots, snapshot

Stored = dict[str, mx.array]


class Inspected(NamedTuple):
    """Gradients as a step uses them, one array per leaf, and what is known of them."""

    arrays: list[mx.array]
    # Which arrays are scaled, and one over their scale.
    is_scaled: list[bool]
    inverse: mx.array | None
    # What all of them are multiplied by to clip their norm.
    clip: mx.array | None
    norm: mx.array | None
    applied: mx.array


def inspect(
    leaves: list[Leaf],
    sources: list[Source | None],
    ranks: Ranks,
    max_norm: mx.array | None = None,
) -> Inspected:
    """Find out, lazily, whether all gradients are finite, and how to clip them.

    Args:
        leaves (list): The gradients, matched to parameters.
        sources (list): For each, the scaled array behind it, if there is one.
        ranks (Ranks): Who decides together.
        max_norm (array, optional): The norm to clip to.
    """
    arrays, is_scaled = [], []
    scaled: dict[str, mx.array] = {}
    others: dict[str, mx.array] = {}
    inverse = clip = norm = None
    # A cast inside the update kernel is scalar code on a CPU: 1.55 of the bare
    # optimizer instead of 1.29. On a GPU the float32 copy would cost 8 bytes.
    casts_first = mx.default_device() == mx.Device(mx.cpu)
    for leaf, source in zip(leaves, sources, strict=True):
        array, flag = leaf.gradient, False
        if source is not None and inverse is None:
            inverse = source.inverse
        if source is not None and source.inverse is inverse:
            scaled[leaf.path] = source.scaled
            is_cast = casts_first and source.scaled.dtype in HALF
            if source.scaled is array or not is_cast:
                array, flag = source.scaled, True
        else:
            others[leaf.path] = array
        arrays.append(array)
        is_scaled.append(flag)
    if max_norm is None:
        applied = ranks.all_finite(scaled, inverse, others)
    else:
        # One pass gives the norm and shows whether all is finite, and clipping is a
        # factor of the unscaling. As in mlx.optimizers.clip_grad_norm.
        norm = ranks.norm(scaled, inverse, others)
        clip = mx.minimum(max_norm / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
    return Inspected(arrays, is_scaled, inverse, clip, norm, applied)


@dataclass
class Plan:
    """What a step would write, and has not written yet.

    Attributes:
        gradients (Any): The tree of gradients.
        leaves (list): Its leaves, matched to parameters.
        new (dict): The new parameters by their path.
        writes (list): Everything else, as (container, key, value). Callers add to it.
    """

    gradients: Any
    leaves: list[Leaf]
    new: dict[str, mx.array] = field(default_factory=dict)
    writes: Writes = field(default_factory=list)

    def commit_to_model(self) -> None:
        """Write everything, the new parameters to where the old ones are."""
        for leaf in self.leaves:
            if leaf.path in self.new:
                self.writes.append((leaf.container, leaf.key, self.new[leaf.path]))
        commit(self.writes)

    def commit(self) -> Any:
        """Write everything but the parameters; return them in the gradients' tree."""
        commit(self.writes)
        parameters = {leaf.path: leaf.parameter for leaf in self.leaves} | self.new
        return tree_map_with_path(lambda path, _: parameters[path], self.gradients)


class _Layout(NamedTuple):
    """The leaves of a step: what a compiled step is specialised to."""

    paths: list[str]
    is_scaled: list[bool]
    structure: Any
    is_builtin: bool

    def tree(self, values: list[Any]) -> Any:
        by_path = dict(zip(self.paths, values, strict=True))
        return tree_map(lambda path: by_path[path], self.structure)


class _Arrays(NamedTuple):
    """What a step computes with, one entry per leaf."""

    gradients: list[mx.array]
    parameters: list[mx.array]
    stored: list[Stored]
    inverse: mx.array | None
    clip: mx.array | None


def plan(
    optimizer: Optimizer,
    gradients: Any,
    leaves: list[Leaf],
    inspected: Inspected,
    masters: Masters | None = None,
) -> Plan:
    """Plan ``optimizer.apply_gradients`` on float32, selected by ``inspected.applied``.

    Where it is false, parameters and optimizer state come out bit-identical. Each new
    parameter has its old dtype. The optimizer has to be initialised.

    Args:
        optimizer (Optimizer): Any optimizer of ``mlx.optimizers`` or derived from it.
        gradients (Any): The tree that ``leaves`` were matched from.
        leaves (list): The matched leaves.
        inspected (Inspected): From :func:`inspect`.
        masters (Masters, optional): Master weights of half-precision parameters.
    """
    paths: list[str] = []
    is_scaled: list[bool] = []
    arrays = _Arrays([], [], [], inspected.inverse, inspected.clip)
    floating: dict[mx.Dtype, bool] = {}
    for leaf, array, flag in zip(
        leaves, inspected.arrays, inspected.is_scaled, strict=True
    ):
        for x in (leaf.parameter, leaf.gradient):
            if x.dtype not in floating:
                floating[x.dtype] = mx.issubdtype(x.dtype, mx.inexact)
        # An optimizer never steps integer parameters, not even where clipping by hand
        # has made their gradients floating.
        if floating[leaf.parameter.dtype] and floating[leaf.gradient.dtype]:
            paths.append(leaf.path)
            is_scaled.append(flag)
            arrays.gradients.append(array)
            arrays.parameters.append(leaf.parameter)
    result = Plan(gradients, leaves)
    if not paths:
        return result
    if masters is None:
        arrays.stored.extend({} for _ in paths)
    else:
        arrays.stored.extend(masters.stored(paths, arrays.parameters))
    others: list[Any] = []
    places = slots(optimizer.state, others)
    builtin = not others and is_builtin(optimizer)

    def make_layout() -> _Layout:
        structure = _structure(gradients, set(paths))
        return _Layout(paths, is_scaled, structure, builtin)

    if not builtin:
        try:
            applied = bool(inspected.applied.item())
        except (ValueError, RuntimeError):
            pass  # Inside mx.compile: selected on the device.
        else:
            if applied:
                new = _run_on_host(optimizer, make_layout(), arrays)
                _add_new(result, paths, new, masters)
            return result
        run: Callable[..., Any] = partial(_run, make_layout(), optimizer)
    else:
        layout = (paths, is_scaled, split_paths(optimizer, gradients))
        run = autocompiled(lambda: partial(_run, make_layout()), optimizer, layout)
    state, new = run(
        [box[key] for _, box, key in places],
        scheduled_values(optimizer),
        inspected.applied,
        arrays,
    )
    for (_, box, key), x in zip(places, state, strict=True):
        result.writes.append((box, key, x))
    _add_new(result, paths, new, masters)
    return result


def _structure(gradients: Any, paths: set[str]) -> Any:
    # An empty dict is how MLX's own trees mark a leaf that is not trained.
    return tree_map_with_path(lambda path, _: path if path in paths else {}, gradients)


def _add_new(
    result: Plan,
    paths: list[str],
    new: list[tuple[mx.array, Stored]],
    masters: Masters | None,
) -> None:
    for path, (parameter, stored) in zip(paths, new, strict=True):
        result.new[path] = parameter
        for name, x in stored.items() if masters else ():
            result.writes.append((masters.state[name], path, x))  # type: ignore[union-attr]


def _run(
    layout: _Layout,
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    applied: mx.array,
    arrays: _Arrays,
) -> tuple[list[mx.array], list[tuple[mx.array, Stored]]]:
    """Step and select on the device; the optimizer itself comes out untouched."""
    arrays = _Arrays(*arrays)
    masters = list(map(joined_master, arrays.parameters, arrays.stored))
    full = layout.tree([_alias(joined.master) for joined in masters])
    with Borrowed(optimizer, scheduled):
        places, constants = slots(optimizer.state), _constants(optimizer.state)
        given = [_alias(x) for x in state]
        commit((box, key, x) for (_, box, key), x in zip(places, given, strict=True))
        steps = [
            (part, tree, _apply(part, tree, full))
            for part, tree in _gradient_trees(optimizer, layout, arrays, applied)
        ]
        _check_same_state(optimizer, places, constants)
        flags = each_use(applied)
        state, untouched = _select_state(
            optimizer, places, state, given, flags, layout.is_builtin
        )
        stepped: dict[str, tuple[mx.array, mx.array, list[mx.array]]] = {}
        for part, tree, new in steps:
            # SGD has moments even without momentum: no kernel has to read them.
            moments = _arrays_by_owner(part.state, untouched)
            after = dict(flatten(new))
            for path, gradient in flatten(tree):
                stepped[path] = after[path], gradient, moments.get(path, [])
        new = []
        for path, old, stored, joined in zip(
            layout.paths, arrays.parameters, arrays.stored, masters, strict=True
        ):
            _check_shape(path, old, stepped[path][0])
            new.append(
                _select_parameter(old, stored, joined, next(flags), *stepped[path])
            )
        return state, new


def _run_on_host(
    optimizer: Optimizer, layout: _Layout, arrays: _Arrays
) -> list[tuple[mx.array, Stored]]:
    """Step for good: exact for every optimizer, whatever it keeps and does."""
    masters = map(joined_master, arrays.parameters, arrays.stored)
    full = layout.tree([_alias(joined.master) for joined in masters])
    saved = snapshot(optimizer.state)
    new: dict[str, mx.array] = {}
    try:
        for part, tree in _gradient_trees(optimizer, layout, arrays, None):
            new.update(flatten(_apply(part, tree, full)))
    except BaseException:
        restore(saved)
        raise
    results = []
    for path, old, stored in zip(
        layout.paths, arrays.parameters, arrays.stored, strict=True
    ):
        _check_shape(path, old, new[path])
        rounded = new[path].astype(old.dtype)
        results.append((rounded, entries(new[path], rounded, stored)))
    return results


def _gradient_trees(
    optimizer: Optimizer, layout: _Layout, arrays: _Arrays, applied: mx.array | None
) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each single optimizer with the tree of its unscaled gradients."""
    is_scaled = dict(zip(layout.paths, layout.is_scaled, strict=True))
    inverse, clip = arrays.inverse, arrays.clip
    factor = inverse * clip if inverse is not None and clip is not None else inverse
    # One by one, and joined by path: tree_merge in MultiOptimizer.apply_gradients fails
    # where a list has a frozen module in a gap.
    for part, tree in parts(optimizer, layout.tree(arrays.gradients)):
        factors = {True: _factors(part, factor), False: _factors(part, clip)}

        def unscale(
            path: str, g: mx.array, factors: dict[bool, Iterator[mx.array]] = factors
        ) -> mx.array:
            g, times = to_float32(g), next(factors[is_scaled[path]], None)
            if times is not None:
                times = mx.broadcast_to(times, g.shape)
                g = g * (times.astype(mx.float32) if times.dtype != g.dtype else times)
            if applied is None or layout.is_builtin:
                return g
            # An SVD of NaN raises, and so may other code that is not MLX's own.
            return mx.where(applied, g, 0)

        yield part, tree_map_with_path(unscale, tree)


def _factors(optimizer: Optimizer, factor: mx.array | None) -> Iterator[mx.array]:
    """Yield what to multiply each gradient with; nothing without a factor."""
    if factor is None:
        return
    moments = _arrays_by_owner(optimizer.state, set())
    has_one_moment = all(len(own) == 1 for path, own in moments.items() if path)
    if not has_one_moment or mx.default_device() != mx.Device(mx.cpu):
        yield from each_use(factor)
    # GCC vectorises a loop with up to 10 pairs of pointers that may overlap. An update
    # with one moment and a factor has 11, unless the factor is no float32 in memory:
    # Lion takes 1.0 instead of 6.7 times as long as bare. For each leaf its own array,
    # or the cast would be computed once, as a whole array.
    for exact in each_use(factor.astype(mx.float64)):
        yield mx.depends(exact, [])


def _alias(x: mx.array) -> mx.array:
    # The same array in another Python object: ``parameter -= update`` changes the
    # object that an optimizer was given, and a skipped step needs the old value.
    return x.astype(x.dtype)


def _apply(optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
    try:
        return optimizer.apply_gradients(gradients, parameters)
    except (KeyError, IndexError) as error:
        missing = f" for {error.args[0]!r}" if isinstance(error, KeyError) else ""
        raise ValueError(
            f"The optimizer has no state{missing}. If the parameter was added or "
            "unfrozen after the optimizer was initialised, call "
            "init(model.trainable_parameters()) again; existing state is kept."
        ) from error


# Checks that a step can be selected against no step


def _constants(state: Any) -> list[tuple[str, str]]:
    return [(p, repr(x)) for p, x in flatten(state) if not isinstance(x, mx.array)]


def _check_same_state(
    optimizer: Optimizer, places: list[Slot], constants: list[tuple[str, str]]
) -> None:
    before = {path for path, *_ in places}
    after = {path for path, *_ in slots(optimizer.state)}
    if before != after or _constants(optimizer.state) != constants:
        changed = [".".join(map(str, path)) for path in before ^ after]
        what = (
            f"adds or removes {changed[0]!r}" if changed else "changes a Python value"
        )
        raise TypeError(
            f"A step of {type(optimizer).__name__} {what} in its state, which a "
            "skipped step cannot undo inside mx.compile. Leave the step uncompiled, or "
            "keep arrays under the same keys from init_single() on."
        )


def _check_shape(path: str, old: mx.array, new: mx.array) -> None:
    if new.shape != old.shape:
        raise ValueError(
            f"{path!r} has shape {old.shape}, and a step would give it {new.shape}: "
            "the optimizer was initialised for another shape. Create a new optimizer "
            "for the changed model."
        )


# Selection


def _select_state(
    optimizer: Optimizer,
    places: list[Slot],
    state: list[mx.array],
    given: list[mx.array],
    flags: Iterator[mx.array],
    is_builtin: bool,
) -> tuple[list[mx.array], set[int]]:
    """Put the selected arrays into an optimizer's state, and return them.

    Also the ids of those that the step left alone.
    """
    stepped = {path: (box, key) for path, box, key in slots(optimizer.state)}
    selected, untouched = [], set()
    for (path, *_), old, alias in zip(places, state, given, strict=True):
        box, key = stepped[path]
        _check_shape(".".join(map(str, path)), old, box[key])
        # Only MLX's own optimizers are known never to change an array in place.
        if is_builtin and box[key] is alias:
            box[key] = old
            untouched.add(id(old))
        else:
            box[key] = mx.where(next(flags), box[key], old)
        selected.append(box[key])
    return selected, untouched


def _arrays_by_owner(state: Any, without: set[int]) -> dict[str, list[mx.array]]:
    """Return the arrays of a state by the path of what they belong to."""
    owned: dict[str, list[mx.array]] = {}
    for path, value in flatten(state):
        if isinstance(value, mx.array) and id(value) not in without:
            owned.setdefault(path.rpartition(".")[0], []).append(value)
    return owned


def _select_parameter(
    parameter: mx.array,
    stored: Stored,
    old: Joined,
    applied: mx.array,
    new: mx.array,
    gradient: mx.array,
    moments: list[mx.array],
) -> tuple[mx.array, Stored]:
    """Return a new parameter, or the old one, and the same of its master.

    ``mx.compile`` fuses from the outermost node inwards, up to 11 deep, and takes a
    node only once everything that uses it is in. So parameter, moments and master get a
    common root: they become operands of a select that is never taken, or only where the
    step is skipped. One kernel per parameter instead of five.
    """
    moments = [x for x in moments if x.shape == parameter.shape]
    dtype, rounded = parameter.dtype, new.astype(parameter.dtype)
    if "remainders" in stored:
        # Deeper than 11: what lies far inside gets a short path of its own, walked
        # after the long one.
        remainder = entries(new, rounded, stored)["remainders"]
        remainder = mx.where(applied, remainder, stored["remainders"])
        never = mx.array(False)
        inside = mx.where(
            never,
            _never_of([*moments[::-1], gradient], never),
            _never_of([old.master, *old.parts], never),
        )
        inside = mx.where(never, to_float32(rounded), inside)
        taken = mx.where(never, remainder.astype(dtype), rounded)
        skipped = mx.where(never, inside.astype(dtype), parameter)
        return mx.where(applied, taken, skipped), {"remainders": remainder}
    if stored:
        # In a skipped step too: a replaced weight is its own master.
        new = mx.where(applied, new, old.master)
        rounded = new.astype(dtype)
    # In the parameter's own dtype: a cast there and back flushes bfloat16 subnormals on
    # Apple GPUs, and changes the bits of a float16 NaN. The last moment comes
    # outermost: AdaDelta's u is computed from v.
    for moment in moments:
        parameter = mx.where(applied, moment.astype(dtype), parameter)
    weight = mx.where(applied, rounded, parameter)
    return weight, entries(new, weight, stored)


def in_one_kernel(values: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return 0-d values with a common root: one kernel to build instead of seven."""
    (name, root), *others = values.items()
    either = reduce(mx.bitwise_or, [x.astype(mx.bool_) for _, x in others])
    return values | {name: mx.where(either, root, root)}


def _never_of(values: list[mx.array], never: mx.array) -> mx.array:
    first, *rest = values
    # The last one behind a node too, or it would be reached before its turn.
    return mx.where(never, first, _never_of(rest, never)) if rest else -first
