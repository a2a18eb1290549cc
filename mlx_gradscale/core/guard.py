"""One step of an optimizer, or none: decided on the device.

``inspect`` finds out whether the gradients are finite, ``plan`` computes what a step
would write, and ``Plan`` writes all of it at once.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from .finite import is_finite_magnitude, is_floating
from .gradients import each_use
from .masters import HALF, Joined, Masters, entries, joined_master, to_float32
from .optimizers import (
    autocompiled,
    borrowed,
    is_builtin,
    parts,
    scheduled_values,
    split_paths,
)
from .ranks import Ranks
from .trees import Leaf, Writes, commit, flatten, restore, slots, snapshot

Stored = dict[str, mx.array]
# An optimizer, its unscaled gradients, and the new float32 parameters, by path.
_Stepped = tuple[Optimizer, dict[str, mx.array], dict[str, mx.array]]


class Inspected(NamedTuple):
    """The gradients as a step uses them, by path, and what is known of them."""

    gradients: dict[str, mx.array]
    # The paths of gradients that are still scaled, and one over their scale.
    scaled: set[str]
    inverse: mx.array | None
    # The factor that clips the norm.
    clip: mx.array | None
    norm: mx.array | None
    applied: mx.array


def casts_first() -> bool:
    """Return whether half gradients are unscaled in a kernel of their own.

    A cast inside the update kernel is scalar code on a CPU: 1.55 of the bare optimizer
    instead of 1.29. On a GPU the float32 copy would cost 8 bytes per parameter.
    """
    return mx.default_device() == mx.Device(mx.cpu)


def inspect(
    leaves: list[Leaf],
    ranks: Ranks,
    max_norm: mx.array | None = None,
    were_finite: mx.array | None = None,
) -> Inspected:
    """Find out, lazily, whether all gradients are finite, and how to clip them.

    ``were_finite`` is the flag of an earlier ``unscale_()``.
    """
    gradients: dict[str, mx.array] = {}
    scaled: dict[str, mx.array] = {}
    others: dict[str, mx.array] = {}
    inverse = clip = norm = None
    is_scaled: set[str] = set()
    for leaf in leaves:
        gradients[leaf.path] = leaf.gradient
        source = getattr(leaf.gradient, "source", None)
        if source is not None and inverse is None:
            inverse = source[1]
        if source is None or source[1] is not inverse:
            others[leaf.path] = leaf.gradient
            continue
        scaled[leaf.path] = source[0]
        if source[0].dtype not in HALF or not casts_first():
            gradients[leaf.path] = source[0]
            is_scaled.add(leaf.path)
    if max_norm is None:
        applied = ranks.all_finite(scaled, inverse, others, were_finite)
    else:
        # One pass gives the norm and shows whether all is finite, and clipping is a
        # factor of the unscaling. As in mlx.optimizers.clip_grad_norm.
        norm = ranks.norm(scaled, inverse, others)
        clip = mx.minimum(max_norm / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
    return Inspected(gradients, is_scaled, inverse, clip, norm, applied)


@dataclass
class Plan:
    """What a step would write, and has not written yet."""

    gradients: Any
    leaves: list[Leaf]
    # The new parameters by path.
    new: dict[str, mx.array] = field(default_factory=dict)
    # Everything else. Callers add to it.
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
    """What a compiled step is specialised to."""

    structure: Any  # the gradients' tree, with paths as leaves
    scaled: set[str]
    is_builtin: bool

    def tree(self, values: dict[str, Any]) -> Any:
        return tree_map(values.__getitem__, self.structure)


class _Arrays(NamedTuple):
    """What a step computes with, by path."""

    gradients: dict[str, mx.array]
    parameters: dict[str, mx.array]
    stored: dict[str, Stored]
    inverse: mx.array | None
    clip: mx.array | None
    applied: mx.array


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
    """
    result = Plan(gradients, leaves)
    arrays = _Arrays({}, {}, {}, inspected.inverse, inspected.clip, inspected.applied)
    for path, _, _, parameter, gradient in leaves:
        # An optimizer never steps integer parameters, not even where clipping by hand
        # has made their gradients floating.
        if is_floating(parameter) and is_floating(gradient):
            arrays.gradients[path] = inspected.gradients[path]
            arrays.parameters[path] = parameter
            arrays.stored[path] = masters.stored(path, parameter) if masters else {}
    if not arrays.gradients:
        return result
    others: list[Any] = []
    places = slots(optimizer.state, others)
    is_own = not others and is_builtin(optimizer)

    def make_layout() -> _Layout:
        # An empty dict is how MLX's own trees mark a leaf that is not trained.
        structure = tree_map_with_path(
            lambda path, _: path if path in arrays.parameters else {}, gradients
        )
        return _Layout(structure, inspected.scaled, is_own)

    if is_own:
        split = split_paths(optimizer, gradients)
        traced_for = list(arrays.gradients), inspected.scaled, split
        run = autocompiled(lambda: partial(_run, make_layout()), optimizer, traced_for)
    else:
        run = partial(_run, make_layout(), optimizer)
    is_applied = None
    if not is_own:
        # Inside mx.compile there is no value.
        with suppress(ValueError, RuntimeError):
            is_applied = bool(inspected.applied.item())
    state: list[mx.array] = []
    new: dict[str, tuple[mx.array, Stored]] = {}
    if is_applied is None:
        old = [box[key] for _, box, key in places]
        state, new = run(old, scheduled_values(optimizer), arrays)
    elif is_applied:
        new = _run_on_host(make_layout(), optimizer, arrays)
    for (_, box, key), x in zip(places, state, strict=False):
        result.writes.append((box, key, x))
    for path, (parameter, stored) in new.items():
        result.new[path] = parameter
        for name, x in stored.items():
            result.writes.append((masters.state[name], path, x))  # type: ignore[union-attr]
    return result


def _run(
    layout: _Layout,
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    arrays: _Arrays,
) -> tuple[list[mx.array], dict[str, tuple[mx.array, Stored]]]:
    """Step and select on the device; the optimizer itself comes out untouched."""
    arrays = _Arrays(*arrays)
    with borrowed(optimizer, scheduled):
        places, before = slots(optimizer.state), _signature(optimizer.state)
        given = [_alias(x) for x in state]
        commit((box, key, x) for (_, box, key), x in zip(places, given, strict=True))
        masters, steps = _step(layout, optimizer, arrays, is_selected=True)
        after = _signature(optimizer.state)
        if before != after:
            changed = before.keys() ^ after.keys()
            arrays_changed = [path for path in changed if not (before | after)[path]]
            what = "changes a Python value"
            if arrays_changed:
                what = f"adds or removes {arrays_changed[0]!r}"
            raise TypeError(
                f"A step of {type(optimizer).__name__} {what} in its state, so it "
                "cannot be skipped inside mx.compile. Do not compile the step, or "
                "create all keys in init_single()."
            )
        flags, untouched = each_use(arrays.applied), set()
        selected: list[mx.array] = []
        now = {where: (box, key) for where, box, key in slots(optimizer.state)}
        for (where, *_), old, alias in zip(places, state, given, strict=True):
            box, key = now[where]
            _check_shape(".".join(map(str, where)), old, box[key])
            # Only MLX's own optimizers are known never to change an array in place.
            if layout.is_builtin and box[key] is alias:
                box[key] = old
                untouched.add(id(old))
            else:
                box[key] = mx.where(next(flags), box[key], old)
            selected.append(box[key])
        new = {}
        for part, gradients, stepped in steps:
            # SGD has moments even without momentum: no kernel has to read them.
            moments = _arrays_by_owner(part.state, untouched)
            for path, gradient in gradients.items():
                old_values = arrays.parameters[path], arrays.stored[path], masters[path]
                new_values = stepped[path], gradient, moments.get(path, [])
                new[path] = _select_parameter(*old_values, next(flags), *new_values)
        return selected, new


def _run_on_host(
    layout: _Layout, optimizer: Optimizer, arrays: _Arrays
) -> dict[str, tuple[mx.array, Stored]]:
    """Step for good: exact for every optimizer, whatever it keeps and does."""
    saved = snapshot(optimizer.state)
    try:
        _, steps = _step(layout, optimizer, arrays, is_selected=False)
    except BaseException:
        restore(saved)
        raise
    new = {}
    for _, _, stepped in steps:
        for path, x in stepped.items():
            rounded = x.astype(arrays.parameters[path].dtype)
            new[path] = rounded, entries(x, rounded, arrays.stored[path])
    return new


def _step(
    layout: _Layout, optimizer: Optimizer, arrays: _Arrays, *, is_selected: bool
) -> tuple[dict[str, Joined], list[_Stepped]]:
    """Return the master weights, and what each single optimizer makes of them."""
    masters = {
        path: joined_master(parameter, arrays.stored[path])
        for path, parameter in arrays.parameters.items()
    }
    full = layout.tree({path: _alias(x.master) for path, x in masters.items()})
    inverse, clip = arrays.inverse, arrays.clip
    factor = inverse * clip if inverse is not None and clip is not None else inverse
    steps: list[_Stepped] = []
    # One by one, and joined by path: tree_merge in MultiOptimizer.apply_gradients fails
    # where a list has a frozen module in a gap.
    for part, tree in parts(optimizer, layout.tree(arrays.gradients)):
        factors = {True: _factors(part, factor), False: _factors(part, clip)}

        def unscale(
            path: str, g: mx.array, factors: dict[bool, Iterator[mx.array]] = factors
        ) -> mx.array:
            g, times = to_float32(g), next(factors[path in layout.scaled], None)
            if times is not None:
                times = mx.broadcast_to(times, g.shape)
                g = g * (times.astype(mx.float32) if times.dtype != g.dtype else times)
            if layout.is_builtin or not is_selected:
                return g
            # An SVD of NaN raises, and so may other code that is not MLX's own.
            return mx.where(arrays.applied, g, 0)

        unscaled = tree_map_with_path(unscale, tree)
        try:
            new = dict(flatten(part.apply_gradients(unscaled, full)))
        except (KeyError, IndexError) as error:
            missing = f" for {error.args[0]!r}" if isinstance(error, KeyError) else ""
            raise ValueError(
                f"The optimizer has no state{missing}. If the parameter was added or "
                "unfrozen after the optimizer was initialised, call "
                "init(model.trainable_parameters()) again; existing state is kept."
            ) from error
        for path, x in new.items():
            _check_shape(path, arrays.parameters[path], x)
        steps.append((part, dict(flatten(unscaled)), new))
    return masters, steps


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


def _signature(state: Any) -> dict[str, str]:
    return {p: "" if isinstance(x, mx.array) else repr(x) for p, x in flatten(state)}


def _check_shape(path: str, old: mx.array, new: mx.array) -> None:
    if new.shape != old.shape:
        raise ValueError(
            f"{path!r} has shape {old.shape}, and a step would give it {new.shape}: "
            "the optimizer was initialised for another shape. Create a new optimizer "
            "for the changed model."
        )


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


def _never_of(values: list[mx.array], never: mx.array) -> mx.array:
    first, *rest = values
    # The last one behind a node too, or it would be reached before its turn.
    return mx.where(never, first, _never_of(rest, never)) if rest else -first
