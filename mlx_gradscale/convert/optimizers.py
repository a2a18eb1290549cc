"""Convert between PyTorch's parameter groups and MLX's flat optimizer state.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..checkpoint import Checkpoint
from ..files.text import dtype_name, list_some
from .groups import MOST_STEPS, Group, Index, need
from .layouts import Entry
from .old_checkpoint import TensorShape
from .optimizer_table import (
    IGNORED,
    SCHEDULED,
    check_differences,
    differences,
    plain_setting,
    refused_settings,
)
from .tree import ConvertError, match_type, number

# A learning rate as in mlx.optimizers: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


def plan_groups(
    groups: Sequence[Group],
    names: Sequence[str],
    entries: Mapping[str, Entry],
    trainer_step: Any = None,
) -> None:
    """Set the parameters, steps and prefixes of the groups.

    ``names`` are the PyTorch names of all parameters, group by group. ``trainer_step``
    is the default for step counts that PyTorch did not save.
    """
    left = iter(names)
    for group in groups:
        own = dict(zip(group.settings["params"], left, strict=False))
        group.entries = {i: entries[name] for i, name in own.items() if name in entries}
    is_count = type(trainer_step) is int and 0 <= trainer_step < MOST_STEPS
    _set_steps(groups, trainer_step if is_count else 0)
    _set_prefixes(groups)


def check_groups(groups: Sequence[Group], accept: Collection[str]) -> list[str]:
    """Raise if MLX would update differently, unless accepted; return notes."""
    found: dict[str, str] = {}
    for group in groups:
        spec, settings = group.spec, group.settings
        found |= differences(spec, group.kind, settings)
        known = {*spec.settings, *spec.required, *spec.refused, *IGNORED}
        found |= {
            f"The parameter groups have the key {key!r}, which {group.kind} does not "
            "have, so this may be a different optimizer.": key
            for key in settings
            if key not in known
        }
    notes = [group.spec.note for group in groups if group.spec.note]
    notes += check_differences(found, accept)
    fresh = [
        entry.torch
        for group in groups
        # SGD without momentum has no state.
        if group.spec.has_step or number(group.settings.get("momentum", 1))
        for index, entry in group.entries.items()
        if group.lacks_state(index)
    ]
    if fresh and any(not g.lacks_state(i) for g in groups for i in g.entries):
        notes.append(
            f"PyTorch has no optimizer state for {list_some(fresh, 3)}. The moments of "
            "these parameters start at zero. If they were frozen in PyTorch, freeze "
            "them in the MLX model before loading."
        )
    steps = {g.kind: g.step for g in groups if not g.spec.has_step and not g.step}
    if steps:
        notes.append(
            f"{', '.join(sorted(steps))} saves no step count, so MLX starts at step 0. "
            "If you pass a schedule, set state['step'] of the MLX optimizer or, for a "
            "MultiOptimizer, of each of its .optimizers."
        )
    return notes


def _set_steps(groups: Sequence[Group], default: int) -> None:
    """Read each group's step count; MLX has one per optimizer, not per parameter."""
    known: list[dict[int, str]] = []
    for group in groups:
        steps = {e: group.slots(i).get("step") for i, e in group.entries.items()}
        counts = {int(number(x)): e.torch for e, x in steps.items() if x is not None}
        if len(counts) > 1:
            shown = [f"{name} at {step}" for step, name in sorted(counts.items())]
            raise ConvertError(
                "The parameters of a group are at different steps "
                f"({list_some(shown)}), but MLX has one step count per optimizer. Put "
                "each step count in its own parameter group in PyTorch."
            )
        known.append(counts)
    every = {step for counts in known for step in counts}
    default = every.pop() if len(every) == 1 else default
    for group, counts in zip(groups, known, strict=True):
        group.step = next(iter(counts), default)


def _set_prefixes(groups: Sequence[Group]) -> None:
    """Give each group its own MLX optimizer if update rules, rates or steps differ."""
    rules = []
    for group in groups:
        schedule = [number(group.settings.get(key)) for key in SCHEDULED]
        rules.append((group.kind, group.step, constructor_args(group), schedule))
    if any(rule != rules[0] for rule in rules):
        for i, group in enumerate(groups):
            group.prefix = f"states.{i}."


def to_mlx(
    groups: Sequence[Group], tensors: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the flat MLX optimizer state, with zeros where PyTorch has no state."""
    flat: dict[str, mx.array] = {}
    for group in groups:
        prefix, rate = group.prefix, number(group.settings["lr"])
        flat[f"{prefix}step"] = mx.array(group.step, mx.uint64)
        flat[f"{prefix}learning_rate"] = mx.array(rate, mx.float32)
        for index, entry in group.entries.items():
            like = tensors[entry.torch]
            for theirs, ours in group.spec.slots.items():
                moment = group.slots(index).get(theirs)
                if moment is None:
                    moment = mx.zeros_like(like, stream=mx.cpu)
                is_right = isinstance(moment, mx.array) and moment.shape == like.shape
                what = f"a tensor of shape {like.shape}"
                need(is_right, f"{theirs} of {entry.torch}", what, moment)
                for mlx_name, array in entry.to_mlx(moment).items():
                    flat[f"{prefix}{mlx_name}.{ours}"] = array
    return flat


def to_torch(
    groups: Sequence[Group],
    tensors: Mapping[str, Any],
    run: Checkpoint,
    accept: Collection[str],
) -> list[str]:
    """Write an MLX run's optimizer into PyTorch's state dicts, and return notes.

    The weights, ``tensors``, determine the dtypes of new moments.
    """
    flat, settings = run.optimizer, run.description["settings"]
    next_rates = run.description.get("next_rates")
    count = len(groups) if groups[0].prefix else 1
    if len(settings) != count:
        wanted = "one optimizer" if count == 1 else f"a MultiOptimizer of {count}"
        raise ConvertError(
            f"The MLX run's optimizer count is {len(settings)}, but the template needs "
            f"{wanted}. Create it with load_torch() or build_optimizer()."
        )
    if not isinstance(next_rates, list) or len(next_rates) != count:
        next_rates = [None] * count  # saved by an older version
    found: dict[str, str] = {}
    rates: dict[str, None] = {}
    for i, group in enumerate(groups):
        at, prefix = i if group.prefix else 0, group.prefix
        used = settings[at]
        step = float(number(_required(flat, f"{prefix}step")))
        if not 0 <= step < MOST_STEPS:
            raise ConvertError(
                f"{prefix}step in the MLX optimizer's state must be from 0 to 2**53, "
                f"got {step:g}. Set it to the number of steps taken."
            )
        if used["class"] != group.spec.mlx.__name__:
            is_adam = {used["class"], group.kind} == {"Adam", "AdamW"}
            choice = ", or choose the class with optimizer=... (--optimizer)" * is_adam
            raise ConvertError(
                f"The MLX optimizer is {used['class']}, but the template's optimizer "
                f"is {group.kind}. As the template, pass a PyTorch checkpoint of a run "
                f"with {used['class']}{choice}."
            )
        found |= differences(group.spec, f"MLX's {used['class']}", used["values"])
        for index in group.entries:
            like = tensors[group.entries[index].torch]
            slots = _torch_slots(group, index, like, flat, int(step))
            group.write_slots(index, slots)
        rate = number(_required(flat, f"{prefix}learning_rate"))
        if "learning_rate" in used["schedules"]:
            if type(next_rates[at]) is float and math.isfinite(next_rates[at]):
                rate = next_rates[at]
                rates[f"{rate:.6g}"] = None
            else:
                found[
                    "The MLX run has a learning rate schedule, but its checkpoint "
                    f"contains only the rate of the last step, {rate:.6g}, and PyTorch "
                    "needs the next one. Restore the checkpoint in MLX with the "
                    "schedule, and save it again."
                ] = "learning_rate"
        group.settings |= _changed_settings(group, used["values"], rate)
    notes = check_differences(found, accept)
    if rates:
        notes.append(
            "MLX's learning rate schedule is not converted. The PyTorch checkpoint "
            f"contains its value for the next step: {', '.join(rates)}."
        )
    return notes


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise ConvertError(
            f"The MLX optimizer state has no {key!r}. Call optimizer.init(model."
            "trainable_parameters()) or take a step before saving."
        )
    # A schedule may have left a Python number in the state.
    value = flat[key]
    return value if isinstance(value, mx.array) else mx.array(value)


def _torch_slots(
    group: Group, index: Index, like: Any, flat: Mapping[str, mx.array], step: int
) -> dict[str, Any]:
    """Return a parameter's slots to write, or ``{}`` if PyTorch's are still right.

    New slots have the dtype of the parameter, ``like``, as in PyTorch.
    """
    entry, old, slots = group.entries[index], group.slots(index), group.spec.slots
    prefix = group.prefix
    keys = [f"{prefix}{n}.{ours}" for n in entry.mlx for ours in slots.values()]
    if not any(key in flat for key in keys):  # frozen in MLX
        if any(isinstance(old.get(slot), TensorShape) for slot in slots):
            raise ConvertError(
                f"The MLX optimizer has no state for {entry.mlx[0]}, and the template "
                "does not contain PyTorch's. Use the optimizer that you trained with."
            )
        return {}
    new = {
        theirs: entry.to_torch(
            {n: _required(flat, f"{prefix}{n}.{ours}") for n in entry.mlx}
        )
        for theirs, ours in slots.items()
    }
    has_moved = group.spec.has_step and step != group.step
    is_same = group.lacks_state(index) and not has_moved
    if is_same and not any(mx.any(x).item() for x in new.values()):
        return {}
    forms = dict.fromkeys(slots, TensorShape(like.shape, dtype_name(like)))
    forms |= {slot: x for slot, x in old.items() if x is not None}
    written = {slot: match_type(x, forms[slot]) for slot, x in new.items()}
    if not group.spec.has_step:
        return written
    # A number or an array, depending on PyTorch's version.
    steps = (slots.get("step") for slots in chain([old], group.states.values()))
    was = next((x for x in steps if x is not None), mx.array(0.0))
    return {"step": match_type(step, was)} | written


def _changed_settings(
    group: Group, used: Mapping[str, Any], rate: float
) -> dict[str, Any]:
    """Return the settings to change in PyTorch, in PyTorch's types."""
    settings, spec = group.settings, group.spec
    changed = {
        key: used[key]
        for key in spec.settings
        if key in used and used[key] != plain_setting(settings[key])
    }
    # MLX's learning rate is float32, and compiled schedules or other devices round
    # differently.
    if not math.isclose(number(settings["lr"]), rate, rel_tol=1e-6):
        changed["lr"] = rate
    # Turn off the settings that MLX ignored with the user's consent.
    changed |= refused_settings(spec, settings)
    return {key: match_type(value, settings[key]) for key, value in changed.items()}


def constructor_args(group: Group) -> dict[str, Any]:
    """Return MLX constructor arguments equivalent to a PyTorch group's settings."""
    own = {key: plain_setting(group.settings[key]) for key in group.spec.settings}
    return own | group.spec.forced | {"learning_rate": number(group.settings["lr"])}


def build(
    groups: Sequence[Group], learning_rate: Rate | Sequence[Rate] | None = None
) -> optim.Optimizer:
    """Build the MLX optimizer, a ``MultiOptimizer`` if PyTorch's groups differ."""
    groups = groups if groups[0].prefix else groups[:1]
    parts = [
        group.spec.mlx(**constructor_args(group) | {"learning_rate": rate})
        for group, rate in zip(groups, _rates(groups, learning_rate), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    members = [{n for e in group.entries.values() for n in e.mlx} for group in groups]
    filters = [lambda path, _, own=own: path in own for own in members[:-1]]
    return optim.MultiOptimizer(parts, filters)


def _rates(groups: Sequence[Group], given: Any) -> list[Rate]:
    # An integer, as in torch.optim.SGD(params, lr=1), would be an int32 array in MLX.
    own: list[Rate] = [float(number(group.settings["lr"])) for group in groups]
    if given is None:
        return own
    # In the first step of a warmup all rates are 0, and only initial_lr differs.
    first = [number(group.settings.get("initial_lr")) for group in groups]
    is_shared = len({*zip(own, first, strict=True)}) == 1
    if not isinstance(given, (list, tuple)) and is_shared:
        given = [given] * len(groups)
    if not isinstance(given, (list, tuple)) or len(given) != len(groups):
        what = f"a list of {len(groups)} numbers or schedules, one per optimizer"
        what = what if len(groups) > 1 else "a number or a schedule"
        raise ValueError(
            f"learning_rate must be {what}, got {given!r}. In PyTorch, it is {own}."
        )
    return [*given]
