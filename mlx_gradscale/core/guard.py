"""Apply an optimizer step if all gradients are finite, and skip it otherwise.

``inspect`` checks whether the gradients are finite, ``plan`` computes the results of a
step, and ``Plan`` commits them all at once.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map, tree_map_with_path

from . import fusion
from .finite import all_finite_times, is_finite_magnitude
from .gradients import LazyGradient
from .masters import (
    HALF,
    Joined,
    Masters,
    check_shape,
    entries,
    joined_master,
    to_float32,
)
from .moments import dither, is_small
from .optimizers import (
    autocompiled,
    borrowed,
    is_builtin,
    scheduled_values,
    split,
    split_paths,
)
from .ranks import Ranks
from .trees import (
    Leaf,
    Writes,
    commit,
    flatten,
    is_floating,
    restore,
    slots,
    snapshot,
    walk,
)

Stored = dict[str, mx.array]


class Participant(NamedTuple):
    """An optimizer that a scaler steps, and what ``LossScaleOptimizer`` adds to it."""

    optimizer: Optimizer
    ranks: Ranks
    # Initialize the optimizer, given the gradients and the model or parameter tree.
    needs_init: Callable[[], bool]
    init: Callable[[Any], None]
    masters: Masters | None = None
    moments: mx.Dtype = mx.float32
    # The dict with "max_grad_norm" and "grad_norm"; None without clipping.
    norms: dict[str, Any] | None = None


class Inspected(NamedTuple):
    """The gradients for a step, by path, and whether and how to apply them."""

    gradients: dict[str, mx.array]
    # The paths of gradients that are still scaled, and the reciprocal of their scale.
    scaled: set[str]
    inverse: mx.array | None
    # The factor that clips the norm, and the norm; None without clipping.
    clip: mx.array | None
    norm: mx.array | None
    applied: mx.array


def inspect(
    leaves: list[Leaf], participant: Participant, were_finite: mx.array | None
) -> Inspected:
    """Lazily check whether all gradients are finite, and compute a clipping factor.

    ``were_finite`` is the flag from an earlier ``unscale_()``, if there was one. A
    gradient that was non-finite then may have been clipped since.
    """
    ranks, norms = participant.ranks, participant.norms
    casts_first = fusion.casts_first()
    gradients: dict[str, mx.array] = {}
    scaled: dict[str, mx.array] = {}
    others: dict[str, mx.array] = {}
    inverse = clip = norm = None
    is_scaled: set[str] = set()
    for leaf in leaves:
        gradients[leaf.path] = leaf.gradient
        g = leaf.gradient
        source = g.source if isinstance(g, LazyGradient) else None
        if source is not None and inverse is None:
            inverse = source[1]
        if source is None or source[1] is not inverse:
            others[leaf.path] = leaf.gradient
            continue
        scaled[leaf.path] = source[0]
        if casts_first and source[0].dtype in HALF:
            gradients[leaf.path] = fusion.end_kernel(leaf.gradient)
        else:
            gradients[leaf.path] = source[0]
            is_scaled.add(leaf.path)
    if norms is None:
        finite = all_finite_times(list(scaled.values()), inverse, list(others.values()))
        finite = finite if were_finite is None else finite & were_finite
        is_averaged = were_finite is None
        applied = finite if ranks.is_single else ranks.agree(finite, is_averaged)
    else:
        # One pass computes both the norm and the finite flag. Clipping works as in
        # mlx.optimizers.clip_grad_norm.
        norm = ranks.norm(scaled, inverse, others)
        clip = mx.minimum(norms["max_grad_norm"] / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
        if were_finite is not None:
            applied = applied & ranks.agree(were_finite, is_averaged=False)
    return Inspected(gradients, is_scaled, inverse, clip, norm, applied)


@dataclass
class Plan:
    """The results of a step, before they are committed."""

    gradients: Any
    leaves: list[Leaf]
    # The new parameters, by path.
    new: dict[str, mx.array] = field(default_factory=dict)
    # All other writes. Callers may append to the list.
    writes: Writes = field(default_factory=list)

    def commit_to_model(self) -> None:
        """Commit all writes, including the new parameters of the model."""
        for leaf in self.leaves:
            if leaf.path in self.new:
                self.writes.append((leaf.container, leaf.key, self.new[leaf.path]))
        commit(self.writes)

    def commit(self) -> Any:
        """Commit everything except the parameters, and return those as a tree."""
        commit(self.writes)
        parameters = {leaf.path: leaf.parameter for leaf in self.leaves} | self.new
        return tree_map_with_path(lambda path, _: parameters[path], self.gradients)


class _Inputs(NamedTuple):
    """The arrays that a step reads; the dicts are keyed by parameter path."""

    gradients: dict[str, mx.array]
    parameters: dict[str, mx.array]
    stored: dict[str, Stored]
    inverse: mx.array | None
    clip: mx.array | None
    applied: mx.array


def plan(
    participant: Participant, gradients: Any, leaves: list[Leaf], inspected: Inspected
) -> Plan:
    """Compute the results of a step of an initialized optimizer.

    If ``inspected.applied`` is false, the planned parameters and optimizer state are
    bit-identical to the old ones. Nothing changes until the plan is committed, except
    that an eager step of a third-party optimizer changes the optimizer's own state.
    """
    optimizer, masters = participant.optimizer, participant.masters
    result = Plan(gradients, leaves)
    if participant.norms is not None:
        result.writes.append((participant.norms, "grad_norm", inspected.norm))
    arrays = _Inputs({}, {}, {}, inspected.inverse, inspected.clip, inspected.applied)
    for path, _, _, parameter, gradient in leaves:
        # Never step integer parameters, even if clipping by hand has made their
        # gradients floating-point.
        if is_floating(parameter) and is_floating(gradient):
            arrays.gradients[path] = inspected.gradients[path]
            arrays.parameters[path] = parameter
            arrays.stored[path] = masters.stored(path, parameter) if masters else {}
    if not arrays.gradients:
        return result
    found = walk(optimizer.state)
    places = [place for place, value in found if isinstance(value, mx.array)]
    old = [box[key] for _, box, key in places]
    # An optimizer that keeps Python values in its state cannot be compiled.
    is_own = len(old) == len(found) and is_builtin(optimizer)

    def make_run() -> Callable[..., Any]:
        # A compiled step must not keep the gradients alive.
        structure = tree_map(lambda _: None, gradients)
        return partial(_run, structure, inspected.scaled, participant.moments)

    state: list[mx.array] = []
    new: dict[str, tuple[mx.array, Stored]] = {}
    if is_own:
        owners = split_paths(optimizer, gradients)
        # Arrays are passed by position, so a state in another order needs a new trace.
        order = [list(arrays.gradients), [where for where, *_ in places], owners]
        settings = inspected.scaled, participant.moments
        run = autocompiled(make_run, optimizer, (order, settings))
        state, new = run(old, scheduled_values(optimizer), arrays)
    elif (is_applied := _read(inspected.applied)) is None:  # inside mx.compile
        state, new = make_run()(optimizer, old, scheduled_values(optimizer), arrays)
    elif is_applied:
        new = _run_on_host(gradients, inspected.scaled, optimizer, arrays)
    for (_, box, key), x in zip(places, state, strict=False):
        result.writes.append((box, key, x))
    for path, (parameter, stored) in new.items():
        result.new[path] = parameter
        for name, x in stored.items():
            result.writes.append((masters.state[name], path, x))  # type: ignore[union-attr]
    return result


def _read(flag: mx.array) -> bool | None:
    """Read a flag from the device; return None for a tracer from ``mx.compile``."""
    with suppress(ValueError, RuntimeError):
        return bool(flag.item())
    return None


def _run(
    structure: Any,
    scaled: set[str],
    dtype: mx.Dtype,
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    arrays: _Inputs,
) -> tuple[list[mx.array], dict[str, tuple[mx.array, Stored]]]:
    """Step on the device, select old or new values, and roll the optimizer back.

    ``dtype`` is the dtype of the moments.
    """
    arrays = _Inputs(*arrays)
    with borrowed(optimizer, scheduled):
        places, signature = slots(optimizer.state), _signature(optimizer.state)
        given = [to_float32(x) if is_small(x, dtype) else _alias(x) for x in state]
        commit((box, key, x) for (_, box, key), x in zip(places, given, strict=True))
        masters, gradients, stepped = _step(structure, scaled, optimizer, arrays)
        if _signature(optimizer.state) != signature:
            raise TypeError(
                f"{type(optimizer).__name__} changes the keys or the Python values in "
                "its state when it steps, so a step cannot be skipped inside "
                "mx.compile. Do not compile the step, or create all keys in "
                "init_single() and store only arrays."
            )
        # A parameter and its moments share a flag, so that their kernel reads only one.
        flags = dict(zip(gradients, fusion.each_use(arrays.applied), strict=False))
        dithers = dict(zip(gradients, fusion.each_use(dither(optimizer)), strict=False))
        moments: dict[str, list[mx.array]] = {path: [] for path in gradients}
        selected: list[mx.array] = []
        now = {where: box[key] for where, box, key in slots(optimizer.state)}
        for (where, *_), old, alias in zip(places, state, given, strict=True):
            check_shape(".".join(map(str, where)), old.shape, now[where].shape)
            owner = _owner(where)
            # An unused moment, as in SGD without momentum, needs no select. Third-party
            # optimizers may modify arrays in place, so their moments are all selected.
            # The state of an empty parameter stays: Metal may abort on a kernel without
            # elements, and Adafactor would divide by zero.
            is_unused = now[where] is alias and is_builtin(optimizer)
            parameter = arrays.parameters.get(owner, old)
            if is_unused or not old.size or not parameter.size:
                selected.append(old)
                continue
            flag = flags.get(owner, arrays.applied)
            updated = now[where]
            if is_small(old, dtype):
                updated = (updated * dithers[owner]).astype(dtype)
            selected.append(mx.where(flag, updated, old))
            moments.get(owner, []).append(selected[-1])
        new = {}
        for path, gradient in gradients.items():
            arrived = stepped[path], gradient, moments[path]
            left = arrays.parameters[path], arrays.stored[path], masters[path]
            new[path] = _select(flags[path], *arrived, *left)
        return selected, new


def _run_on_host(
    structure: Any, scaled: set[str], optimizer: Optimizer, arrays: _Inputs
) -> dict[str, tuple[mx.array, Stored]]:
    """Step a third-party optimizer eagerly; restore its state if it raises."""
    saved = snapshot(optimizer.state)
    try:
        _, _, stepped = _step(structure, scaled, optimizer, arrays)
    except BaseException:
        restore(saved)
        raise
    new = {}
    for path, x in stepped.items():
        rounded = x.astype(arrays.parameters[path].dtype)
        new[path] = rounded, entries(x, rounded, arrays.stored[path])
    return new


def _step(
    structure: Any, scaled: set[str], optimizer: Optimizer, arrays: _Inputs
) -> tuple[dict[str, Joined], dict[str, mx.array], dict[str, mx.array]]:
    """Return master weights, unscaled gradients and new float32 parameters, by path."""

    def tree(values: dict[str, mx.array]) -> Any:
        # MLX's own trees mark a frozen leaf with an empty dict.
        return tree_map_with_path(lambda path, _: values.get(path, {}), structure)

    masters = {
        path: joined_master(parameter, arrays.stored[path])
        for path, parameter in arrays.parameters.items()
    }
    full = tree({path: _alias(x.master) for path, x in masters.items()})
    gradients = _unscale(scaled, optimizer, arrays)
    if not is_builtin(optimizer):
        # Pass zeros if the step is skipped: an SVD, for example, may raise on NaN.
        gradients = {p: mx.where(arrays.applied, g, 0) for p, g in gradients.items()}
    stepped: dict[str, mx.array] = {}
    # Step each optimizer separately and join by path: tree_merge in
    # MultiOptimizer.apply_gradients fails if a list has gaps for frozen modules.
    for part, own in split(optimizer, tree(gradients)):
        try:
            new = dict(flatten(part.apply_gradients(own, full)))
            for path, x in new.items():
                if x.shape != arrays.parameters[path].shape:
                    raise ValueError(f"{path!r} would change its shape to {x.shape}")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"The optimizer failed with {error!r}. If a parameter was added or "
                "unfrozen after the optimizer was initialized, call "
                "optimizer.init(model.trainable_parameters()) again. If the shape of a "
                "parameter changed, create a new optimizer."
            ) from error
        stepped |= new
    return masters, gradients, stepped


def _unscale(
    scaled: set[str], optimizer: Optimizer, arrays: _Inputs
) -> dict[str, mx.array]:
    inverse, clip = arrays.inverse, arrays.clip
    factor = inverse * clip if inverse is not None and clip is not None else inverse
    n_moments = Counter(_owner(where) for where, _, _ in slots(optimizer.state))
    has_one_moment = all(n == 1 for owner, n in n_moments.items() if owner)
    factors = {
        is_scaled: fusion.factors(each, has_one_moment)
        for is_scaled, each in ((True, factor), (False, clip))
    }
    unscaled = {}
    for path, g in arrays.gradients.items():
        g, times = to_float32(g), next(factors[path in scaled], None)
        if times is not None:
            g = g * mx.broadcast_to(times, g.shape).astype(mx.float32)
        unscaled[path] = g
    return unscaled


def _alias(x: mx.array) -> mx.array:
    # Return a new Python object, because ``parameter -= update`` modifies the object
    # passed to the optimizer, and a skipped step needs the old value.
    return x.astype(x.dtype)


def _signature(state: Any) -> dict[str, str]:
    return {p: "" if isinstance(x, mx.array) else repr(x) for p, x in flatten(state)}


def _owner(where: tuple[Any, ...]) -> str:
    """Return the path of a state array's parameter, or "" if it has none."""
    # The states of a MultiOptimizer are in a list.
    while len(where) > 2 and where[0] == "states" and isinstance(where[1], int):
        where = where[2:]
    return ".".join(map(str, where[:-1]))


def _select(
    applied: mx.array,
    new: mx.array,
    gradient: mx.array,
    moments: list[mx.array],
    parameter: mx.array,
    stored: Stored,
    old: Joined,
) -> tuple[mx.array, Stored]:
    """Select the new or the old value of a parameter and of its master weight.

    ``new`` is the float32 result of the step. The moments and the gradient are here
    only to be in the same kernel: see :mod:`~mlx_gradscale.core.fusion`.
    """
    if not parameter.size:
        return parameter, stored
    moments = [x for x in moments if x.shape == parameter.shape]
    if "remainders" in stored:
        rounded = new.astype(parameter.dtype)
        remainder = entries(new, rounded, stored)["remainders"]
        remainder = mx.where(applied, remainder, stored["remainders"])
        # From the new to the old weight, this graph is about 25 deep. The gradient is
        # innermost because it is one array until it joins, and then two, with its
        # factor: AdamW with bias correction and bfloat16 moments has 23 of 24.
        both = mx.where(applied, rounded, remainder.astype(parameter.dtype))
        others = [gradient, *old.steps, old.master, *moments, to_float32(rounded)]
        weight = fusion.select(applied, both, parameter, others)
        return weight, {"remainders": remainder}
    if stored:
        # Select in a skipped step too, because a replaced weight is its own master.
        new = mx.where(applied, new, old.master)
    # The last moment is outermost because AdaDelta computes u from v.
    rounded = new.astype(parameter.dtype)
    weight = fusion.select(applied, rounded, parameter, moments)
    return weight, entries(new, weight, stored)
