"""A scaler's values as PyTorch's state dict, and back."""

from typing import Any

from .scale import FIELDS, SETTINGS, TORCH_KEYS, check, clamped

_OWN_KEYS = [name for name in FIELDS if name not in TORCH_KEYS.values()]


class EmptyStateError(RuntimeError, ValueError):
    """There is nothing in a state dict: PyTorch raises a RuntimeError."""


def to_state_dict(values: dict[str, Any]) -> dict[str, Any]:
    """Return PyTorch's five keys, and others only where not at their default."""
    own = {k: values[k] for k in _OWN_KEYS if values[k] != FIELDS[k][1]}
    return {key: values[name] for key, name in TORCH_KEYS.items()} | own


def from_state_dict(state_dict: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state dict of this package or of PyTorch, or raise.

    Args:
        state_dict (dict): Trackers and tallies that it does not have start at zero.
        settings (dict): What counts for settings that it does not have.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"Expected a dict, got {type(state_dict).__name__}.")
    if not state_dict:
        raise EmptyStateError(
            "The state dict is empty, as a disabled GradScaler writes it: there is "
            "nothing to load."
        )
    missing = [key for key in TORCH_KEYS if key not in state_dict]
    if missing:
        inside = [key for key, value in state_dict.items() if _is_complete(value)]
        hint = f" It is a whole checkpoint: load its {inside[0]!r}." if inside else ""
        raise KeyError(f"The state dict has no {', '.join(missing)}.{hint}")
    fresh = {k: default for k, (_, default) in FIELDS.items() if k not in SETTINGS}
    given = {n: _as_number(state_dict[k]) for k, n in TORCH_KEYS.items()}
    own = {k: _as_number(state_dict[k]) for k in _OWN_KEYS if k in state_dict}
    values = clamped(settings | fresh | given | own)
    check(values)
    return values


def _is_complete(value: Any) -> bool:
    return isinstance(value, dict) and TORCH_KEYS.keys() <= value.keys()


def _as_number(value: Any) -> Any:
    # PyTorch keeps a scale as a 0-d tensor if it was loaded as one.
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value
