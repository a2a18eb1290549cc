"""Which modules are meant: paths, globs, chains, ranges, a predicate or a file."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from .calls import defines
from .file import load_float32_layers

# "layers.3 to norm"; no path has a space in it.
TO = " to "
THE_LOSS = "the loss"

Entry = str | Sequence[str]


class HasWhere(Protocol):
    """What find_float32_layers and float32_layers return."""

    @property
    def where(self) -> Sequence[Entry]:
        """The layers, as ``float32_layers`` takes them."""


Where = (
    Entry
    | Iterable[Entry]
    | HasWhere
    | Callable[[str, nn.Module], bool]
    | os.PathLike[str]
    | None
)


@dataclass(frozen=True)
class Members:
    """Modules of one island, in the order in which they hand values on.

    Attributes:
        name (str or list): The entry that names them.
        modules (list): Paths and modules.
        open (bool): Whether float32 goes on to the loss function.
    """

    name: Entry
    modules: list[tuple[str, nn.Module]]
    open: bool = False


def find_members(model: nn.Module, where: Where) -> list[Members]:
    """Return the modules that ``where`` names; those inside others are left out.

    Raises:
        ValueError: Something matches no module; the nearest is named.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a module of mlx.nn, got {model!r}.")
    modules = dict(ordered_modules(model))
    found = [
        members
        for entry in _entries(where, modules)
        for members in _members(model, modules, entry)
    ]
    for members in found:
        for path, module in members.modules:
            if not defines(type(module), "__call__"):
                raise ValueError(
                    f"{path or 'The model'} has no __call__ of its own: name the "
                    f"modules in it, as {path + '.' if path else ''}*."
                )
    return _without_inner(found)


def ordered_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module with its path, in the order of definition."""
    found: list[tuple[str, nn.Module]] = []
    _collect_modules(module, "", (), found)
    return found


def _collect_modules(
    box: Any, path: str, above: tuple[int, ...], found: list[tuple[str, nn.Module]]
) -> None:
    if id(box) in above:
        return
    if isinstance(box, nn.Module):
        found.append((path, box))
    above = (*above, id(box))
    for key, value in box.items() if isinstance(box, dict) else enumerate(box):
        if type(value) is not mx.array and isinstance(value, (dict, list)):
            name = f"{path}.{key}" if path else str(key)
            _collect_modules(value, name, above, found)


def is_inside(path: str, outer: str) -> bool:
    """Tell whether a path lies in the module at another, or is it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def _entries(where: Any, modules: dict[str, nn.Module]) -> Sequence[Entry]:
    # What find_float32_layers and float32_layers return, and the file of them.
    if getattr(where, "problem", ""):
        raise ValueError(f"No layers in float32 help. {where.problem}")
    where = getattr(where, "where", where)
    is_file = isinstance(where, str) and where.endswith(".json")
    if is_file or isinstance(where, os.PathLike):
        return load_float32_layers(where)
    if isinstance(where, str):
        return [where]
    if callable(where):
        found = [path for path, module in modules.items() if where(path, module)]
        if not found:
            raise ValueError("The function says True for no module of the model.")
        return found
    if isinstance(where, Iterable):
        entries = list(where)
        if all(_is_entry(entry) for entry in entries):
            return entries
    raise TypeError(
        "Name the layers by a path, a glob, a list of these, a function of path and "
        f"module, or a .json file, got {where!r}."
    )


def _is_entry(entry: Any) -> bool:
    chain = isinstance(entry, (list, tuple)) and len(entry) > 0
    return isinstance(entry, str) or (chain and all(isinstance(x, str) for x in entry))


def _members(
    model: nn.Module, modules: dict[str, nn.Module], entry: Entry
) -> Iterator[Members]:
    if not isinstance(entry, str):
        *paths, last = entry
        is_open = last == THE_LOSS
        paths = paths if is_open else list(entry)
        chain = [(path, _module_at(model, modules, path)) for path in paths]
        if not chain:
            raise ValueError(f"A chain of layers needs a layer, got {entry!r}.")
        yield Members(entry, chain, is_open)
    elif TO in entry:
        first, _, last = entry.partition(TO)
        yield Members(
            entry, _range(model, modules, first, last.strip()), last == THE_LOSS
        )
    elif set(entry) & set("*?["):
        found = [path for path in modules if fnmatchcase(path, entry)]
        if not found:
            raise ValueError(f"{entry!r} matches no module.{_nearest(entry, modules)}")
        for path in found:
            yield Members(path, [(path, modules[path])])
    else:
        yield Members(entry, [(entry, _module_at(model, modules, entry))])


def _range(
    model: nn.Module, modules: dict[str, nn.Module], first: str, last: str
) -> list[tuple[str, nn.Module]]:
    paths = list(modules)
    _module_at(model, modules, first)
    start, end = paths.index(first), len(paths) - 1
    if last != THE_LOSS:
        _module_at(model, modules, last)
        end = paths.index(last)
        if end < start or is_inside(last, first):
            raise ValueError(
                f"{last} is not after {first} in the model: name the layers of the "
                f"island one by one, in the order in which they are called, as "
                f"[[{first!r}, ..., {last!r}]]."
            )
    chosen: list[str] = []
    for path in paths[start : end + 1]:
        around = last != THE_LOSS and path != last and is_inside(last, path)
        if not around and not any(is_inside(path, outer) for outer in chosen):
            chosen.append(path)
    called = [path for path in chosen if defines(type(modules[path]), "__call__")]
    return [(path, modules[path]) for path in called]


def _module_at(model: nn.Module, modules: dict[str, nn.Module], path: str) -> nn.Module:
    if path in modules:
        return modules[path]
    value: Any = model
    for key in path.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else getattr(value, key)
        except (AttributeError, IndexError, ValueError):
            raise ValueError(
                f"{path!r} names no module.{_nearest(path, modules)}"
            ) from None
    owner = path.rpartition(".")[0] or "the model itself, ''"
    kind = "a parameter" if isinstance(value, mx.array) else f"a {type(value).__name__}"
    kind = "a plain function" if callable(value) else kind
    raise ValueError(f"{path!r} is {kind}, no module: name what uses it, {owner}.")


def _nearest(path: str, modules: dict[str, nn.Module]) -> str:
    near = difflib.get_close_matches(path, [m for m in modules if m], 3, cutoff=0.4)
    return f" The nearest is {' or '.join(near)}." if near else ""


def _without_inner(found: list[Members]) -> list[Members]:
    """Leave out modules that lie in an island, and are float32 without more."""
    every = [path for members in found for path, _ in members.modules]

    def is_outermost(path: str) -> bool:
        return not any(path != other and is_inside(path, other) for other in every)

    outermost: list[Members] = []
    for members in found:
        modules = [(p, m) for p, m in members.modules if is_outermost(p)]
        known = [other.name for other in outermost]
        if modules and members.name not in known:
            outermost.append(Members(members.name, modules, members.open))
    return outermost
