"""Check, read and update one optimizer's state dict in a checkpoint.

PyTorch indexes it by numbers or names. torch.distributed may flatten it
(``state.<name>.<slot>``) or write the numbers as strings.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..files.text import shorten
from ..torch_checkpoint import TensorShape
from .tree import ConvertError, Write, is_tensor, number

Index = int | str

_STATE, _GROUPS = "state.", "param_groups."
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_LARGEST_NUMBER, _MOST_STEPS = 1e18, 2**53
# Integers below this hash to themselves, so they cannot be chosen to collide.
_LARGEST_INDEX = 2**31


def is_nested(value: Any) -> bool:
    """Return whether a dict is a state dict; an empty ``state`` may be missing."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("param_groups"), list)
        and isinstance(value.get("state", {}), dict)
        and all(isinstance(g, dict) and "params" in g for g in value["param_groups"])
    )


def is_flat(value: Any) -> bool:
    """Return whether ``flatten_optimizer_state_dict=True`` made this dict."""
    return (
        isinstance(value, dict)
        and any(isinstance(key, str) and key.startswith(_GROUPS) for key in value)
        and all(
            isinstance(key, str)
            and key.startswith((_STATE, _GROUPS))
            and key.count(".") >= 2
            for key in value
        )
    )


class OptimizerSection:
    """A ``torch.optim`` state dict in any layout.

    Args:
        held (dict): The dict in the checkpoint; never modified here.

    Attributes:
        groups (list): The parameter groups, each with its ``params``.
        states (dict): Index -> slots, such as ``exp_avg``.
    """

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held
        self._is_flat = is_flat(held)
        self._keys: dict[Index, Any] = {}  # index -> key, where they differ
        if self._is_flat:
            self.groups, self.states = _unflatten(held)
        else:
            self.groups, self.states = held["param_groups"], held.get("state", {})
            _check(self.groups, {})
            self._read_numbers()
        _check(self.groups, self.states)

    def slots(self, index: Index) -> dict[str, Any]:
        """Return a parameter's state, empty if it has none yet."""
        return self.states.get(index) or {}

    def shape(self, index: Index) -> tuple[int, ...] | None:
        """Return a parameter's shape, taken from its moments, if it has any."""
        for slot, value in self.slots(index).items():
            if slot != "step" and is_tensor(value):
                return tuple(value.shape)
        return None

    def write_state(self, index: Index, slots: Mapping[str, Any]) -> list[Write]:
        """Return the writes that set these slots of a parameter; others are kept."""
        if not slots:
            return []
        if self._is_flat:
            return [
                Write(self._held, f"{_STATE}{index}.{k}", v) for k, v in slots.items()
            ]
        if index in self.states:
            return [Write(self.states[index], k, v) for k, v in slots.items()]
        states = self._held.get("state")
        if states is None:
            return [Write(self._held, "state", {index: dict(slots)})]
        return [Write(states, self._keys.get(index, index), dict(slots))]

    def write_setting(self, group: int, key: str, value: Any) -> list[Write]:
        """Return the writes that change a setting of a group."""
        if not self._is_flat:
            return [Write(self.groups[group], key, value)]
        names = self.groups[group]["params"]
        return [Write(self._held, f"{_GROUPS}{name}.{key}", value) for name in names]

    def drop_tensors(self, index: Index, slots: Iterable[str]) -> None:
        """Replace moments by their shapes."""
        held = self.slots(index)
        shapes = {
            slot: TensorShape.of(held[slot])
            for slot in slots
            if isinstance(held.get(slot), mx.array)
        }
        for write in self.write_state(index, shapes):
            write.container[write.key] = write.value

    def _read_numbers(self) -> None:
        """Convert the string keys of torch.distributed.checkpoint back to numbers."""
        known = {index for group in self.groups for index in group["params"]}
        if all(
            type(key) is str and _NUMBER.fullmatch(key) and int(key) in known
            for key in self.states
        ):
            self._keys = {int(key): key for key in self.states}
            self.states = {int(key): slots for key, slots in self.states.items()}


def _unflatten(
    held: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return groups and states; parameters with equal settings form one group."""
    states: dict[Any, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, item in held.items():
        into = states if key.startswith(_STATE) else settings
        name, _, last = key.partition(".")[2].rpartition(".")
        into.setdefault(name, {})[last] = item
    groups: dict[str, dict[str, Any]] = {}
    for name, found in settings.items():
        key = repr([(k, _brief(v)) for k, v in sorted(found.items()) if k != "params"])
        group = groups.setdefault(key, {**found, "params": []})
        group["params"].append(name)
    return list(groups.values()), states


def _brief(value: Any) -> Any:
    """Return a short description that distinguishes settings."""
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return [number(item) if is_number(item) else id(item) for item in value]
    return number(value) if value is None or is_number(value) else id(value)


def _check(groups: list[dict[Any, Any]], states: Mapping[Any, Any]) -> None:
    """Raise if PyTorch could not have written these groups and states."""
    indices: list[Any] = []
    for group in groups:
        need(_is_texts(list(group)), "a group's keys", "texts", group)
        params, names = group["params"], group.get("param_names", [])
        is_list = isinstance(params, (list, tuple))
        fits = is_list and all(map(_is_index, params))
        need(fits, "params", "a list of indices or names", params)
        need(_is_texts(names), "param_names", "a list of names", names)
        indices += params
    known = set(indices)
    need(len(known) == len(indices), "params", "different indices", indices)
    kinds = set(map(type, indices))
    need(len(kinds) < 2, "params", "all numbers or all names", indices)
    for index, slots in states.items():
        is_known = _is_index(index) and index in known
        need(is_known, "an index of the state", "one of params", index)
        fits = isinstance(slots, dict) and _is_texts(list(slots))
        need(fits, f"the state of {index}", "a dict of slots", slots)
        step = slots.get("step")
        fits = step is None or (
            is_number(step) and 0 <= float(number(step)) < _MOST_STEPS
        )
        need(fits, f"the step of {index}", "a count", step)


def _is_index(value: Any) -> bool:
    return type(value) is str or (type(value) is int and 0 <= value < _LARGEST_INDEX)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(x) is str for x in value)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number in any form that PyTorch writes."""
    if isinstance(value, mx.array):
        return value.size == 1 and value.dtype != mx.complex64
    # An int can have any size, but a float is at most 1.8e308.
    plain = number(value)
    return type(plain) in (bool, int, float) and not abs(plain) > _LARGEST_NUMBER


def need(is_right: bool, where: str, what: str, value: Any) -> None:
    """Raise unless a condition on an optimizer's state holds."""
    if not is_right:
        is_large = isinstance(value, (dict, list, tuple))
        shown = f"a {type(value).__name__}" if is_large else shorten(value, 60)
        raise ConvertError(
            f"The optimizer's state is damaged: {where} must be {what}, not {shown}."
        )
