"""Read, check and update the parameter groups of an optimizer's state dict.

A state dict identifies parameters by number or by name. torch.distributed may flatten
the state dict (``state.<name>.<slot>``) or write the numbers as strings. A template
stores the nested form of a flattened state dict.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..files.text import shorten
from .layouts import Entry
from .optimizer_table import OPTIMIZERS, SCHEDULED, OptimizerSpec, recognize
from .tree import ConvertError, is_tensor, number

Index = int | str

_STATE, _GROUPS = "state.", "param_groups."
_FLATTENED = "mlx_gradscale_flattened"  # marks a state dict that was flat
_LARGEST_NUMBER, MOST_STEPS = 1e18, 2**53
_LARGEST_INDEX = 2**31


@dataclass
class Group:
    """A parameter group of a PyTorch optimizer, and its place in the MLX state."""

    held: dict[Any, Any]  # the optimizer's state dict in the checkpoint
    settings: dict[str, Any]  # the group itself, with its params
    states: Mapping[str, dict[str, Any]]  # str(index) -> slots, for all groups
    kind: str  # a key of OPTIMIZERS
    entries: dict[Index, Entry] = field(default_factory=dict)  # parameters in MLX
    step: int = 0  # in the PyTorch checkpoint
    # The prefix of the group's MLX state: "states.<i>." in a MultiOptimizer, and empty
    # if one MLX optimizer covers all groups.
    prefix: str = ""

    @property
    def spec(self) -> OptimizerSpec:
        """The ``OPTIMIZERS`` entry for ``kind``."""
        return OPTIMIZERS[self.kind]

    def slots(self, index: Index) -> dict[str, Any]:
        """Return a parameter's state, or an empty dict if it has none yet."""
        return self.states.get(str(index)) or {}

    def lacks_state(self, index: Index) -> bool:
        """Return whether the checkpoint lacks any of a parameter's slots."""
        slots = self.slots(index)
        return any(slots.get(slot) is None for slot in self.spec.slots)

    def shape(self, index: Index) -> tuple[int, ...] | None:
        """Return the shape of a parameter's moments, or None if there are none."""
        for slot, value in self.slots(index).items():
            if slot != "step" and is_tensor(value):
                return tuple(value.shape)
        return None

    def write_slots(self, index: Index, slots: Mapping[str, Any]) -> None:
        """Update the given slots of a parameter's state; the others are kept."""
        if slots:
            states = self.held.setdefault("state", {})
            key = type(next(iter(states), index))(index)  # a number or a string
            states.setdefault(key, {}).update(slots)

    def check_settings(self) -> None:
        """Raise if a setting that the conversion needs is missing or invalid."""
        needed = ("lr", *self.spec.settings)
        for key in (*needed, *SCHEDULED):
            value = self.settings.get(key)
            if key == "betas":
                pair = value if isinstance(value, (list, tuple)) else ()
                is_right = len(pair) == 2 and all(map(_is_number, pair))
                need(is_right, key, "two numbers", value)
            elif value is not None or key in needed:
                need(_is_number(value), key, "a real number within 1e18", value)


def is_nested(value: Any) -> bool:
    """Return whether a value is a nested state dict; ``state`` may be missing."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("param_groups"), list)
        and value["param_groups"] != []
        and isinstance(value.get("state", {}), dict)
        and all(isinstance(g, dict) and "params" in g for g in value["param_groups"])
    )


def is_flat(value: Any) -> bool:
    """Return whether a value is a state dict that torch.distributed has flattened."""
    return (
        isinstance(value, dict)
        and _are_strings(value)
        and any(key.startswith(_GROUPS) for key in value)
        and all(
            key.startswith((_STATE, _GROUPS)) and key.count(".") >= 2 for key in value
        )
    )


def read_groups(held: dict[Any, Any], kind: str | None = None) -> list[Group]:
    """Return the groups of a nested or flat state dict, or raise if it is damaged.

    ``kind`` is the optimizer's class, if the user specified it.
    """
    if is_flat(held):
        _nest(held)
    groups, states = held["param_groups"], held.get("state", {})
    known = _check_groups(groups)
    for index, slots in states.items():
        is_known = _is_index(index) and str(index) in known
        need(is_known, "each index in the state", "an element of params", index)
        is_right = isinstance(slots, dict) and _are_strings(slots)
        need(is_right, f"the state of {index}", "a dict with string keys", slots)
        step = slots.get("step")
        is_count = _is_number(step) and 0 <= number(step) < MOST_STEPS
        is_right = step is None or is_count
        need(is_right, f"the step of {index}", "a number from 0 to 2**53", step)
    # torch.distributed.checkpoint writes numbers as strings.
    by_text = {str(index): slots for index, slots in states.items()}
    is_right = len(by_text) == len(states)
    need(is_right, "each index", "stored once (3 and '3' are equal)", states)
    slots = {slot for slots in states.values() for slot in slots}
    kind = recognize(groups, slots, kind)
    found = [Group(held, group, by_text, kind) for group in groups]
    for group in found:
        group.check_settings()
    return found


def _nest(held: dict[str, Any]) -> None:
    """Nest a flat state dict in place; parameters with equal settings form a group."""
    states: dict[str, dict[str, Any]] = {}
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
    held.clear()
    held |= {"state": states, "param_groups": [*groups.values()], _FLATTENED: True}


def flatten(held: dict[str, Any]) -> None:
    """Flatten a state dict again, in place, if it was flat in the checkpoint."""
    if held.pop(_FLATTENED, False):
        flat = {
            f"{_STATE}{name}.{slot}": x
            for name, slots in held.get("state", {}).items()
            for slot, x in slots.items()
        }
        for group in held["param_groups"]:
            for name in group["params"]:
                flat |= {f"{_GROUPS}{name}.{k}": x for k, x in group.items()}
                del flat[f"{_GROUPS}{name}.params"]
        held.clear()
        held |= flat


def _brief(value: Any) -> Any:
    """Return a key for comparing settings; only numbers are compared by value."""
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        return [number(item) if _is_number(item) else id(item) for item in value]
    return number(value) if value is None or _is_number(value) else id(value)


def _check_groups(groups: list[dict[str, Any]]) -> set[str]:
    """Return the indices, or raise if PyTorch could not have written these groups.

    The indices are strings, because a file can contain integers whose hashes collide.
    """
    indices: list[Any] = []
    for group in groups:
        need(_are_strings(group), "each group", "a dict with string keys", group)
        params, names = group["params"], group.get("param_names", [])
        is_right = isinstance(params, (list, tuple)) and all(map(_is_index, params))
        need(is_right, "params", "a list of integers from 0 or of names", params)
        is_right = isinstance(names, (list, tuple)) and _are_strings(names)
        need(is_right, "param_names", "a list of names", names)
        indices += params
    known = set(map(str, indices))
    is_right = len(known) == len(indices) and len(set(map(type, indices))) < 2
    need(is_right, "params", "distinct integers or distinct names", indices)
    return known


def _is_index(value: Any) -> bool:
    return type(value) is str or (type(value) is int and 0 <= value < _LARGEST_INDEX)


def _are_strings(values: Iterable[Any]) -> bool:
    return all(type(x) is str for x in values)


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number in any form that PyTorch writes."""
    if isinstance(value, mx.array):
        return value.size == 1 and value.dtype != mx.complex64
    # An int above 1.8e308 cannot be converted to a float.
    plain = number(value)
    return type(plain) in (bool, int, float) and not abs(plain) > _LARGEST_NUMBER


def need(is_right: bool, where: str, what: str, value: Any) -> None:
    """Raise a ``ConvertError`` about the optimizer state unless ``is_right``."""
    if not is_right:
        is_large = isinstance(value, (dict, list, tuple))
        shown = f"a {type(value).__name__} of length {len(value)}" if is_large else ""
        if is_tensor(value):
            shown = f"a tensor of shape {tuple(value.shape)}"
        raise ConvertError(
            f"The optimizer state is damaged: {where} must be {what}, got "
            f"{shown or shorten(value, 60)}. Save it again in PyTorch, or leave it out "
            "with keys={'optimizer': ''} (--optimizer-key '')."
        )
