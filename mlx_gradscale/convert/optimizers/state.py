"""The optimizer's state itself: PyTorch's indexed dicts <-> MLX's flat tree.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
PyTorch's side is a state dict; what only PyTorch knows (its groups, the names
behind its indices) goes into a *record* that the way back needs.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..layouts import Entry
from .builder import scheduled_rate, settings
from .compare import Difference, check, differences, mlx_differences, recognise
from .table import ROWS, SCHEDULED, number
from .valid import check_group, check_slots


@dataclass
class Converted:
    """An MLX optimizer state, and what the way back needs.

    Attributes:
        flat: ``tree_flatten(optimizer.state)`` as a dict.
        record: plain data and arrays; see :func:`to_mlx`.
        notes: sentences for the user.
    """

    flat: dict[str, mx.array]
    record: dict[str, Any]
    notes: list[str]


def to_mlx(
    state_dict: Mapping[str, Any],
    names: Mapping[int, str],
    entries: Mapping[str, Entry],
    tensors: Mapping[str, mx.array],
    *,
    optimizer: str | None = None,
    accept: Iterable[str] = (),
    step: int | None = None,
) -> Converted:
    """Converts a PyTorch optimizer's state dict.

    Args:
        state_dict: with ``"state"`` and ``"param_groups"``.
        names: index -> the parameter's PyTorch name.
        entries: PyTorch name -> where it is in MLX (a plan's entries). Parameters
            that are not in it have no place in MLX: their state is kept aside.
        tensors: the PyTorch model's tensors.
        optimizer: the class name, where the keys do not tell it.
        accept: differences to convert in spite of.
        step: the step count, for optimizers that keep none (SGD, Lion).

    Returns:
        Converted: ``record`` holds ``name``, ``groups`` (PyTorch's own), ``indices``
        and ``names`` (of the converted parameters, per group), ``aside`` (index ->
        state of the others), ``joined`` (all groups became one optimizer),
        ``steps``, ``step_like`` (how PyTorch wrote its counts) and ``fresh``
        (parameters that had no state yet).
    """
    if step is not None and step < 0:
        raise ValueError(f"The step count (--step) is {step}: it cannot be negative.")
    name = recognise(state_dict, optimizer)
    row, states = ROWS[name], state_dict["state"]
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        check_group(name, group)
    for index, parameter in names.items():
        check_slots(name, states.get(index, {}), parameter)
    doubts = [row.doubt(group) for group in groups]
    notes = [*row.notes, *dict.fromkeys(filter(None, doubts))]
    fresh: dict[str, dict] = {}
    found: list[Difference] = []
    members = [[i for i in g["params"] if names[i] in entries] for g in groups]
    aside = {i: n for i, n in names.items() if n not in entries}
    for group, indices in zip(groups, members, strict=True):
        mine = [states.get(index, {}) for index in indices]
        empty = [_lacks(state, row.slots) for state in mine]
        fresh |= {
            names[index]: dict(state)
            for index, state, lacks in zip(indices, mine, empty, strict=True)
            if lacks
        }
        found += differences(name, group, complete=not any(empty))
    notes += check(found, accept)
    for group in groups:  # what was accepted is dropped, so that it stays dropped
        group.update({
            key: type(number(group[key]))(off)
            for key, (off, _) in row.refused.items()
            if number(group.get(key)) not in (off, None)
        })  # fmt: skip
    if aside:
        notes.append(
            f"The optimizer state of {', '.join(aside.values())} is kept for the way "
            "back, as the MLX model has no such parameters."
        )
    steps, like = _steps(members, states, names, step or 0)
    if fresh and any(steps) and row.counts:
        notes.append(
            f"{len(fresh)} parameters had no optimizer state ({next(iter(fresh))}, "
            "...), as frozen ones have: freeze them in the MLX model, too, before "
            "load_run. If they are trained, they start with zero moments, and with the "
            "step count of the rest."
        )
    if not row.counts and step is None:
        notes.append(f"{name} keeps no step count: MLX's starts at 0 (--step).")
    joined = len({_signature(name, g) for g in groups}) == 1 and len(set(steps)) == 1
    flat: dict[str, mx.array] = {}
    for i, group in enumerate(groups):
        prefix = "" if joined else f"states.{i}."
        flat[f"{prefix}step"] = mx.array(steps[i], mx.uint64)
        flat[f"{prefix}learning_rate"] = scheduled_rate(name, group, steps[i])
        for index in members[i]:
            flat |= _slots_to_mlx(
                prefix,
                row.slots,
                states.get(index, {}),
                entries[names[index]],
                tensors[names[index]],
            )
    record = {
        "name": name,
        "joined": joined,
        "groups": groups,
        "indices": members,
        "names": [[names[index] for index in indices] for indices in members],
        "aside": {index: dict(states[index]) for index in aside if index in states},
        "steps": steps,
        "step_like": like,
        "fresh": fresh,
    }
    return Converted(flat, record, notes)


def to_torch(
    flat: Mapping[str, mx.array],
    record: Mapping[str, Any],
    entries: Mapping[str, Entry],
    *,
    used: list[Mapping[str, Any]] | None = None,
    accept: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Converts an MLX optimizer state to a PyTorch state dict.

    Args:
        flat: ``tree_flatten(optimizer.state)`` as a dict.
        record: from :func:`to_mlx`.
        entries: PyTorch name -> where it is in MLX.
        used: the settings the MLX optimizer(s) ran with, if they are known; they
            replace those of the record.
        accept: differences to convert in spite of.

    Returns:
        tuple: the state dict for ``load_state_dict``, and sentences for the user.
    """
    row, states = ROWS[record["name"]], {}
    groups, found, notes = torch_groups(flat, record, used)
    for i, group in enumerate(groups):
        prefix = "" if record["joined"] else f"states.{i}."
        step = _required(flat, f"{prefix}step").item()
        # Records of older versions have no indices: all parameters were converted.
        indices = record["indices"][i] if "indices" in record else group["params"]
        for index, torch_name in zip(indices, record["names"][i], strict=True):
            if torch_name in record["fresh"] and not _has_state(
                flat, prefix, row.slots, entries[torch_name]
            ):  # it was frozen there and here
                if record["fresh"][torch_name]:
                    states[index] = dict(record["fresh"][torch_name])
                continue
            slots = _slots_to_torch(flat, prefix, row.slots, entries[torch_name])
            # PyTorch starts a momentum buffer that is not there with the undampened
            # gradient, MLX with the dampened one: written as zeros, they agree.
            is_fresh = (
                torch_name in record["fresh"]
                and step == record["steps"][i]
                and not number(group.get("dampening", 0))
            )
            if is_fresh and not any(mx.any(x).item() for x in slots.values()):
                if record["fresh"][torch_name]:
                    states[index] = dict(record["fresh"][torch_name])
                continue
            counted = {"step": _step_like(record["step_like"], step)}
            states[index] = (counted if row.counts else {}) | slots
    states |= {index: dict(state) for index, state in record.get("aside", {}).items()}
    order = [i for group in groups for i in group["params"] if i in states]
    state_dict = {"state": {i: states[i] for i in order}, "param_groups": groups}
    return state_dict, notes + check(found, accept)


def torch_groups(
    flat: Mapping[str, mx.array],
    record: Mapping[str, Any],
    used: list[Mapping[str, Any]] | None = None,
) -> tuple[list[dict[str, Any]], list[Difference], list[str]]:
    """PyTorch's parameter groups with what the MLX optimizer runs with.

    Args:
        flat: ``tree_flatten(optimizer.state)`` as a dict.
        record: from :func:`to_mlx`.
        used: the settings the MLX optimizer(s) ran with, if they are known.

    Returns:
        tuple: the groups, what PyTorch would compute differently, and sentences for
        the user.
    """
    name, joined = record["name"], record["joined"]
    _check_parts(flat, record)
    groups: list[dict[str, Any]] = []
    found: list[Difference] = []
    rates: list[str] = []
    for i, group in enumerate(record["groups"]):
        prefix = "" if joined else f"states.{i}."
        step = _required(flat, f"{prefix}step").item()
        held = _required(flat, f"{prefix}learning_rate").item()
        group = dict(group)
        mine = dict(used[0 if joined else i]) if used else settings(name, group)
        found += mlx_differences(name, mine, step)
        group.update(_group_settings(name, group, mine))
        group["lr"] = _learning_rate(name, group, mine, step, held)
        if has_schedule(name, group, mine):
            rates.append(f"{number(group['lr']):.6g}")
        groups.append(group)
    note = (
        "MLX's learning rate schedule is not converted: PyTorch gets its rate for the "
        f"next step, {', '.join(dict.fromkeys(rates))}."
    )
    return groups, found, [note] if rates else []


def has_schedule(name: str, group: Mapping[str, Any], used: Mapping[str, Any]) -> bool:
    """Whether a learning rate changed by more than the optimizer's own divisor.

    Args:
        name: a key of :data:`ROWS`.
        group: one of ``param_groups``.
        used: the settings the MLX optimizer ran with.

    Example:
        >>> has_schedule("SGD", {"lr": 0.1}, {"class": "SGD", "schedule": True})
        True
    """
    # Records of older versions do not say what was divided.
    divided = ROWS[name].divisor(group) is not None
    return bool(used.get("schedule")) and not used.get("constant", divided)


def _check_parts(flat: Mapping[str, mx.array], record: Mapping[str, Any]) -> None:
    # Only a MultiOptimizer has no step of its own.
    count = 0
    while "step" not in flat and f"states.{count}.step" in flat:
        count += 1
    wanted = 0 if record["joined"] else len(record["groups"])
    if count != wanted:
        raise ValueError(
            f"The MLX state is that of {f'{count} optimizers' if count else 'one'}, "
            f"but PyTorch's {len(record['groups'])} parameter groups need "
            f"{'a MultiOptimizer with one each' if wanted else 'one for all'}."
        )


def _lacks(state: Mapping[str, Any], slots: Mapping[str, str]) -> bool:
    return any(state.get(slot) is None for slot in slots)


def _signature(name: str, group: Mapping[str, Any]) -> str:
    keys = ("lr_decay", *sorted(SCHEDULED))
    return repr((settings(name, group), [number(group.get(key)) for key in keys]))


def _steps(
    members: list[list[int]], states: Mapping, names: Mapping[int, str], default: int
) -> tuple[list[int], str]:
    """One step count per group, and how PyTorch wrote it."""
    steps, like = [], "scalar"
    for indices in members:
        counts = {}
        for index in indices:
            step = states.get(index, {}).get("step")
            if step is None:
                continue
            if not isinstance(step, mx.array):
                like = "int" if isinstance(step, int) else "float"
            elif step.ndim:
                like = "vector"
            counts.setdefault(int(number(step)), names[index])
        if len(counts) > 1:
            said = ", ".join(f"{n} at {s}" for s, n in sorted(counts.items())[:4])
            raise ValueError(
                f"The parameters of a group stand at different steps ({said}); MLX "
                "keeps one count for all. Put them in groups of their own, or bring "
                "them to one count before saving."
            )
        steps.append(next(iter(counts), None))
    known = [step for step in steps if step is not None]
    filler = known[0] if known and len(set(known)) == 1 else default
    return [filler if step is None else step for step in steps], like


def _step_like(like: str, step: int) -> Any:
    if like in ("int", "float"):
        return int(step) if like == "int" else float(step)
    return mx.full((1,) if like == "vector" else (), step, mx.float32)


def _slots_to_mlx(
    prefix: str,
    slots: Mapping[str, str],
    state: Mapping[str, Any],
    entry: Entry,
    tensor: mx.array,
) -> dict[str, mx.array]:
    out = {}
    for theirs, ours in slots.items():
        moment = state.get(theirs)
        if moment is None:
            moment = mx.zeros_like(tensor)
        if moment.shape != tensor.shape:
            raise ValueError(
                f"{theirs} of {entry.torch} has shape {moment.shape}, the parameter "
                f"{tensor.shape}: the names are in another order. Give them with "
                "names=... (--names)."
            )
        for name, array in entry.to_mlx(moment).items():
            out[f"{prefix}{name}.{ours}"] = array
    return out


def _slots_to_torch(
    flat: Mapping[str, mx.array],
    prefix: str,
    slots: Mapping[str, str],
    entry: Entry,
) -> dict[str, mx.array]:
    return {
        theirs: entry.to_torch(
            {name: _required(flat, f"{prefix}{name}.{ours}") for name in entry.mlx}
        )
        for theirs, ours in slots.items()
    }


def _has_state(
    flat: Mapping[str, mx.array], prefix: str, slots: Mapping[str, str], entry: Entry
) -> bool:
    keys = (f"{prefix}{name}.{slot}" for name in entry.mlx for slot in slots.values())
    return any(key in flat for key in keys)


def _required(flat: Mapping[str, mx.array], key: str) -> mx.array:
    if key not in flat:
        raise ValueError(
            f"The MLX optimizer state has no {key!r}: save all of "
            "tree_flatten(optimizer.state), after optimizer.init or a step."
        )
    return flat[key]


def _group_settings(
    name: str, group: Mapping[str, Any], used: Mapping[str, Any]
) -> dict[str, Any]:
    out = {}
    for theirs, ours in ROWS[name].settings.items():
        if theirs != "lr" and ours in used:
            value = used[ours]
            is_pair = isinstance(value, (list, tuple))
            out[theirs] = type(group[theirs])(value) if is_pair else value
    return out


def _learning_rate(
    name: str, group: Mapping[str, Any], used: Mapping[str, Any], step: int, held: float
) -> Any:
    """PyTorch's own (float64) rate while MLX's float32 one is its rounding.

    Where there is a schedule, MLX's state holds the rate of the last step, PyTorch's
    groups that of the next, which is in the settings used.
    """
    lr, divisor = group["lr"], ROWS[name].divisor(group)
    if used.get("schedule") and "learning_rate" in used:
        held, step = used["learning_rate"], step + 1
    # Not every bit: a schedule may have run on another device, or compiled.
    if math.isclose(scheduled_rate(name, group, step).item(), held, rel_tol=1e-6):
        return lr
    if divisor is not None and used.get("schedule", True):
        held *= number(divisor(max(step - 1, 0)))
    return mx.array(held, lr.dtype) if isinstance(lr, mx.array) else held
