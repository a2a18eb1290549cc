"""Apply an optimizer step if all gradients are finite, and skip it otherwise.

``inspect`` checks whether the gradients are finite, ``update_parameter`` updates one
parameter, and ``plan`` calls it for all of them. ``GradScaler`` commits the results.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from . import fusion
from .finite import all_finite_times, is_finite_magnitude
from .gradients import LazyGradient
from .masters import HALF, Dither, Result, Storage, Stored, to_float32
from .optimizers import (
    advance,
    autocompiled,
    is_builtin,
    overrides_apply_gradients,
    own_values,
    scheduled_values,
    single_optimizers,
    split,
)
from .ranks import Ranks
from .trees import (
    FLOATING,
    Leaf,
    Writes,
    commit,
    flatten,
    get_at,
    read,
    restore,
    slots,
    snapshot,
    tree_of,
    walk,
)

ByPath = dict[str, mx.array]


class Participant(NamedTuple):
    """An optimizer that a scaler steps, with what a wrapper adds to it."""

    optimizer: Optimizer
    ranks: Ranks
    storage: Storage = Storage()
    # The state of a wrapper, which has master weights; None without a wrapper.
    state: dict[str, Any] | None = None
    clips: bool = False
    # Whether the gradients should come from a scaled loss; it only decides a warning.
    scales_loss: bool = True


class Row(NamedTuple):
    """What a step reads for one parameter, besides its moments."""

    gradient: mx.array
    # Whether the gradient is as the backward pass left it.
    is_scaled: bool
    parameter: mx.array
    stored: Stored


class Inputs(NamedTuple):
    """What a step reads: a row for each parameter by path, and scalars."""

    rows: dict[str, Row]
    # What unscales a gradient. The norm, and the factor that clips it, if there is one.
    inverse: mx.array | None
    norm: mx.array | None
    clip: mx.array | None
    # Whether to apply the step.
    applied: mx.array


def inspect(
    leaves: list[Leaf], participant: Participant, were_finite: mx.array | None
) -> Inputs:
    """Lazily check whether all gradients are finite, and compute a clipping factor.

    ``were_finite`` is the flag from an earlier ``unscale_()``, if there was one. A
    gradient that was non-finite then may have been clipped since.
    """
    _, ranks, storage, state, clips, _ = participant
    casts_first = fusion.casts_first()
    # The check reads lazy gradients as the backward pass left them, others as they are.
    scaled: ByPath = {}
    others: ByPath = {}
    rows = {}
    inverse = clip = norm = None
    for path, _, _, parameter, gradient in leaves:
        source = gradient.source if isinstance(gradient, LazyGradient) else None
        if source is not None and inverse is None:
            inverse = source[1]
        is_scaled = source is not None and source[1] is inverse
        if source is not None and is_scaled:
            scaled[path] = source[0]
        else:
            others[path] = gradient
        # Never step integer parameters, even if clipping by hand has made their
        # gradients floating-point.
        if FLOATING.issuperset((parameter.dtype, gradient.dtype)):
            stored = storage.get(state, path, parameter) if state else {}
            if is_scaled and casts_first and scaled[path].dtype in HALF:
                gradient, is_scaled = fusion.end_kernel(gradient), False
            given = scaled[path] if is_scaled else gradient
            rows[path] = Row(given, is_scaled, parameter, stored)
    if state is None or not clips:
        found = [*scaled.values()], inverse, [*others.values()]
        applied = all_finite_times(*found)
    else:
        # One pass computes both the norm and the finite flag. Clipping works as in
        # mlx.optimizers.clip_grad_norm.
        norm = ranks.norm(scaled, inverse, others)
        clip = mx.minimum(state["max_grad_norm"] / (norm + 1e-6), 1.0)
        applied = is_finite_magnitude(norm)
    if were_finite is not None:  # on this rank, before averaging
        applied = ranks.agree(applied & were_finite)
    elif not clips and not ranks.decide_alike:
        applied = ranks.agree(applied)
    return Inputs(rows, inverse, norm, clip, applied)


def update_parameter(
    optimizer: Optimizer,
    storage: Storage,
    applied: mx.array,
    dither: Dither,
    gradient: mx.array,
    parameter: mx.array,
    stored: Stored,
    moments: Any,
) -> tuple[mx.array, Stored, list[mx.array]]:
    """Return the new parameter, what stores its master weight, and the new moments.

    If ``applied`` is false, all of them are bit-identical to the old ones. Only a
    weight that the user has replaced becomes its own master in any case.
    """
    old = {name: x for name, x in flatten(moments) if isinstance(x, mx.array)}
    # Metal may abort on a kernel without elements, and Adafactor would divide by zero.
    if not parameter.size:
        return parameter, stored, list(old.values())
    master = storage.join(parameter, stored)
    state = storage.decode(optimizer, tree_map(_alias, moments))
    given = dict(flatten(state))
    new = optimizer.apply_single(gradient, _alias(master.master), state)
    updated = dict(flatten(state))
    _check_keys(optimizer, given, updated)
    _check_shape("the parameter", parameter, new)
    # An unused moment, as in SGD without momentum, needs no select. Third-party
    # optimizers may modify arrays in place, so their moments are all selected.
    is_own = is_builtin(optimizer)
    changed = {k: x for k, x in updated.items() if not (is_own and x is given[k])}
    encoded = storage.encode(optimizer, parameter.shape, changed, dither)
    selected = {}
    for name, x in old.items():
        if name in changed:
            _check_shape(repr(name), x, encoded.moments[name])
        if name in changed and x.size:
            selected[name] = mx.where(applied, encoded.moments[name], x)
    own = [name for name, x in selected.items() if x.shape == parameter.shape]
    before, after = ([arrays[name] for name in own] for arrays in (given, selected))
    steps = gradient, before, encoded.intermediate, after
    result = Result(optimizer, to_float32(new), master, parameter, stored, *steps)
    weight, stored = storage.select(applied, result, dither)
    return weight, stored, list((old | selected).values())


def _alias(x: Any) -> Any:
    # Return a new Python object, because ``parameter -= update`` modifies the object
    # passed to the optimizer, and a skipped step needs the old value.
    return x.astype(x.dtype) if isinstance(x, mx.array) else x


def _check_shape(what: str, old: mx.array, new: mx.array) -> None:
    if new.shape != old.shape:
        raise ValueError(f"{what} would change its shape to {new.shape}")


def _check_keys(optimizer: Optimizer, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise if a step has changed the keys or the Python values in a state."""
    before, after = (
        {key: "" if isinstance(x, mx.array) else repr(x) for key, x in values.items()}
        for values in (old, new)
    )
    if before != after:
        _refuse_to_compile(optimizer)


def _refuse_to_compile(optimizer: Optimizer) -> NoReturn:
    raise TypeError(
        f"{type(optimizer).__name__} overrides apply_gradients(), or changes the keys "
        "or the Python values in its state when it steps, so a step cannot be skipped "
        "inside mx.compile. Do not compile the step, or create all keys in "
        "init_single() and store only arrays."
    )


def plan(
    participant: Participant, gradients: Any, inputs: Inputs
) -> tuple[ByPath, Writes]:
    """Return the new parameters of an initialized optimizer's step, and other writes.

    Nothing changes until the writes are committed, except that an eager step of a
    third-party optimizer changes its own state.
    """
    writes: Writes = []
    state = participant.state
    if state is not None and participant.clips:
        writes.append((state, "grad_norm", inputs.norm))
    new: dict[str, tuple[mx.array, Stored]] = {}
    if inputs.rows:
        applied = None if is_builtin(participant.optimizer) else read(inputs.applied)
        if applied is None:  # one of MLX's own optimizers, or inside mx.compile
            new = _step_on_device(participant, gradients, inputs, writes)
        elif applied:
            new = _step_on_host(participant, gradients, inputs)
    parameters: ByPath = {}
    for path, (parameter, stored) in new.items():
        parameters[path] = parameter
        for name, x in stored.items():
            writes.append((state[name], path, x))  # type: ignore[index]
    return parameters, writes


def _step_on_device(
    participant: Participant, gradients: Any, inputs: Inputs, writes: Writes
) -> dict[str, tuple[mx.array, Stored]]:
    """Update all parameters, and plan the writes to the optimizer's state."""
    optimizer, storage = participant.optimizer, participant.storage
    parts, values, scheduled = [], [], []
    moments: list[dict[str, Any]] = []
    for part, tree in split(optimizer, gradients):
        parts.append(part)
        values.append(own_values(part))
        scheduled.append(scheduled_values(part))
        moments.append({})
        for (keys, _, _), _ in walk(tree):
            path = ".".join(map(str, keys))
            if path in inputs.rows:
                try:
                    moments[-1][path] = get_at(keys, part.state)
                except (KeyError, IndexError) as error:
                    raise _failure(path, error) from error
    found = slots(moments)
    run: Callable[..., Any] = partial(_run, storage)
    if is_builtin(optimizer):
        # Arrays are passed by position, so another order needs a new trace.
        order = list(map(itemgetter(0), found)), list(map(list, values))
        run = autocompiled(run, optimizer, (order, list(inputs.rows), storage))
    else:
        run = partial(run, optimizer)
    new: dict[str, tuple[mx.array, Stored]]
    new, selected, others = run(inputs, moments, values, scheduled)
    for (_, box, key), x in zip(found, selected, strict=True):
        writes.append((box, key, x))
    for part, changed in zip(parts, others, strict=True):
        writes += zip(repeat(part.state), changed, changed.values(), strict=False)
    return new


def _run(
    storage: Storage,
    optimizer: Optimizer,
    inputs: Inputs,
    moments: list[dict[str, Any]],
    values: list[dict[str, Any]],
    scheduled: list[dict[str, mx.array]],
) -> tuple[
    dict[str, tuple[mx.array, Stored]], list[mx.array], list[dict[str, mx.array]]
]:
    """Return all parameters, all moments in order, and what else is in the states.

    The lists have an entry for each single optimizer.
    """
    inputs = Inputs(*inputs)  # mx.compile passes plain tuples
    has_one_moment = all(len(x) == 1 for own in moments for x in own.values())
    unscale = _unscaler(inputs, has_one_moment)
    done: list[mx.array] = []
    # A parameter and its moments share a flag, so that their kernel reads only one.
    flags = fusion.each_use(inputs.applied)
    dithers = [fusion.each_use(x) for x in storage.dither(values[0]["step"] + 1)]
    new, changed, others = {}, [], []
    parts = zip(single_optimizers(optimizer), moments, values, scheduled, strict=True)
    for part, own, old, at_this_step in parts:
        if overrides_apply_gradients(part):
            _refuse_to_compile(part)
        aliases = {key: _alias(x) for key, x in old.items()}
        with advance(part, aliases | at_this_step):
            for path, state in own.items():
                row = Row(*inputs.rows[path])
                arrays = row.gradient, row.parameter, row.stored, state
                given, *before = fusion.after(done, arrays)
                gradient = unscale(given, row.is_scaled)
                if not is_builtin(part):
                    # If the step is skipped: an SVD, for example, may raise on NaN.
                    gradient = mx.where(inputs.applied, gradient, 0)
                flag, dither = next(flags), tuple(map(next, dithers))
                try:
                    weight, stored, new_moments = update_parameter(
                        part, storage, flag, dither, gradient, *before
                    )
                except (KeyError, IndexError, ValueError) as error:
                    raise _failure(path, error) from error
                new[path] = weight, stored
                changed += new_moments
                # Only the root of the kernel: another consumer would split it.
                done = [weight]
            now = own_values(part)
        _check_keys(part, old, now)
        others.append(
            {
                key: mx.where(inputs.applied, now[key], x)
                for key, x in old.items()
                if isinstance(x, mx.array) and now[key] is not aliases[key]
            }
        )
    return new, changed, others


def _step_on_host(
    participant: Participant, gradients: Any, inputs: Inputs
) -> dict[str, tuple[mx.array, Stored]]:
    """Step a third-party optimizer eagerly; restore its state if it raises."""
    optimizer, storage = participant.optimizer, participant.storage
    saved = snapshot(optimizer.state)
    # An optimizer may change an array in place before it raises.
    commit((box, key, _alias(box[key])) for _, box, key in slots(optimizer.state))
    unscale = _unscaler(inputs)
    masters, unscaled = {}, {}
    for path, row in inputs.rows.items():
        masters[path] = _alias(storage.join(row.parameter, row.stored).master)
        unscaled[path] = unscale(row.gradient, row.is_scaled)
    full = tree_of(masters, gradients)
    new = {}
    try:
        # Step each optimizer separately and join by path: tree_merge in
        # MultiOptimizer.apply_gradients fails if a list has gaps for frozen modules.
        for part, own in split(optimizer, tree_of(unscaled, gradients)):
            for path, x in flatten(part.apply_gradients(own, full)):
                row = inputs.rows[path]
                _check_shape("the parameter", row.parameter, x)
                rounded = x.astype(row.parameter.dtype)
                stored = storage.split(to_float32(x), rounded) if row.stored else {}
                new[path] = rounded, stored
    except BaseException as error:
        restore(saved)
        if isinstance(error, (KeyError, IndexError, ValueError)):
            raise _failure("a parameter", error) from error
        raise
    return new


def _failure(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"The optimizer failed at {path!r} with {error!r}. If a parameter was added or "
        "unfrozen after the optimizer was initialized, call "
        "optimizer.init(model.trainable_parameters()) again. If the shape of a "
        "parameter changed, create a new optimizer."
    )


def _unscaler(
    inputs: Inputs, has_one_moment: bool = False
) -> Callable[[mx.array, bool], mx.array]:
    """Return a function that clips a gradient and, if it is scaled, unscales it."""
    inverse, clip = inputs.inverse, inputs.clip
    both = inverse * clip if inverse is not None and clip is not None else inverse
    factors = [fusion.factors(x, has_one_moment) for x in (clip, both)]

    def unscale(gradient: mx.array, is_scaled: bool) -> mx.array:
        g, factor = to_float32(gradient), next(factors[is_scaled])
        if factor is None:
            return g
        return g * mx.broadcast_to(factor, g.shape).astype(mx.float32)

    return unscale
