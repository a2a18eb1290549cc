"""What of a checkpoint only passes through MLX, and of which step it is.

Without it epoch, schedule and random states would go back to PyTorch as old as they
came, and nobody would be warned: a run that trained 1000 steps in MLX would go on with
the learning rate, and the data, of 1000 steps before.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from ..run_folder.values import SectionMark
from ..torch_checkpoint import plain_value
from .optimizers import ROWS, SCHEDULED
from .record import Record

_STEP = re.compile(r"(?:states\.(\d+)\.)?step")
# What a training script was started with goes by these names.
_SETTINGS = re.compile(r"(\w+_)?(args|cfg|config|hparams|hyper_parameters)")
_STATES = re.compile(r"(?<!training_args)\.(pkl|pth|bin)$")
_CONSTANT = (str, bool, type(None))


def entries(skeleton: Any, path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return what of a checkpoint is in no section, by its place.

    Example:
        >>> entries({"net": SectionMark("model"), "epoch": 3, "amp": [7]})
        {'epoch': 3, 'amp': [7]}
    """
    if isinstance(skeleton, SectionMark):
        return {}
    if not any(isinstance(leaf, SectionMark) for leaf in leaves(skeleton)):
        return {"/".join(map(str, path)): skeleton}
    is_dict = isinstance(skeleton, Mapping)
    inner = skeleton.items() if is_dict else enumerate(skeleton)
    found = (entries(value, (*path, key)) for key, value in inner)
    return {name: value for each in found for name, value in each.items()}


def schedules(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are states of PyTorch's schedules, with last_epoch.

    Example:
        >>> schedules({"scheduler": {"last_epoch": 5, "_step_count": 6}, "epoch": 1})
        {'scheduler': 5}
    """
    return {
        name: state["last_epoch"]
        for name, value in found.items()
        for state in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(state, Mapping) and "last_epoch" in state
    }


def steps_of(optimizer: Mapping[str, mx.array]) -> list[int]:
    """Return the step count of each optimizer in a flat state, in their order.

    Example:
        >>> steps_of({"states.1.step": mx.array(4), "states.0.step": mx.array(3)})
        [3, 4]
    """
    found = {
        int(match[1] or 0): step
        for key, step in optimizer.items()
        if (match := _STEP.fullmatch(key))
    }
    return [cast(int, found[index].item()) for index in sorted(found)]


def age_notes(record: Record, optimizer: Mapping[str, mx.array] | None) -> list[str]:
    """Return sentences on entries that are of another step than the optimizer."""
    if record.is_pattern:
        return _pattern_notes(record)
    now = steps_of(optimizer or {})
    if not now:
        return []
    start = record.optimizer.steps if record.optimizer else [0] * len(now)
    pairs = zip(start, now, strict=False)
    then, at = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
    if then == at:
        return []
    found = entries(record.checkpoint)
    found = {
        name: x
        for name, x in found.items()
        if name not in record.moved and _may_count(name, x)
    }
    # Random states, positions in the data, objects that were registered.
    names = [*found, *(name for name in record.carried if _STATES.search(name))]
    if not names:
        return []
    return [
        f"{', '.join(names)}: as of step {then}, unless it was set since, and the "
        f"optimizer stands at step {at}. What of it counts or changes with the steps "
        "is out of date: set it in record.checkpoint of what load_run returns and "
        "give that record to save_run(record=...), or set it in PyTorch after loading."
        + _schedule_note(found)
    ]


def _pattern_notes(record: Record) -> list[str]:
    found = entries(record.checkpoint)
    named = list(found)
    if record.optimizer:
        keys = SCHEDULED
        if not record.used:  # not by save_run: nothing tells the run's own
            keys = keys | (ROWS[record.optimizer.name].settings.keys() - {"lr"})
        groups = record.optimizer.groups
        held = dict.fromkeys(key for group in groups for key in group if key in keys)
        named += [f"{key} in the optimizer's groups" for key in held]
    unplaced = list(record.model.unplaced) if record.model else []
    if unplaced:
        some = ", ".join(unplaced[:2]) + (", ..." if unplaced[2:] else "")
        named.append(f"the tensors that MLX does not have ({some})")
    if not named:
        return []
    return [
        f"{', '.join(named)}: the pattern's (--like), not this run's. Set them right "
        "in PyTorch after loading." + _schedule_note(found)
    ]


def _schedule_note(found: Mapping[str, Any]) -> str:
    at = schedules(found)
    if not at:
        return ""
    said = ", ".join(f"{name} (last_epoch {epoch})" for name, epoch in at.items())
    return (
        f" {said}: a learning rate schedule, which may count steps or epochs and was "
        "not moved; loaded as it is, PyTorch goes on with the rates from there."
    )


def _may_count(name: str, value: Any) -> bool:
    """Tell whether an entry may change by a step; text, flags and settings do not."""
    if _SETTINGS.fullmatch(name.rpartition("/")[2]):
        return False
    return not all(isinstance(plain_value(x), _CONSTANT) for x in leaves(value))


def leaves(value: Any) -> list[Any]:
    """Return what is not a container in a tree of dicts, lists and tuples, in order.

    Without the path to each, as ``tree_flatten`` has it: a file may have one long key
    above very many values.

    Example:
        >>> leaves({"a": [1, (2, None)], "b": "x"})
        [1, 2, None, 'x']
    """
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            found.append(value)
            return
        for item in value:
            visit(item)

    visit(value)
    return found
