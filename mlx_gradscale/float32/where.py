"""Resolve the ``where`` argument of ``float32_layers`` to the modules it selects."""

import difflib
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.disk import read_json

# Joins the first and the last layer of a chain. Paths do not contain spaces.
TO = " to "
# Ends a chain whose last layer passes float32 on to the loss.
TO_THE_LOSS = " to the loss"

FORMAT = {"format": "mlx_gradscale.float32_layers", "version": 1}


def ordered_modules(
    model: nn.Module, path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for a model and its submodules, in definition order."""
    yield path, model
    for name, x in tree_flatten(model.children(), is_leaf=nn.Module.is_module):
        if isinstance(x, nn.Module):
            yield from ordered_modules(x, f"{path}.{name}" if path else name)


def is_inside(path: str, *outer: str) -> bool:
    """Return whether a path equals one of the outer paths or lies inside one."""
    return any(not each or f"{path}.".startswith(f"{each}.") for each in outer)


def resolve(model: nn.Module, where: Any) -> dict[str, list[str]]:
    """Return the paths that each entry selects, except those nested in others.

    The entry of a chain has several paths; a glob gives an entry for each of its paths.

    Raises:
        ValueError: If an entry matches no module, or a module without ``__call__``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be an mlx.nn.Module, got {model!r}.")
    modules = dict(ordered_modules(model))
    found: dict[str, list[str]] = {}
    for entry in _entries(where, modules):
        first, to, last = entry.removesuffix(TO_THE_LOSS).partition(TO)
        if to or entry.endswith(TO_THE_LOSS):
            found[entry] = _chain(modules, first, last if to else first)
        elif entry in modules:
            found[entry] = [entry]
        else:
            matches = [path for path in modules if path and fnmatchcase(path, entry)]
            if not matches:
                raise _unknown(modules, entry)
            found |= {path: [path] for path in matches}
    every = {path for paths in found.values() for path in paths}
    for path in every:
        if not callable(modules[path]):
            raise ValueError(
                f"{repr(path) if path else 'The model'} does not define __call__. Name "
                f"the modules inside it, for example '{path}{'.' if path else ''}*'."
            )
    outermost = {path for path in every if not is_inside(path, *(every - {path}))}
    kept = {name: [p for p in found[name] if p in outermost] for name in found}
    return {entry: paths for entry, paths in kept.items() if paths}


def _entries(where: Any, modules: dict[str, nn.Module]) -> list[str]:
    if getattr(where, "problem", ""):
        raise ValueError(f"Computing layers in float32 does not help. {where.problem}")
    where = getattr(where, "where", where)
    is_file = isinstance(where, str) and where.endswith(".json")
    if is_file or isinstance(where, os.PathLike):
        return _read(where)
    if isinstance(where, str):
        return [where]
    if callable(where) and not isinstance(where, (type, nn.Module)):
        return [path for path, module in modules.items() if where(path, module)]
    entries: list[Any] = list(where) if isinstance(where, Iterable) else [None]
    if not all(isinstance(entry, str) for entry in entries):
        raise TypeError(
            "where must be a path, a glob, a chain, a list of these, a function of "
            f"path and module, or a .json file, got {where!r}."
        )
    return entries


def _chain(modules: dict[str, nn.Module], first: str, last: str) -> list[str]:
    """Return two layers, and those that the model defines between them."""
    paths = list(modules)
    for path in (first, last):
        if path not in modules:
            raise _unknown(modules, path)
    between = [
        path
        for path in paths[paths.index(first) + 1 : paths.index(last)]
        if callable(modules[path])
        and not is_inside(path, first)
        and not is_inside(last, path)
    ]
    return list(dict.fromkeys([first, *between, last]))


def _unknown(modules: dict[str, nn.Module], name: str) -> ValueError:
    near = difflib.get_close_matches(name, [m for m in modules if m], 3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"The model has no module {name!r}.{hint}")


def _read(path: str | os.PathLike[str]) -> list[str]:
    """Read the list of float32 layers from a file that ``Float32Search.save`` wrote."""
    content = read_json(path)
    if isinstance(content, dict) and FORMAT.items() <= content.items():
        layers: Any = content.get("layers")
        if isinstance(layers, list) and all(isinstance(x, str) for x in layers):
            return layers
    raise ValueError(
        f"{os.fspath(path)} does not contain a list of float32 layers. Create such a "
        "file with find_float32_layers(...).save(path)."
    )
