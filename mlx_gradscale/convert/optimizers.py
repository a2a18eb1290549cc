"""Convert optimizer state: PyTorch's parameter groups <-> MLX's flat tree.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..torch_checkpoint import TensorShape
from .groups import MOST_STEPS, Group, Index, need
from .layouts import Entry
from .optimizer_table import (
    SCHEDULED,
    check_differences,
    mlx_differences,
    plain_setting,
    recognise,
    refused_settings,
    torch_differences,
)
from .options import Options
from .tree import ConvertError, as_leaf, list_some, number

# A learning rate as in mlx.optimizers: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


def set_kind(groups: Sequence[Group], options: Options) -> None:
    """Set the kind of optimizer that the groups belong to, or raise if unknown."""
    settings = [group.settings for group in groups]
    states = groups[0].states.values() if groups else ()
    slots = {slot for slots in states for slot in slots}
    kind = recognise(settings, slots, options.optimizer)
    for group in groups:
        group.kind = kind
        group.check_settings()


def plan_groups(
    groups: Sequence[Group],
    names: Sequence[str],
    entries: Mapping[str, Entry],
    options: Options,
) -> list[str]:
    """Set the parameters and steps of the groups, and return notes.

    ``names`` are the PyTorch names of all parameters, group by group. Differences
    between PyTorch and MLX raise an error unless they are accepted.
    """
    if options.step is not None and options.step < 0:
        raise ConvertError(f"step (--step) must be 0 or more, got {options.step}.")
    found: dict[str, str] = {}
    left = iter(names)
    for group in groups:
        own = dict(zip(group.settings["params"], left, strict=False))
        group.entries = {i: entries[name] for i, name in own.items() if name in entries}
        found |= torch_differences(group.kind, group.settings)
    _set_steps(groups, options.step or 0)
    notes = [group.spec.note for group in groups if group.spec.note]
    notes += check_differences(found, options.accept)
    torch_only = [name for name in names if name not in entries]
    if torch_only:
        notes.append(
            f"The MLX model does not have {list_some(torch_only)}. Their optimizer "
            "state is written back to PyTorch unchanged."
        )
    fresh = [
        entry.torch
        for group in groups
        for index, entry in group.entries.items()
        if group.spec.has_step and group.step and group.lacks_state(index)
    ]
    if fresh:
        notes.append(
            f"PyTorch has no optimizer state for {list_some(fresh, 3)}, so their "
            "moments start at zero. If they were frozen in PyTorch, freeze them in the "
            "MLX model before loading."
        )
    kinds = {group.kind for group in groups if not group.spec.has_step}
    if kinds and options.step is None:
        said = " and ".join(sorted(kinds))
        notes.append(
            f"{said} saves no step count, so MLX starts at step 0. Pass step=... "
            "(--step) to set it."
        )
    if any("max_momentum" in group.settings for group in groups):
        notes.append(  # from OneCycleLR and CyclicLR
            "PyTorch's schedule also changes the momentum (or betas[0]). In MLX it "
            "stays at its current value unless you set it before each step."
        )
    return notes


def _set_steps(groups: Sequence[Group], default: int) -> None:
    """Read the step count of each group; MLX has one per group, not per parameter."""
    known: list[int | None] = []
    for group in groups:
        counts: dict[int, str] = {}
        for index, entry in group.entries.items():
            step = group.slots(index).get("step")
            if step is not None:
                counts.setdefault(int(number(step)), entry.torch)
        if len(counts) > 1:
            said = [f"{name} at {step}" for step, name in sorted(counts.items())]
            raise ConvertError(
                f"The parameters of a group are at different steps ({list_some(said)}),"
                " but MLX has one step count per optimizer. Put them in separate "
                "groups."
            )
        known.append(next(iter(counts), None))
    seen = {step for step in known if step is not None}
    filler = seen.pop() if len(seen) == 1 else default
    for group, step in zip(groups, known, strict=True):
        group.step = filler if step is None else step


def split(groups: Sequence[Group]) -> list[tuple[str, Group]]:
    """Return the groups with the prefix of each one's MLX state.

    Groups with the same update rule, schedule and step become one MLX optimizer, with
    an empty prefix. Others are the parts of a ``MultiOptimizer``.
    """
    rules = [
        (
            g.kind,
            g.step,
            constructor_args(g),
            *(number(g.settings.get(key)) for key in SCHEDULED),
        )
        for g in groups
    ]
    is_single = all(rule == rules[0] for rule in rules)
    return [("" if is_single else f"states.{i}.", g) for i, g in enumerate(groups)]


def to_mlx(
    groups: Sequence[Group], tensors: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the flat MLX state, with zeros for parameters without state."""
    flat: dict[str, mx.array] = {}
    for prefix, group in split(groups):
        rate = number(group.settings["lr"])
        flat[f"{prefix}step"] = mx.array(group.step, mx.uint64)
        flat[f"{prefix}learning_rate"] = mx.array(rate, mx.float32)
        for index, entry in group.entries.items():
            like = tensors[entry.torch]
            for theirs, ours in group.spec.slots.items():
                moment = group.slots(index).get(theirs)
                moment = mx.zeros_like(like) if moment is None else moment
                what = f"{theirs} of {entry.torch}"
                need(isinstance(moment, mx.array), what, "a tensor", moment)
                if moment.shape != like.shape:
                    raise ConvertError(
                        f"{what} has shape {moment.shape}, but the parameter has shape "
                        f"{like.shape}. Pass the names in the optimizer's order with "
                        "names=... (--names)."
                    )
                for mlx_name, array in entry.to_mlx(moment).items():
                    flat[f"{prefix}{mlx_name}.{ours}"] = array
    return flat


def to_torch(
    groups: Sequence[Group],
    flat: Mapping[str, mx.array],
    settings: Sequence[Mapping[str, Any]],
    accept: Iterable[str] = (),
) -> list[str]:
    """Write MLX's state into PyTorch's state dicts, and return notes.

    ``flat`` is ``tree_flatten(optimizer.state)`` as a dict; ``settings`` holds those of
    each MLX optimizer (:func:`mlx_settings`).
    """
    parts = split(groups)
    is_single = not parts[0][0]
    if len(settings) != (1 if is_single else len(groups)):
        wanted = "one optimizer" if is_single else f"a MultiOptimizer of {len(groups)}"
        raise ConvertError(
            f"The MLX optimizer has {len(settings)} parts, but PyTorch's {len(groups)} "
            f"parameter groups require {wanted}."
        )
    found: dict[str, str] = {}
    rates: list[str] = []
    for i, (prefix, group) in enumerate(parts):
        used = settings[0 if is_single else i]
        step = float(number(_required(flat, f"{prefix}step")))
        if not 0 <= step < MOST_STEPS:
            raise ConvertError(
                f"The MLX optimizer's {prefix}step is {step}, not a step count."
            )
        found |= mlx_differences(group.kind, used)
        for index in group.entries:
            slots = _torch_slots(group, index, flat, prefix, int(step))
            group.write_slots(index, slots)
        rate = used.get("next_rate", number(_required(flat, f"{prefix}learning_rate")))
        for key, value in _changed_settings(group, used, rate).items():
            group.write_setting(key, value)
        if used.get("has_schedule"):
            rates.append(f"{number(rate):.6g}")
    notes = check_differences(found, accept)
    if rates:
        notes.append(
            "MLX's learning rate schedule is not converted. PyTorch gets the learning "
            f"rate of the next step, {', '.join(dict.fromkeys(rates))}."
        )
    return notes


def _required(flat: Mapping[str, Any], key: str) -> Any:
    if key not in flat:
        raise ConvertError(
            f"The MLX optimizer state has no {key!r}. Call optimizer.init(model."
            "trainable_parameters()) or take a step first."
        )
    return flat[key]


def _torch_slots(
    group: Group, index: Index, flat: Mapping[str, mx.array], prefix: str, step: int
) -> dict[str, Any]:
    """Return the slots to write, or none if PyTorch's are already correct."""
    entry, old, slots = group.entries[index], group.slots(index), group.spec.slots
    keys = [f"{prefix}{n}.{ours}" for n in entry.mlx for ours in slots.values()]
    if not any(key in flat for key in keys):  # frozen in MLX
        if any(isinstance(old.get(slot), TensorShape) for slot in slots):
            raise ConvertError(
                f"The MLX optimizer has no state for {entry.mlx[0]}, although the "
                "loaded one did. Pass the optimizer that you trained with."
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
    count = {"step": _torch_step(group, index, step)} if group.spec.has_step else {}
    return count | {slot: as_leaf(x, old.get(slot)) for slot, x in new.items()}


def _torch_step(group: Group, index: Index, step: int) -> Any:
    """Return a step count as PyTorch wrote it: a number or a one-element array."""
    known = chain([group.slots(index)], group.states.values())
    steps = (slots.get("step") for slots in known)
    like = next((each for each in steps if each is not None), mx.array(0.0))
    if isinstance(like, mx.array):
        return mx.full(like.shape, step, like.dtype)
    return float(step) if type(like) is float else step


def _changed_settings(
    group: Group, used: Mapping[str, Any], rate: float
) -> dict[str, Any]:
    """Return the settings that have changed since PyTorch, in PyTorch's types."""
    settings, changed = group.settings, {}
    for key in group.spec.settings:
        if key in used and used[key] != plain_setting(settings[key]):
            is_tuple = isinstance(settings[key], tuple)
            changed[key] = tuple(used[key]) if is_tuple else used[key]
    # Compare with a tolerance: a schedule may have run on another device or compiled,
    # and MLX's learning rate is float32.
    if not math.isclose(number(settings["lr"]), rate, rel_tol=1e-6):
        changed["lr"] = rate
    for key, value in changed.items():
        if isinstance(settings[key], mx.array):
            changed[key] = mx.array(value, settings[key].dtype)
    for key, off in refused_settings(group.spec, settings).items():
        value = plain_setting(settings[key])  # accepted settings stay off
        is_plain = isinstance(value, (bool, int, float))
        changed[key] = type(value)(off) if is_plain else off
    return changed


def constructor_args(group: Group) -> dict[str, Any]:
    """Return MLX constructor arguments equivalent to a PyTorch group's settings."""
    own = {key: plain_setting(group.settings[key]) for key in group.spec.settings}
    return own | group.spec.forced | {"learning_rate": number(group.settings["lr"])}


def build(
    groups: Sequence[Group], learning_rate: Rate | Sequence[Rate] | None = None
) -> optim.Optimizer:
    """Build the MLX optimizer that resumes from PyTorch's groups.

    If the groups differ, it is a ``MultiOptimizer``.
    """
    groups = [g for prefix, g in split(groups) if prefix] or groups[:1]
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
    own: list[Rate] = [number(group.settings["lr"]) for group in groups]
    if given is None:
        return own
    if isinstance(given, (list, tuple)):
        if len(given) != len(groups):
            raise ValueError(
                f"learning_rate has {len(given)} entries, but the MLX optimizer has "
                f"{len(groups)} parts. Pass one entry for each."
            )
        return [*given]
    # In the first step of a warmup all rates are 0, and only initial_lr differs.
    first = [number(group.settings.get("initial_lr")) for group in groups]
    if len({*zip(own, first, strict=True)}) > 1:
        raise ValueError(
            f"The parameter groups have different learning rates ({own}). Pass "
            "learning_rate as a list with one number or schedule per group, in this "
            "order."
        )
    return [given] * len(groups)


def mlx_settings(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """Return the class, settings and next learning rate of each single optimizer."""
    if isinstance(optimizer, optim.MultiOptimizer):
        return [row for part in optimizer.optimizers for row in mlx_settings(part)]
    schedule = getattr(optimizer, "_schedulers", {}).get("learning_rate")
    row = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
    }
    row |= {"class": type(optimizer).__name__, "has_schedule": schedule is not None}
    if schedule is not None and "step" in optimizer.state:
        # MLX's state holds the last step's rate, PyTorch's groups the next step's.
        row["next_rate"] = number(mx.array(schedule(optimizer.step)))
    return [row]
