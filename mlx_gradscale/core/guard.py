"""Apply an optimizer step if all gradients are finite, and skip it otherwise.

``inspect`` checks whether the gradients are finite, and ``plan`` computes the results
of a step, which ``GradScaler`` commits all at once.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

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
    is_builtin,
    roll_back,
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
    read,
    restore,
    slots,
    snapshot,
    tree_of,
    walk,
)

ByPath = dict[str, mx.array]
Stored = dict[str, mx.array]


class Participant(NamedTuple):
    """An optimizer that a scaler steps, with what a wrapper adds to it."""

    optimizer: Optimizer
    ranks: Ranks
    masters: Masters | None = None
    moments: mx.Dtype = mx.float32
    # The dict with "max_grad_norm" and "grad_norm"; None without clipping.
    norms: dict[str, Any] | None = None


class Inputs(NamedTuple):
    """The arrays that a step reads, by parameter path, and whether to apply it."""

    # The update kernel multiplies the scaled gradients by ``inverse``.
    scaled: ByPath
    unscaled: ByPath
    parameters: ByPath
    stored: dict[str, Stored]
    inverse: mx.array | None
    # The factor that clips the norm, and the norm; None without clipping.
    clip: mx.array | None
    norm: mx.array | None
    applied: mx.array


def inspect(
    leaves: list[Leaf], participant: Participant, were_finite: mx.array | None
) -> Inputs:
    """Lazily check whether all gradients are finite, and compute a clipping factor.

    ``were_finite`` is the flag from an earlier ``unscale_()``, if there was one. A
    gradient that was non-finite then may have been clipped since.
    """
    ranks, masters, norms = participant.ranks, participant.masters, participant.norms
    casts_first = fusion.casts_first()
    # The check reads every gradient as the backward pass left it.
    sources: ByPath = {}
    others: ByPath = {}
    scaled, unscaled, parameters, stored = {}, {}, {}, {}
    inverse = clip = norm = None
    for path, _, _, parameter, gradient in leaves:
        source = gradient.source if isinstance(gradient, LazyGradient) else None
        if source is not None and inverse is None:
            inverse = source[1]
        if source is not None and source[1] is inverse:
            sources[path] = source[0]
        else:
            others[path] = gradient
        # Never step integer parameters, even if clipping by hand has made their
        # gradients floating-point.
        if not is_floating(parameter) or not is_floating(gradient):
            continue
        parameters[path] = parameter
        stored[path] = masters.stored(path, parameter) if masters else {}
        if path in others:
            unscaled[path] = gradient
        elif casts_first and sources[path].dtype in HALF:
            unscaled[path] = fusion.end_kernel(gradient)
        else:
            scaled[path] = sources[path]
    if norms is None:
        found = list(sources.values()), inverse, list(others.values())
        applied = all_finite_times(*found)
    else:
        # One pass computes both the norm and the finite flag. Clipping works as in
        # mlx.optimizers.clip_grad_norm.
        norm = ranks.norm(sources, inverse, others)
        clip = mx.minimum(norms["max_grad_norm"] / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
    if were_finite is not None:  # on this rank, before averaging
        applied = ranks.agree(applied & were_finite)
    elif norms is None and not ranks.decide_alike:
        applied = ranks.agree(applied)
    return Inputs(scaled, unscaled, parameters, stored, inverse, clip, norm, applied)


def plan(
    participant: Participant, gradients: Any, inputs: Inputs
) -> tuple[ByPath, Writes]:
    """Return the new parameters of an initialized optimizer's step, and other writes.

    If ``inputs.applied`` is false, the planned parameters and optimizer state are
    bit-identical to the old ones. Nothing changes until the writes are committed,
    except that an eager step of a third-party optimizer changes its own state.
    """
    optimizer, masters = participant.optimizer, participant.masters
    norms = participant.norms
    writes: Writes = [] if norms is None else [(norms, "grad_norm", inputs.norm)]
    if not inputs.parameters:
        return {}, writes
    found = walk(optimizer.state)
    places = [place for place, value in found if isinstance(value, mx.array)]
    old = [box[key] for _, box, key in places]

    def make_run() -> Callable[..., Any]:
        # A compiled step must not keep the gradients alive.
        structure = tree_map(lambda _: None, gradients)
        return partial(_run, structure, participant.moments)

    state: list[mx.array] = []
    new: dict[str, tuple[mx.array, Stored]] = {}
    # An optimizer that keeps Python values in its state cannot be compiled.
    if len(old) == len(found) and is_builtin(optimizer):
        # Arrays are passed by position, so another order needs a new trace.
        order = [[where for where, *_ in places], split_paths(optimizer, gradients)]
        order += [list(inputs.scaled), list(inputs.unscaled)]
        run = autocompiled(make_run, optimizer, (order, participant.moments))
        state, new = run(old, scheduled_values(optimizer), inputs)
    elif (is_applied := read(inputs.applied)) is None:  # inside mx.compile
        state, new = make_run()(optimizer, old, scheduled_values(optimizer), inputs)
    elif is_applied:
        new = _run_on_host(gradients, optimizer, inputs)
    for (_, box, key), x in zip(places, state, strict=False):
        writes.append((box, key, x))
    parameters: ByPath = {}
    for path, (parameter, stored) in new.items():
        parameters[path] = parameter
        for name, x in stored.items():
            writes.append((masters.state[name], path, x))  # type: ignore[union-attr]
    return parameters, writes


def _run(
    structure: Any,
    dtype: mx.Dtype,
    optimizer: Optimizer,
    state: list[mx.array],
    scheduled: list[dict[str, mx.array]],
    inputs: Inputs,
) -> tuple[list[mx.array], dict[str, tuple[mx.array, Stored]]]:
    """Step on the device, select old or new values, and roll the optimizer back.

    ``dtype`` is the dtype of the moments.
    """
    inputs = Inputs(*inputs)  # mx.compile passes a plain tuple
    with roll_back(optimizer, scheduled):
        places, signature = slots(optimizer.state), _signature(optimizer.state)
        given = [to_float32(x) if is_small(x, dtype) else _alias(x) for x in state]
        commit((box, key, x) for (_, box, key), x in zip(places, given, strict=True))
        masters, gradients, stepped = _step(structure, optimizer, inputs)
        if _signature(optimizer.state) != signature:
            raise TypeError(
                f"{type(optimizer).__name__} changes the keys or the Python values in "
                "its state when it steps, so a step cannot be skipped inside "
                "mx.compile. Do not compile the step, or create all keys in "
                "init_single() and store only arrays."
            )
        # A parameter and its moments share a flag, so that their kernel reads only one.
        flags = dict(zip(gradients, fusion.each_use(inputs.applied), strict=False))
        dithers = dict(zip(gradients, fusion.each_use(dither(optimizer)), strict=False))
        moments: dict[str, list[mx.array]] = {path: [] for path in gradients}
        selected: list[mx.array] = []
        now = {where: box[key] for where, box, key in slots(optimizer.state)}
        for (where, *_), old, alias in zip(places, state, given, strict=True):
            updated, owner = now[where], _owner(optimizer, where)
            check_shape(".".join(map(str, where)), old.shape, updated.shape)
            # An unused moment, as in SGD without momentum, needs no select. Third-party
            # optimizers may modify arrays in place, so their moments are all selected.
            is_unused = updated is alias and is_builtin(optimizer)
            # The state of an empty parameter stays: Metal may abort on a kernel without
            # elements, and Adafactor would divide by zero.
            is_empty = owner in gradients and not inputs.parameters[owner].size
            if is_unused or is_empty or not old.size:
                selected.append(old)
                continue
            if is_small(old, dtype):
                updated = (updated * dithers[owner]).astype(dtype)
            flag = flags.get(owner, inputs.applied)
            selected.append(mx.where(flag, updated, old))
            if owner in moments:
                moments[owner].append(selected[-1])
        new = {
            path: _select(
                flags[path],
                new=stepped[path],
                old=masters[path],
                parameter=inputs.parameters[path],
                stored=inputs.stored[path],
                fused=(gradient, moments[path]),
            )
            for path, gradient in gradients.items()
        }
        return selected, new


def _run_on_host(
    structure: Any, optimizer: Optimizer, inputs: Inputs
) -> dict[str, tuple[mx.array, Stored]]:
    """Step a third-party optimizer eagerly; restore its state if it raises."""
    saved = snapshot(optimizer.state)
    # An optimizer may change an array in place before it raises.
    commit((box, key, _alias(box[key])) for _, box, key in slots(optimizer.state))
    try:
        _, _, stepped = _step(structure, optimizer, inputs)
    except BaseException:
        restore(saved)
        raise
    new = {}
    for path, x in stepped.items():
        rounded = x.astype(inputs.parameters[path].dtype)
        new[path] = rounded, entries(x, rounded, inputs.stored[path])
    return new


def _step(
    structure: Any, optimizer: Optimizer, inputs: Inputs
) -> tuple[dict[str, Joined], dict[str, mx.array], dict[str, mx.array]]:
    """Return master weights, unscaled gradients and new float32 parameters, by path."""
    masters = {
        path: joined_master(parameter, inputs.stored[path])
        for path, parameter in inputs.parameters.items()
    }
    full = tree_of({path: _alias(x.master) for path, x in masters.items()}, structure)
    gradients = _unscale(optimizer, inputs)
    if not is_builtin(optimizer):
        # Pass zeros if the step is skipped: an SVD, for example, may raise on NaN.
        gradients = {p: mx.where(inputs.applied, g, 0) for p, g in gradients.items()}
    stepped: dict[str, mx.array] = {}
    # Step each optimizer separately and join by path: tree_merge in
    # MultiOptimizer.apply_gradients fails if a list has gaps for frozen modules.
    for part, own in split(optimizer, tree_of(gradients, structure)):
        try:
            new = dict(flatten(part.apply_gradients(own, full)))
            for path, x in new.items():
                stepped[path] = to_float32(x)
                if x.shape != inputs.parameters[path].shape:
                    raise ValueError(f"{path!r} would change its shape to {x.shape}")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"The optimizer failed with {error!r}. If a parameter was added or "
                "unfrozen after the optimizer was initialized, call "
                "optimizer.init(model.trainable_parameters()) again. If the shape of a "
                "parameter changed, create a new optimizer."
            ) from error
    return masters, gradients, stepped


def _unscale(optimizer: Optimizer, inputs: Inputs) -> ByPath:
    inverse, clip = inputs.inverse, inputs.clip
    factor = inverse * clip if inverse is not None and clip is not None else inverse
    n_moments = Counter(
        _owner(optimizer, where) for where, _, _ in slots(optimizer.state)
    )
    has_one_moment = all(n == 1 for owner, n in n_moments.items() if owner)
    unscaled = {}
    for gradients, each in ((inputs.scaled, factor), (inputs.unscaled, clip)):
        factors = None if each is None else fusion.factors(each, has_one_moment)
        for path, g in gradients.items():
            unscaled[path] = to_float32(g)
            if factors is not None:
                times = mx.broadcast_to(next(factors), g.shape).astype(mx.float32)
                unscaled[path] = unscaled[path] * times
    return unscaled


def _alias(x: mx.array) -> mx.array:
    # Return a new Python object, because ``parameter -= update`` modifies the object
    # passed to the optimizer, and a skipped step needs the old value.
    return x.astype(x.dtype)


def _signature(state: Any) -> dict[str, str]:
    return {p: "" if isinstance(x, mx.array) else repr(x) for p, x in flatten(state)}


def _owner(optimizer: Optimizer, where: tuple[Any, ...]) -> str:
    """Return the path of a state array's parameter, or "" if it has none."""
    while isinstance(optimizer, MultiOptimizer):  # its state is {"states": [...]}
        optimizer, where = optimizer.optimizers[where[1]], where[2:]
    return ".".join(map(str, where[:-1]))


def _select(
    applied: mx.array,
    new: mx.array,
    old: Joined,
    parameter: mx.array,
    stored: Stored,
    fused: tuple[mx.array, list[mx.array]],
) -> tuple[mx.array, Stored]:
    """Select the new or the old value of a parameter, and of what its master stores.

    ``new`` is the float32 result of the step, and ``old`` the master weight before it.
    ``fused`` holds the gradient and the moments, which are passed only to get them into
    the same kernel: see :mod:`~mlx_gradscale.core.fusion`.
    """
    if not parameter.size:
        return parameter, stored
    gradient, moments = fused
    moments = [x for x in moments if x.shape == parameter.shape]
    if "remainders" not in stored:
        if stored:
            # Select in a skipped step too: a replaced weight is its own master.
            new = mx.where(applied, new, old.master)
        # The last moment is outermost because AdaDelta computes u from v.
        rounded = new.astype(parameter.dtype)
        weight = fusion.select(applied, rounded, parameter, moments)
        return weight, entries(new, weight, stored)
    rounded = new.astype(parameter.dtype)
    remainder = entries(new, rounded, stored)["remainders"]
    remainder = mx.where(applied, remainder, stored["remainders"])
    # The root has to reach the remainder, so it is an input of the new weight, in a
    # branch that is never taken either. From the new to the old weight, this graph is
    # about 25 deep, so all intermediate results are among the others. The gradient is
    # innermost because it counts as one array until it joins the kernel, and as two,
    # itself and its factor, afterwards: AdamW with bias correction and bfloat16 moments
    # has 23 of 24.
    both = mx.where(applied, rounded, remainder.astype(parameter.dtype))
    others = [gradient, *old.intermediate, old.master, *moments, to_float32(rounded)]
    weight = fusion.select(applied, both, parameter, others)
    return weight, {"remainders": remainder}
