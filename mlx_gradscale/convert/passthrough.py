"""What of a checkpoint only passes through MLX, and of which step it is."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..torch_checkpoint import plain_value
from .optimizers import ROWS, SCHEDULED
from .sections import Part

# In a live record only: the entries as they were read, and that they are a pattern's.
READ, PATTERN = "read", "pattern"
# Entry -> the step counts at which it was changed in a live record.
CHANGED = "changed"
_STEP = re.compile(r"(?:states\.(\d+)\.)?step")
# What a training script was started with goes by these names.
_SETTINGS = re.compile(r"(\w+_)?(args|cfg|config|hparams|hyper_parameters)")
_STATES = re.compile(r"(?<!training_args)\.(pkl|pth|bin)$")
_CONSTANT = (str, bool, type(None))


def entries(skeleton: Any, path: tuple = ()) -> dict[str, Any]:
    """What of a checkpoint is in no part, by its place.

    Example:
        >>> entries({"net": Part("model"), "epoch": 3, "amp": [Part("scaler"), 7]})
        {'epoch': 3, 'amp/1': 7}
    """
    if isinstance(skeleton, Part):
        return {}
    if not any(isinstance(leaf, Part) for leaf in leaves(skeleton)):
        return {"/".join(map(str, path)): skeleton}
    is_dict = isinstance(skeleton, Mapping)
    inner = skeleton.items() if is_dict else enumerate(skeleton)
    found = (entries(value, (*path, key)) for key, value in inner)
    return {name: value for each in found for name, value in each.items()}


def schedules(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries that are states of PyTorch's schedules, with their last_epoch.

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
    """The step count of each optimizer in a flat state, in their order.

    Example:
        >>> steps_of({"states.1.step": mx.array(4), "states.0.step": mx.array(3)})
        [3, 4]
    """
    found = {
        int(match[1] or 0): step
        for key, step in optimizer.items()
        if (match := _STEP.fullmatch(key))
    }
    return [found[index].item() for index in sorted(found)]


def remember(record: dict[str, Any]) -> None:
    """Notes in a record how its entries are now, as :func:`settle` needs it."""
    if "checkpoint" in record:
        found = entries(record["checkpoint"])
        record[READ] = {name: _flat(value) for name, value in found.items()}


def settle(
    record: Mapping[str, Any], optimizer: Mapping[str, mx.array] | None
) -> dict[str, Any]:
    """The record to write: an entry that was changed since is of the step now.

    Args:
        record: a live run's.
        optimizer: the run's flat optimizer state.
    """
    out = {key: value for key, value in record.items() if key not in (READ, PATTERN)}
    if READ not in record or "checkpoint" not in record or not optimizer:
        return out
    read, now = record[READ], steps_of(optimizer)
    changed = {
        name: now
        for name, value in entries(record["checkpoint"]).items()
        if name not in read or not _same(read[name], _flat(value))
    }
    if changed:
        out[CHANGED] = out.get(CHANGED, {}) | changed
    return out


def age_notes(
    record: Mapping[str, Any], optimizer: Mapping[str, mx.array] | None
) -> list[str]:
    """Sentences on entries that are of another step than the optimizer."""
    if record.get(PATTERN):
        return _pattern_notes(record)
    now = steps_of(optimizer or {})
    if not now:
        return []
    record = settle(record, optimizer)
    start = record["optimizer"]["steps"] if "optimizer" in record else [0] * len(now)
    changed = record.get(CHANGED, {})
    found = entries(record["checkpoint"])
    behind: dict[tuple[int, int], list[str]] = {}
    for name, value in found.items():
        if not _may_count(name, value):
            continue
        pairs = zip(changed.get(name, start), now, strict=False)
        then, at = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
        if then != at:
            behind.setdefault((then, at), []).append(name)
    # Random states, positions in the data, objects that were registered.
    states = [n for n in record.get("carried", {}) if _STATES.search(n)]
    for then, at in zip(start[:1], now[:1], strict=False):
        if states and then != at:
            behind.setdefault((then, at), []).extend(states)
    return [
        f"{', '.join(names)}: as of step {then}, and the optimizer stands at step "
        f"{at}. What of it counts or changes with the steps is out of date: set it in "
        'record["checkpoint"] of what load_run returns and give that record to '
        "save_run(record=...), or set it in PyTorch after loading."
        + _schedule_note({name: found[name] for name in names if name in found})
        for (then, at), names in behind.items()
    ]


def _pattern_notes(record: Mapping[str, Any]) -> list[str]:
    found = entries(record["checkpoint"])
    named = list(found)
    if "optimizer" in record:
        groups, name = record["optimizer"]["groups"], record["optimizer"]["name"]
        keys = SCHEDULED
        if not record.get("used"):  # not by save_run: nothing tells the run's own
            keys = keys | (ROWS[name].settings.keys() - {"lr"})
        held = dict.fromkeys(key for group in groups for key in group if key in keys)
        named += [f"{key} in the optimizer's groups" for key in held]
    aside = list(record["model"]["aside"]) if "model" in record else []
    if aside:
        some = ", ".join(aside[:2]) + (", ..." if aside[2:] else "")
        named.append(f"the tensors that MLX has not ({some})")
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
    """Whether an entry may change with the steps: text, flags and settings do not."""
    if _SETTINGS.fullmatch(name.rpartition("/")[2]):
        return False
    return not all(isinstance(plain_value(x), _CONSTANT) for x in leaves(value))


def leaves(value: Any) -> list[Any]:
    """What is no container in a tree of dicts, lists and tuples, in its order.

    Without the path to each, as ``tree_flatten`` has it: a file may have one long key
    above very many values.

    Example:
        >>> leaves({"a": [1, (2, None)], "b": "x"})
        [1, 2, None, 'x']
    """
    return [leaf for leaf in _flat(value) if type(leaf) is not tuple]


def _flat(value: Any) -> list[Any]:
    """The leaves, and a tuple that tells its keys, or length, for each container."""
    flat: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            flat.append((dict, list(value)))
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            flat.append((list, len(value)))
            for item in value:
                visit(item)
        else:
            flat.append(value)

    visit(value)
    return flat


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return a.dtype == b.dtype and mx.array_equal(a, b, equal_nan=True).item()
    return type(a) is type(b) and (a == b or (a != a and b != b))  # NaN is NaN
