"""Whether what a file says is an optimizer's state can be one."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .table import ROWS, SCHEDULED

_LARGEST_NUMBER, _MOST_STEPS = 1e18, 2**53


def check_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Raise on a state dict that ``torch.optim`` would not write.

    Args:
        state_dict (dict): With ``"state"`` and ``"param_groups"``.

    Example:
        >>> check_state_dict({"state": {0: 3}, "param_groups": [{"params": [0]}]})
        Traceback (most recent call last):
        ...
        ValueError: The optimizer's state is damaged: that of 0 must be a dict, not 3.
    """
    indices = []
    for group in state_dict["param_groups"]:
        _need(all(type(key) is str for key in group), "keys of a group", "texts", group)
        params = group["params"]
        _need(isinstance(params, (list, tuple)), "params", "a list", params)
        _need(all(type(i) in (int, str) for i in params), "params", "indices", params)
        names = group.get("param_names", ())
        is_list = isinstance(names, (list, tuple))
        _need(is_list and all(type(n) is str for n in names), "param_names", "texts",
              names)  # fmt: skip
        indices += params
    _need(len(set(indices)) == len(indices), "params", "different", indices)
    _need(len(set(map(type, indices))) < 2, "params", "all numbers or names", indices)
    known = set(indices)
    for index, state in state_dict["state"].items():
        _need(type(index) in (int, str), "an index", "a number or a name", index)
        _need(index in known, "an index of the state", "one of params", index)
        _need(isinstance(state, Mapping), f"that of {index}", "a dict", state)
        _need(all(type(key) is str for key in state), f"that of {index}",
              "a dict of texts", list(state))  # fmt: skip
        if state.get("step") is not None:
            fits = is_number(state["step"]) and 0 <= _float(state["step"]) < _MOST_STEPS
            _need(fits, f"step of {index}", "a count", state["step"])


def check_group(name: str, group: Mapping[str, Any]) -> None:
    """Raise on settings of a group that are not numbers.

    Args:
        name (str): A key of :data:`ROWS`.
        group (dict): One of ``param_groups``.

    Example:
        >>> check_group("SGD", {"lr": "fast", "momentum": 0, "nesterov": False})
        Traceback (most recent call last):
        ...
        ValueError: The optimizer's state is damaged: lr must be a number, not 'fast'.
    """
    row = ROWS[name]
    numbers = {*row.settings, *row.refused, *SCHEDULED, "dampening", "lr_decay"}
    for key in (key for key in group if key in numbers):
        if group[key] is not None or key in row.settings:
            check_setting(key, group[key])


def check_slots(name: str, state: Mapping[str, Any], parameter: str) -> None:
    """Raise on moments that are not arrays."""
    for slot in ROWS[name].slots:
        is_right = state.get(slot) is None or isinstance(state[slot], mx.array)
        _need(is_right, f"{slot} of {parameter}", "a tensor", state.get(slot))


def check_setting(key: str, value: Any, where: str | None = None) -> None:
    """Raise unless a setting is a number; of betas there are two."""
    if key == "betas":
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        is_right = is_pair and all(map(is_number, value))
        _need(is_right, where or key, "two numbers", value)
    else:
        _need(is_number(value), where or key, "a number", value)


def is_number(value: Any) -> bool:
    """Tell whether a value is a real number, however PyTorch writes one.

    Example:
        >>> is_number(mx.array([1.0])), is_number(10**400), is_number("1")
        (True, False, False)
    """
    if isinstance(value, mx.array):
        return value.size == 1 and value.dtype != mx.complex64
    # An int may be of any size, and a float is at most 1.8e308.
    return type(value) in (bool, int, float) and not abs(value) > _LARGEST_NUMBER


def _float(value: Any) -> float:
    plain: Any = value.item() if isinstance(value, mx.array) else value
    return float(plain)


def _need(is_right: bool, where: str, what: str, value: Any) -> None:
    if not is_right:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(
            f"The optimizer's state is damaged: {where} must be {what}, not {shown}."
        )
