"""One step of an optimizer, or none: decided on the device.

``inspect`` finds out whether the gradients are finite, ``plan`` computes what a step
would write, and ``Plan`` writes all of it at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from .finite import is_finite_magnitude
from .gradients import Source, each_use
from .masters import HALF, Joined, Masters, joined_master, remainder_of, to_float32
from .optimizers import (
    Borrowed,
    autocompiled,
    check_supported,
    initialize,
    is_builtin,
    needs_init,
    parts,
    scheduled_values,
)
from .ranks import Ranks
from .trees import Leaf, Slot, Writes, commit, flatten, restore, slots, snapshot

Stored = dict[str, mx.array]


class Inspected(NamedTuple):
    """Gradients as a step uses them, one array per leaf, and what is known of them."""

    arrays: list[mx.array]
    # Which arrays are scaled, and one over their scale.
    is_scaled: tuple[bool, ...]
    inverse: mx.array | None
    # By what all of them are multiplied to clip their norm.
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
    inverse = next((source.inverse for source in sources if source), None)
    arrays, flags = [], []
    for leaf, source in zip(leaves, sources, strict=True):
        is_scaled = source is not None and source.inverse is inverse
        arrays.append(source.scaled if source and is_scaled else leaf.gradient)
        flags.append(is_scaled)
    clip = norm = None
    if max_norm is None:
        applied = ranks.all_finite(arrays, flags, inverse)
    else:
        # One pass gives the norm and shows whether all is finite, and clipping is a
        # factor of the unscaling. As in mlx.optimizers.clip_grad_norm.
        paths = [leaf.path for leaf in leaves]
        norm = ranks.norm(paths, arrays, flags, inverse)
        clip = mx.minimum(max_norm / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
    if mx.default_device() == mx.Device(mx.cpu):
        # A cast inside the update kernel is scalar code on a CPU: 1.55 of the bare
        # optimizer instead of 1.29. On a GPU the float32 copy would cost 8 bytes.
        for i, leaf in enumerate(leaves):
            if flags[i] and arrays[i].dtype in HALF and arrays[i] is not leaf.gradient:
                arrays[i], flags[i] = leaf.gradient, False
    return Inspected(arrays, tuple(flags), inverse, clip, norm, applied)


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
    new: dict[str, mx.array]
    writes: Writes

    def commit_to_model(self) -> None:
        """Write everything, the new parameters to where the old ones are."""
        new = [
            (leaf.container, leaf.key, self.new[leaf.path])
            for leaf in self.leaves
            if leaf.path in self.new
        ]
        commit(new + self.writes)

    def commit(self) -> Any:
        """Write everything but the parameters; return them in the gradients' tree."""
        commit(self.writes)
        old = {leaf.path: leaf.parameter for leaf in self.leaves}
        return tree_map_with_path(
            lambda path, _: self.new.get(path, old[path]), self.gradients
        )


def plan(
    optimizer: Optimizer,
    gradients: Any,
    leaves: list[Leaf],
    inspected: Inspected,
    masters: Masters | None = None,
) -> Plan:
    """Plan ``optimizer.apply_gradients`` on float32, selected by ``inspected.applied``.

    Where it is false, parameters and optimizer state come out bit-identical. Each new
    parameter has its old dtype.

    Args:
        optimizer (Optimizer): Any optimizer of ``mlx.optimizers`` or derived from it.
        gradients (Any): The tree that ``leaves`` were matched from.
        leaves (list): The matched leaves.
        inspected (Inspected): From :func:`inspect`.
        masters (Masters, optional): Master weights of half-precision parameters.
    """
    check_supported(optimizer)
    # An optimizer never steps integer parameters, not even where clipping by hand has
    # made their gradients floating.
    dtypes = {leaf.parameter.dtype for leaf in leaves}
    dtypes |= {leaf.gradient.dtype for leaf in leaves}
    floating = {dtype for dtype in dtypes if mx.issubdtype(dtype, mx.inexact)}
    trained = [
        i
        for i, leaf in enumerate(leaves)
        if leaf.parameter.dtype in floating and leaf.gradient.dtype in floating
    ]
    result = Plan(gradients, leaves, {}, [])
    if not trained:
        return result
    make_tree = partial(_tree_of, gradients, leaves, trained)
    if needs_init(optimizer):
        initialize(optimizer, make_tree([leaves[i].parameter for i in trained]))
    step = _Step(
        [leaves[i].path for i in trained],
        tuple(inspected.is_scaled[i] for i in trained),
        make_tree,
        is_builtin(optimizer),
    )
    arrays = (
        [inspected.arrays[i] for i in trained],
        [leaves[i].parameter for i in trained],
        [
            masters.stored(leaves[i].path, leaves[i].parameter) if masters else {}
            for i in trained
        ],
        inspected.inverse,
        inspected.clip,
    )
    if not step.is_builtin:
        try:
            applied = bool(inspected.applied.item())
        except (ValueError, RuntimeError):
            pass  # Inside mx.compile: selected on the device.
        else:
            new = step.run_on_host(optimizer, *arrays) if applied else []
            return _with_new(result, step.paths, new, masters)
    places = slots(optimizer.state)
    if step.is_builtin:
        run = autocompiled(step.compilable, optimizer, (step.paths, step.is_scaled))
    else:
        run = partial(step.run, optimizer)
    state, new = run(
        [box[key] for _, box, key in places],
        scheduled_values(optimizer),
        inspected.applied,
        *arrays,
    )
    result.writes += [
        (box, key, x) for (_, box, key), x in zip(places, state, strict=True)
    ]
    return _with_new(result, step.paths, new, masters)


def _with_new(
    result: Plan,
    paths: list[str],
    new: list[tuple[mx.array, Stored]],
    masters: Masters | None,
) -> Plan:
    for path, (parameter, stored) in zip(paths, new, strict=False):
        result.new[path] = parameter
        if masters and stored:
            result.writes += masters.writes(path, stored, parameter)
    return result


def _tree_of(
    gradients: Any, leaves: list[Leaf], trained: list[int], values: list[Any]
) -> Any:
    """Return values in the structure of the gradients, {} where nothing is trained."""
    by_path = {leaves[i].path: x for i, x in zip(trained, values, strict=True)}
    return tree_map_with_path(lambda path, _: by_path.get(path, {}), gradients)


@dataclass
class _Step:
    """One step over a fixed set of leaves: what a compiled step is specialised to."""

    paths: list[str]
    is_scaled: tuple[bool, ...]
    make_tree: Callable[[list[Any]], Any]
    is_builtin: bool

    def compilable(self) -> Callable[..., Any]:
        """Return :meth:`run` of a step that keeps no arrays alive."""
        structure = self.make_tree(self.paths)
        return _Step(
            self.paths, self.is_scaled, partial(_fill, structure, self.paths), True
        ).run

    def run(
        self,
        optimizer: Optimizer,
        state: list[mx.array],
        scheduled: list[dict[str, mx.array]],
        applied: mx.array,
        gradients: list[mx.array],
        parameters: list[mx.array],
        stored: list[Stored],
        inverse: mx.array | None,
        clip: mx.array | None,
    ) -> tuple[list[mx.array], list[tuple[mx.array, Stored]]]:
        """Step and select on the device; the optimizer itself comes out untouched."""
        old = list(map(joined_master, parameters, stored))
        full = self.make_tree([_alias(x.master) for x in old])
        before = dict(
            zip(self.paths, zip(parameters, stored, old, strict=True), strict=True)
        )
        with Borrowed(optimizer, scheduled):
            places = slots(optimizer.state)
            constants = _constants(optimizer.state)
            given = [_alias(x) for x in state]
            commit(
                (box, key, x) for (_, box, key), x in zip(places, given, strict=True)
            )
            flags = each_use(applied)
            results: dict[str, tuple[mx.array, Stored]] = {}
            steps = [
                (part, tree, _apply(part, tree, full))
                for part, tree in self._trees(
                    optimizer, gradients, inverse, clip, applied
                )
            ]
            _check_same_state(optimizer, places, constants)
            selected, untouched = _select_state(
                optimizer, places, state, given, flags, self.is_builtin
            )
            for part, tree, new in steps:
                # SGD has moments even without momentum: no kernel has to read them.
                moments = _arrays_by_owner(part.state, untouched)
                after = dict(flatten(new))
                for path, gradient in flatten(tree):
                    parameter, kept, joined = before[path]
                    _check_shape(path, parameter, after[path])
                    results[path] = _select_parameter(
                        parameter,
                        kept,
                        joined,
                        after[path],
                        next(flags),
                        gradient,
                        [
                            x
                            for x in moments.get(path, [])
                            if x.shape == parameter.shape
                        ],
                    )
            return selected, [results[path] for path in self.paths]

    def run_on_host(
        self,
        optimizer: Optimizer,
        gradients: list[mx.array],
        parameters: list[mx.array],
        stored: list[Stored],
        inverse: mx.array | None,
        clip: mx.array | None,
    ) -> list[tuple[mx.array, Stored]]:
        """Step for good, whatever the optimizer keeps and does."""
        full = self.make_tree(
            [
                _alias(joined_master(*x).master)
                for x in zip(parameters, stored, strict=True)
            ]
        )
        saved = snapshot(optimizer.state)
        new: dict[str, mx.array] = {}
        try:
            for part, tree in self._trees(optimizer, gradients, inverse, clip, None):
                new.update(flatten(_apply(part, tree, full)))
        except BaseException:
            restore(saved)
            raise
        return [
            (x.astype(old.dtype), _stored_for(kept, x, old.dtype))
            for x, old, kept in zip(
                (new[path] for path in self.paths), parameters, stored, strict=True
            )
        ]

    def _trees(
        self,
        optimizer: Optimizer,
        gradients: list[mx.array],
        inverse: mx.array | None,
        clip: mx.array | None,
        applied: mx.array | None,
    ) -> Iterator[tuple[Optimizer, Any]]:
        """Yield each single optimizer with the tree of its unscaled gradients."""
        factor = inverse
        if inverse is not None and clip is not None:
            factor = inverse * clip
        is_scaled = dict(zip(self.paths, self.is_scaled, strict=True))
        # One by one, and joined by path: tree_merge in MultiOptimizer.apply_gradients
        # fails where a list has a frozen module in a gap.
        for part, tree in parts(optimizer, self.make_tree(gradients)):
            scaled, others = _factors(part, factor), _factors(part, clip)

            def unscale(path: str, g: mx.array) -> mx.array:
                times = next(scaled if is_scaled[path] else others, None)  # noqa: B023
                g = to_float32(g)
                g = g if times is None else g * _broadcast(times, g.shape)
                # An SVD of NaN raises, and so may other code that is not MLX's own.
                return (
                    g if applied is None or self.is_builtin else mx.where(applied, g, 0)
                )

            yield part, tree_map_with_path(unscale, tree)


def _fill(structure: Any, paths: list[str], values: list[Any]) -> Any:
    by_path = dict(zip(paths, values, strict=True))
    return tree_map(lambda path: by_path[path], structure)


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


def _broadcast(factor: mx.array, shape: tuple[int, ...]) -> mx.array:
    factor = mx.broadcast_to(factor, shape)
    return factor.astype(mx.float32) if factor.dtype == mx.float64 else factor


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
    name = type(optimizer).__name__
    advice = (
        "A skipped step cannot undo that inside mx.compile. Leave the step "
        "uncompiled, or keep arrays under the same keys from init_single() on."
    )
    before = {path for path, *_ in places}
    after = {path for path, *_ in slots(optimizer.state)}
    for path in before ^ after:
        verb = "removes" if path in before else "adds"
        where = ".".join(map(str, path))
        raise TypeError(f"A step of {name} {verb} {where!r} in its state. {advice}")
    if _constants(optimizer.state) != constants:
        raise TypeError(
            f"A step of {name} changes a Python value in its state. {advice}"
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
        new = box[key]
        _check_shape(".".join(map(str, path)), old, new)
        # Only MLX's own optimizers are known never to change an array in place.
        if is_builtin and new is alias:
            box[key] = old
            untouched.add(id(old))
        else:
            box[key] = mx.where(next(flags), new, old)
        selected.append(box[key])
    return selected, untouched


def _arrays_by_owner(state: Any, without: set[int]) -> dict[str, list[mx.array]]:
    """Return the arrays of a state by the path of what they belong to."""
    owned: dict[str, list[mx.array]] = {}
    for path, value in flatten(state):
        if isinstance(value, mx.array) and id(value) not in without:
            owned.setdefault(path.rpartition(".")[0], []).append(value)
    return owned


def _stored_for(kept: Stored, master: mx.array, dtype: mx.Dtype) -> Stored:
    if "remainders" in kept:
        return {"remainders": remainder_of(master, master.astype(dtype))}
    return {"masters": master} if kept else {}


def _select_parameter(
    parameter: mx.array,
    stored: Stored,
    old: Joined,
    new: mx.array,
    applied: mx.array,
    gradient: mx.array,
    moments: list[mx.array],
) -> tuple[mx.array, Stored]:
    """Return a new parameter, or the old one, and the same of its master.

    ``mx.compile`` fuses from the outermost node inwards, up to 11 deep, and takes a
    node only once everything that uses it is in. So parameter, moments and master get a
    common root: they become operands of a select that is never taken, or only where the
    step is skipped. One kernel per parameter instead of five.
    """
    rounded = new.astype(parameter.dtype)
    if "remainders" in stored:
        # Deeper than 11: what lies far inside gets a short path of its own, walked
        # after the long one.
        value = to_float32(rounded)
        remainder = mx.where(applied, remainder_of(new, rounded), stored["remainders"])
        never = mx.array(False)
        deep = _never_of([old.master, *old.parts], never)
        inside = mx.where(never, _never_of([*moments[::-1], gradient], never), deep)
        inside = mx.where(never, value, inside)
        taken = mx.where(never, remainder.astype(parameter.dtype), rounded)
        skipped = mx.where(never, inside.astype(parameter.dtype), parameter)
        return mx.where(applied, taken, skipped), {"remainders": remainder}
    if stored:
        # In a skipped step too: a replaced weight is its own master.
        new = mx.where(applied, new, old.master)
        rounded, stored = new.astype(parameter.dtype), {"masters": new}
    # In the parameter's own dtype: a cast there and back flushes bfloat16 subnormals on
    # Apple GPUs, and changes the bits of a float16 NaN. The last moment comes
    # outermost: AdaDelta's u is computed from v.
    for moment in moments:
        parameter = mx.where(applied, moment.astype(parameter.dtype), parameter)
    return mx.where(applied, rounded, parameter), stored


def _never_of(values: list[mx.array], never: mx.array) -> mx.array:
    first, *rest = values
    # The last one behind a node too, or it would be reached before its turn.
    return mx.where(never, first, _never_of(rest, never)) if rest else -first
