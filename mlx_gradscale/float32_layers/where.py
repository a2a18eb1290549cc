"""Resolve which layers ``where`` means: paths, globs, chains, a predicate, a file."""

import difflib
import json
import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..files.atomic import atomic_write
from .calls import has_call

# "layers.3 to norm": no path has a space in it.
TO = " to "
THE_LOSS = "the loss"

_FORMAT = "mlx_gradscale.float32_layers"
_VERSION = 1
# A thousand layers with their reasons are some 200 kB.
_MAX_BYTES = 2**22


class HasWhere(Protocol):
    """The results of ``find_float32_layers`` and ``float32_layers``."""

    @property
    def where(self) -> Sequence[str]:
        """The layers, as ``float32_layers`` takes them."""


Where = (
    str | Iterable[str] | HasWhere | Callable[[str, nn.Module], bool] | os.PathLike[str]
)


@dataclass(frozen=True)
class Chain:
    """Layers that pass float32 to each other, in the order of their calls.

    Attributes:
        entry (str): The entry of ``where`` that names them.
        layers (tuple): Paths and modules.
        reaches_loss (bool): Whether the last layer passes float32 on, too.
    """

    entry: str
    layers: tuple[tuple[str, nn.Module], ...]
    reaches_loss: bool = False


def resolve(model: nn.Module, where: Where) -> list[Chain]:
    """Return the layers that ``where`` names, without layers inside of others.

    Raises:
        ValueError: An entry names no layer of the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be an mlx.nn.Module, got {model!r}.")
    modules = dict(ordered_modules(model))
    chains: dict[str, Chain] = {}
    for entry in _entries(where, modules):
        for chain in _chains(model, modules, entry):
            chains.setdefault(chain.entry, chain)
    every = [path for chain in chains.values() for path, _ in chain.layers]
    for path in every:
        if not has_call(type(modules[path])):
            prefix = f"{path}." if path else ""
            raise ValueError(
                f"{path or 'The model'!r} has no __call__ of its own: name the modules "
                f"inside of it, for example '{prefix}*'."
            )
    outermost = []
    for chain in chains.values():
        layers = tuple(
            (path, module)
            for path, module in chain.layers
            if not any(path != other and is_inside(path, other) for other in every)
        )
        if layers:
            outermost.append(Chain(chain.entry, layers, chain.reaches_loss))
    return outermost


def ordered_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module with its path, in the order of definition."""
    found: list[tuple[str, nn.Module]] = []
    _collect_modules(model, "", (), found)
    return found


def _collect_modules(
    tree: Any, path: str, above: tuple[int, ...], found: list[tuple[str, nn.Module]]
) -> None:
    if id(tree) in above:
        return
    if isinstance(tree, nn.Module):
        found.append((path, tree))
    above = (*above, id(tree))
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, (dict, list)):
            name = f"{path}.{key}" if path else str(key)
            _collect_modules(value, name, above, found)


def module_path(modules: Container[str], path: str) -> str:
    """Return the path of the module that holds a parameter, also inside of lists."""
    path = path.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def is_inside(path: str, outer: str) -> bool:
    """Tell whether a path is that of a module or lies inside of it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def _entries(where: Any, modules: dict[str, nn.Module]) -> list[str]:
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
            raise ValueError("The function returns True for no module of the model.")
        return found
    if isinstance(where, Iterable):
        entries = list(where)
        if all(isinstance(entry, str) for entry in entries):
            return entries
    raise TypeError(
        "Name the layers by a path, a glob, a list of these, a function of path and "
        f"module, or a .json file, got {where!r}."
    )


def _chains(model: nn.Module, modules: dict[str, nn.Module], entry: str) -> list[Chain]:
    *parts, last = entry.split(TO)
    reaches_loss = bool(parts) and last == THE_LOSS
    if not reaches_loss:
        parts = [*parts, last]
    found = [_matches(model, modules, part) for part in parts]
    if TO not in entry:
        return [Chain(path, ((path, modules[path]),)) for path in found[0]]
    named = {path for matches in found for path in matches}
    paths = found[0]
    for matches in found[1:]:
        between = _between(modules, paths[-1], matches[0])
        # A layer that the chain names has its place where it is named.
        paths = [*paths, *(path for path in between if path not in named), *matches]
    layers = tuple((path, modules[path]) for path in paths)
    return [Chain(entry, layers, reaches_loss)]


def _between(modules: dict[str, nn.Module], first: str, last: str) -> list[str]:
    """Return the layers that a model defines between two layers."""
    paths = list(modules)
    found: list[str] = []
    for path in paths[paths.index(first) + 1 : paths.index(last)]:
        is_part = any(is_inside(path, outer) for outer in (first, *found))
        if not is_part and not is_inside(last, path) and has_call(type(modules[path])):
            found.append(path)
    return found


def _matches(model: nn.Module, modules: dict[str, nn.Module], name: str) -> list[str]:
    if name in modules:
        return [name]
    if set(name) & set("*?["):
        found = [path for path in modules if path and fnmatchcase(path, name)]
        if not found:
            raise ValueError(f"{name!r} matches no module.{_nearest(name, modules)}")
        return found
    value: Any = model
    for key in name.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else getattr(value, key)
        except (AttributeError, IndexError, ValueError):
            nearest = _nearest(name, modules)
            raise ValueError(f"{name!r} names no module.{nearest}") from None
    owner = name.rpartition(".")[0] or "the model itself, ''"
    kind = "function" if callable(value) else type(value).__name__
    kind = "parameter" if isinstance(value, mx.array) else kind
    raise ValueError(f"{name!r} is a {kind}: name the module that uses it, {owner}.")


def _nearest(name: str, modules: dict[str, nn.Module]) -> str:
    near = difflib.get_close_matches(name, [m for m in modules if m], 3, cutoff=0.4)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def save_float32_layers(
    path: str | os.PathLike[str],
    layers: Iterable[str],
    reasons: Sequence[dict[str, Any]] = (),
) -> None:
    """Write layers to a ``.json`` file that ``float32_layers`` takes.

    Args:
        path (str): Ends in ``.json``.
        layers (list): Paths, globs and chains, as for ``float32_layers``.
        reasons (list): Rows for people to read; nothing reads them back.
    """
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"The file must end in .json, got {os.fspath(path)!r}.")
    content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    content["layers"] = list(layers)
    if reasons:
        content["reasons"] = list(reasons)
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def load_float32_layers(path: str | os.PathLike[str]) -> list[str]:
    """Read the layers that :func:`save_float32_layers` wrote.

    Raises:
        ValueError: The file is not such a list.
    """
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        content = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.get("format") == _FORMAT:
        layers: Any = content.get("layers")
        is_list = isinstance(layers, list) and all(isinstance(x, str) for x in layers)
        if is_list and content.get("version") == _VERSION:
            return list(layers)
    raise ValueError(
        f"{os.fspath(path)} is not a list of float32 layers. Write one with "
        "find_float32_layers(...).save(path)."
    )
