"""Objects of other programs' classes in a checkpoint: where they can be, and a word."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..torch_checkpoint import Placeholder, plain_value
from .optimizers import ROWS
from .sections import SectionsError

# Keys of an optimizer's groups that decide how it steps.
_NEEDED = frozenset(
    {"lr", "params"}.union(
        *(row.settings.keys() | row.refused for row in ROWS.values())
    )
)
_MOST_NAMED = 8


def plain_section(section: str, value: Any) -> Any:
    """Return the section with Python's numbers instead of numpy's.

    Args:
        section (str): ``"model"``, ``"optimizer"`` or ``"scaler"``.
        value (Any): The section.

    Raises:
        SectionsError: If another object stands where a tensor or a number is needed.

    Example:
        >>> plain_section("scaler", {"scale": 2.0})
        {'scale': 2.0}
    """
    return _plain(section, value, (section,))


def _plain(section: str, value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, Placeholder):
        plain = plain_value(value)
        if isinstance(plain, (bool, int, float)):
            return plain
        if not _may_be_there(section, path):
            place, needed = "/".join(map(str, path)), "a tensor"
            if section == "scaler" or "param_groups" in path:
                needed = "a number"
            raise SectionsError(
                f"{place} is {kind(value)}, where {needed} is needed: save it as one "
                "in PyTorch."
            )
        return value
    if isinstance(value, Mapping):
        changed = {
            key: new
            for key, item in value.items()
            if (new := _plain(section, item, (*path, key))) is not item
        }
        return {**value, **changed} if changed else value
    if type(value) in (list, tuple):
        new = [_plain(section, item, (*path, i)) for i, item in enumerate(value)]
        same = all(a is b for a, b in zip(value, new, strict=True))
        return value if same else type(value)(new)
    return value


def _may_be_there(section: str, path: tuple[Any, ...]) -> bool:
    if section == "model":
        return str(path[-1]).rpartition(".")[2] == "_extra_state"
    # ("optimizer", "param_groups", 0, key, ...)
    return path[1:2] == ("param_groups",) and len(path) > 3 and path[3] not in _NEEDED


def kind(value: Placeholder) -> str:
    """Return what a placeholder stands for, in a word."""
    is_scalar = not value.is_name and value.path.endswith("multiarray.scalar")
    return "numpy scalar" if is_scalar else value.path


def foreign_notes(skeleton: Any) -> list[str]:
    """Return a sentence on the objects in a checkpoint that are kept and not used.

    Example:
        >>> args = Placeholder.named("argparse", "Namespace").called(b"R", ())
        >>> foreign_notes({"args": args, "epoch": 3})
        ['Kept for the way back as they are: args (argparse.Namespace).']
    """
    found = [f"{'/'.join(path)} ({kind(value)})" for path, value in _find(skeleton, ())]
    if not found:
        return []
    more = len(found) - _MOST_NAMED
    said = ", ".join(found[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return [f"Kept for the way back as they are: {said}."]


def _find(
    value: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], Placeholder]]:
    if isinstance(value, Placeholder):
        yield path or ("the file itself",), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find(item, (*path, str(key)[:80]))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _find(item, (*path, str(i)))
