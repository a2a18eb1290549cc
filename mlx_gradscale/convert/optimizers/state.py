"""The optimizer's state itself: PyTorch's indexed dicts <-> MLX's flat tree.

MLX's side is ``tree_flatten(optimizer.state)``: ``step``, ``learning_rate`` and
``<parameter>.<slot>``, each under ``states.<i>.`` for a ``MultiOptimizer``.
PyTorch's side is a state dict; what only PyTorch knows (its groups, the names
behind its indices) goes into an :class:`OptimizerRecord` that the way back needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..layouts import Entry
from .builder import scheduled_rate, settings
from .compare import Difference, check, differences, recognise
from .groups import required, torch_groups
from .record import OptimizerRecord
from .table import ROWS, SCHEDULED, number
from .valid import check_group, check_slots


@dataclass
class Converted:
    """An MLX optimizer state, and what the way back needs.

    Attributes:
        flat (dict): ``tree_flatten(optimizer.state)`` as a dict.
        record (OptimizerRecord): How PyTorch's looked.
        notes (list): Sentences for the user.
    """

    flat: dict[str, mx.array]
    record: OptimizerRecord
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
    """Convert a PyTorch optimizer's state dict.

    Args:
        state_dict (dict): With ``"state"`` and ``"param_groups"``.
        names (dict): Index -> the parameter's PyTorch name.
        entries (dict): PyTorch name -> where it is in MLX (a plan's entries).
            Parameters that are not in it have no place in MLX: their state is only
            kept.
        tensors (dict): The PyTorch model's tensors.
        optimizer (str, optional): The class name, where the keys do not tell it.
        accept (Iterable): Differences to convert in spite of.
        step (int, optional): The step count, for optimizers that keep none (SGD, Lion).

    Returns:
        Converted: The flat state, and how PyTorch's looked.
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
    members = [[i for i in g["params"] if names[i] in entries] for g in groups]
    fresh = {
        names[index]: dict(states.get(index, {}))
        for indices in members
        for index in indices
        if _lacks(states.get(index, {}), row.slots)
    }
    complete = [not any(names[i] in fresh for i in indices) for indices in members]
    accepted = _drop_accepted(name, groups, complete, accept)
    unplaced = {i: n for i, n in names.items() if n not in entries}
    steps, like = _steps(members, states, names, step or 0)
    record = OptimizerRecord(
        name,
        joined=len({_signature(name, g) for g in groups}) == len(set(steps)) == 1,
        groups=groups,
        indices=members,
        names=[[names[index] for index in indices] for indices in members],
        unplaced={index: dict(states[index]) for index in unplaced if index in states},
        steps=steps,
        step_like=like,
        fresh=fresh,
    )
    flat = _flat_state(record, states, entries, tensors)
    doubts = [row.doubt(group) for group in state_dict["param_groups"]]
    notes = [*row.notes, *dict.fromkeys(filter(None, doubts)), *accepted]
    return Converted(flat, record, notes + _notes(record, unplaced, step))


def _drop_accepted(
    name: str,
    groups: list[dict[str, Any]],
    complete: Sequence[bool],
    accept: Iterable[str],
) -> list[str]:
    """Raise for differences that are not accepted; turn off, in the groups, the others.

    Args:
        name (str): The optimizer's.
        groups (list): PyTorch's; what was accepted is dropped, so that it stays
            dropped.
        complete (list): Of each group, whether all its parameters have a state.
        accept (Iterable): Differences to convert in spite of.

    Returns:
        list: A sentence for each that was accepted.
    """
    found: list[Difference] = []
    for group, is_complete in zip(groups, complete, strict=True):
        found += differences(name, group, is_complete)
    accepted = check(found, accept)
    refused = ROWS[name].refused
    for group in groups:
        group.update({
            key: type(number(group[key]))(off)
            for key, (off, _) in refused.items()
            if number(group.get(key)) not in (off, None)
        })  # fmt: skip
    return accepted


def _flat_state(
    record: OptimizerRecord,
    states: Mapping[Any, Any],
    entries: Mapping[str, Entry],
    tensors: Mapping[str, mx.array],
) -> dict[str, mx.array]:
    name, slots = record.name, ROWS[record.name].slots
    flat: dict[str, mx.array] = {}
    for i, group in enumerate(record.groups):
        prefix, step = record.prefix(i), record.steps[i]
        flat[f"{prefix}step"] = mx.array(step, mx.uint64)
        flat[f"{prefix}learning_rate"] = scheduled_rate(name, group, step)
        for index, torch_name in zip(record.indices[i], record.names[i], strict=True):
            flat |= _slots_to_mlx(
                prefix,
                slots,
                states.get(index, {}),
                entries[torch_name],
                tensors[torch_name],
            )
    return flat


def _notes(
    record: OptimizerRecord, unplaced: Mapping[Any, str], step: int | None
) -> list[str]:
    notes, counts = [], ROWS[record.name].counts
    if unplaced:
        notes.append(
            f"The optimizer state of {', '.join(unplaced.values())} is kept for the "
            "way back, as the MLX model has no such parameters."
        )
    if record.fresh and any(record.steps) and counts:
        notes.append(
            f"{len(record.fresh)} parameters had no optimizer state "
            f"({next(iter(record.fresh))}, ...), as frozen ones have: freeze them in "
            "the MLX model, too, before load_run. If they are trained, they start with "
            "zero moments, and with the step count of the rest."
        )
    if not counts and step is None:
        notes.append(f"{record.name} keeps no step count: MLX's starts at 0 (--step).")
    return notes


def to_torch(
    flat: Mapping[str, mx.array],
    record: OptimizerRecord,
    entries: Mapping[str, Entry],
    *,
    used: Sequence[Mapping[str, Any]] | None = None,
    accept: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Convert an MLX optimizer state to a PyTorch state dict.

    Args:
        flat (dict): ``tree_flatten(optimizer.state)`` as a dict.
        record (OptimizerRecord): From :func:`to_mlx`.
        entries (dict): PyTorch name -> where it is in MLX.
        used (list, optional): The settings the MLX optimizer(s) ran with, if they are
            known; they replace those of the record.
        accept (Iterable): Differences to convert in spite of.

    Returns:
        tuple: The state dict for ``load_state_dict``, and sentences for the user.
    """
    row, states = ROWS[record.name], {}
    groups, found, notes = torch_groups(flat, record, used)
    for i, group in enumerate(groups):
        prefix = record.prefix(i)
        step = number(required(flat, f"{prefix}step"))
        for index, name in zip(record.indices[i], record.names[i], strict=True):
            is_fresh = name in record.fresh
            if is_fresh and not _has_state(flat, prefix, row.slots, entries[name]):
                slots = None  # it was frozen there and here
            else:
                slots = _slots_to_torch(flat, prefix, row.slots, entries[name])
                if is_fresh and step == record.steps[i] and _is_new(slots, group):
                    slots = None
            if slots is not None:
                counted = {"step": _step_like(record.step_like, step)}
                states[index] = (counted if row.counts else {}) | slots
            elif record.fresh[name]:
                states[index] = dict(record.fresh[name])
    states |= {index: dict(state) for index, state in record.unplaced.items()}
    order = [i for group in groups for i in group["params"] if i in states]
    state_dict = {"state": {i: states[i] for i in order}, "param_groups": groups}
    return state_dict, notes + check(found, accept)


def _is_new(slots: Mapping[str, mx.array], group: Mapping[str, Any]) -> bool:
    """Tell whether PyTorch may begin these moments itself."""
    # It starts a momentum buffer that is not there with the undampened gradient, MLX
    # with the dampened one: written as zeros, they agree.
    dampened = number(group.get("dampening", 0))
    return not dampened and not any(mx.any(x).item() for x in slots.values())


def _lacks(state: Mapping[str, Any], slots: Mapping[str, str]) -> bool:
    return any(state.get(slot) is None for slot in slots)


def _signature(name: str, group: Mapping[str, Any]) -> str:
    keys = ("lr_decay", *sorted(SCHEDULED))
    return repr((settings(name, group), [number(group.get(key)) for key in keys]))


def _steps(
    members: list[list[int]],
    states: Mapping[Any, Any],
    names: Mapping[int, str],
    default: int,
) -> tuple[list[int], str]:
    """Return one step count per group, and how PyTorch wrote it."""
    steps, like = [], "scalar"
    for indices in members:
        counts: dict[int, str] = {}
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
            {name: required(flat, f"{prefix}{name}.{ours}") for name in entry.mlx}
        )
        for theirs, ours in slots.items()
    }


def _has_state(
    flat: Mapping[str, mx.array], prefix: str, slots: Mapping[str, str], entry: Entry
) -> bool:
    keys = (f"{prefix}{name}.{slot}" for name in entry.mlx for slot in slots.values())
    return any(key in flat for key in keys)
