"""Optimizer states as torch.distributed writes them: flattened, or keyed by texts."""

import re
from collections.abc import Mapping
from typing import Any

_STATE, _GROUPS = "state.", "param_groups."
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def is_flat(value: Any) -> bool:
    """Tell whether ``flatten_optimizer_state_dict=True`` made this dict.

    Example:
        >>> is_flat({"state.fc.weight.step": 1, "param_groups.fc.weight.lr": 0.1})
        True
    """
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(key.startswith(_GROUPS) for key in value)
        and all(_is_path(key) for key in value)
    )


def _is_path(key: str) -> bool:
    return key.startswith((_STATE, _GROUPS)) and key.count(".") >= 2


def unflattened(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state dict, keyed by names; another one as it is.

    Parameters with the same settings are one group. Of one that is not flattened, and
    has numbers for its parameters, the state is keyed by numbers too: a folder of
    torch.distributed.checkpoint has texts in their place.

    Example:
        >>> unflattened({"state.w.step": 1, "param_groups.w.lr": 0.1})
        {'state': {'w': {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': ['w']}]}
        >>> unflattened({"state": {"0": {}}, "param_groups": [{"params": [0]}]})
        {'state': {0: {}}, 'param_groups': [{'params': [0]}]}
    """
    if not is_flat(value):
        return _numbered(value)
    states: dict[str, dict[Any, Any]] = {}
    settings: dict[str, dict[Any, Any]] = {}
    for key, item in value.items():
        into = states if key.startswith(_STATE) else settings
        _, _, path = key.partition(".")
        name, _, last = path.rpartition(".")
        into.setdefault(name, {})[last] = item
    groups: dict[str, dict[str, Any]] = {}
    for name, found in settings.items():
        # Values may be arrays, which are compared by what they print.
        key = repr([(k, v) for k, v in sorted(found.items()) if k != "params"])
        group = groups.setdefault(key, {**found, "params": []})
        group["params"].append(name)
    return {"state": states, "param_groups": list(groups.values())}


def _numbered(value: Mapping[str, Any]) -> Mapping[str, Any]:
    states = value.get("state", {})
    value = {**value, "state": states}
    if not states or not all(type(k) is str and _NUMBER.fullmatch(k) for k in states):
        return value
    numbers = {
        index
        for group in value["param_groups"]
        if isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for index in group["params"]
        if type(index) is int
    }
    if not all(int(key) in numbers for key in states):
        return value
    return {**value, "state": {int(key): slots for key, slots in states.items()}}


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`unflattened`.

    Example:
        >>> group = {"lr": 0.1, "params": ["w"]}
        >>> flattened({"state": {"w": {"step": 1}}, "param_groups": [group]})
        {'state.w.step': 1, 'param_groups.w.lr': 0.1}
    """
    out = {
        f"{_STATE}{name}.{slot}": item
        for name, slots in state["state"].items()
        for slot, item in slots.items()
    }
    for group in state["param_groups"]:
        for name in group["params"]:
            held = {k: v for k, v in group.items() if k != "params"}
            out |= {f"{_GROUPS}{name}.{key}": item for key, item in held.items()}
    return out
