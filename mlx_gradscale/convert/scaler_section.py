"""The scaler's section of a checkpoint, in whichever framework's format."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .. import formats


def to_scaler(
    section: Mapping[str, Any], format: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the ``GradScaler.state_dict`` of a section, and sentences for the user."""
    return _with_notes(lambda: formats.read_state(section, format))


def from_scaler(state: dict[str, Any], format: str) -> tuple[Any, list[str]]:
    """Return the scaler's section of a PyTorch checkpoint.

    Args:
        state (dict): A ``GradScaler.state_dict``.
        format (str): Of the section that it came from.

    Returns:
        tuple: The section, and sentences for the user.
    """
    row = formats.FORMATS[format]
    if format == "torch":
        # PyTorch ignores keys it does not know, and the way back needs them.
        rules = ("backoff_interval", "dynamic", "min_scale", "max_scale")
        ignored = [key for key in rules if key in state]
        said = f"PyTorch's GradScaler ignores {', '.join(ignored)}."
        return dict(state), [said] if ignored else []
    target = format if row.writes and format != "flodl" else "torch"
    out, notes = _with_notes(lambda: formats.write_state(state, target))
    if target != format:
        notes.append(
            f"The scaler state came from {format}; it is written as PyTorch's."
        )
    return out, notes


def _with_notes(convert: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", formats.FormatWarning)
        made = convert()
    return made, [str(warning.message) for warning in said]
