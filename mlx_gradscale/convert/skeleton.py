"""A checkpoint without its sections: they are cut out, and put back in their places."""

from collections.abc import Mapping
from typing import Any, cast

from ..run_folder.values import SectionMark
from ..torch_checkpoint.foreign import DefaultDict

Path = tuple[str | int, ...]


def get(checkpoint: Any, path: Path) -> Any:
    """Return the value at a path.

    Example:
        >>> get({"optimizers": [{"lr": 1}]}, ("optimizers", 0, "lr"))
        1
    """
    for key in path:
        checkpoint = checkpoint[key]
    return checkpoint


def cut(checkpoint: Any, sections: Mapping[str, Path]) -> Any:
    """Return the checkpoint with a :class:`SectionMark` for each section."""
    marks = {path: SectionMark(name) for name, path in sections.items()}
    return _replace(checkpoint, (), marks)


def paste(skeleton: Any, values: Mapping[str, Any]) -> Any:
    """Return the checkpoint with its sections in place; absent ones are left out.

    Example:
        >>> marks = SectionMark("model"), SectionMark("scaler")
        >>> paste({"net": marks[0], "scaler": marks[1]}, {"model": 1})
        {'net': 1}
    """
    if isinstance(skeleton, SectionMark):
        if skeleton not in values:
            raise ValueError(f"The run has no {skeleton} state, and must have one.")
        return values[skeleton]
    if isinstance(skeleton, Mapping):
        pasted = {
            key: paste(value, values)
            for key, value in skeleton.items()
            if not (isinstance(value, SectionMark) and value not in values)
        }
        return _like(skeleton, pasted)
    if type(skeleton) in (list, tuple):
        return type(skeleton)(paste(value, values) for value in skeleton)
    return skeleton


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if isinstance(mapping, DefaultDict):
        return DefaultDict(items, mapping.factory)
    # From a dict: a Counter (MultiStepLR's milestones) would count pairs.
    kind: Any = type(mapping)
    return cast(Mapping[Any, Any], kind(items))


def _replace(value: Any, path: Path, by: Mapping[Path, SectionMark]) -> Any:
    if path in by:
        return by[path]
    if not any(target[: len(path)] == path for target in by):
        return value
    if isinstance(value, Mapping):
        replaced = {k: _replace(v, (*path, k), by) for k, v in value.items()}
        return _like(value, replaced)
    return type(value)(_replace(v, (*path, i), by) for i, v in enumerate(value))
