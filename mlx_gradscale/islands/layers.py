"""Let chosen layers of a half-precision model compute in float32."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..masters import HALF
from ..state_tree import at_once
from .calls import (
    ISLAND,
    Chain,
    Island,
    computing_in,
    float32_gradients,
    get_island,
    set_island,
)
from .file import save_float32_layers
from .where import Entry, Where, find_members, ordered_modules

# A module, the name of one of its arrays, and the dtype that this had.
Statistic = tuple[nn.Module, str, mx.Dtype]


class Float32Layers:
    """The layers that :func:`float32_layers` has changed, to be changed back.

    Attributes:
        where (list): What :func:`float32_layers` takes to do the same.
        paths (list): The paths of the modules.
    """

    def __init__(
        self,
        model: nn.Module,
        where: list[Entry],
        made: list[Any],
        statistics: list[Statistic],
    ):
        self.where = where
        self.paths = list(dict.fromkeys(path for path, _ in made))
        self._model = model
        self._islands = {island for _, island in made}
        self._statistics = statistics

    def undo(self) -> None:
        """Let the layers compute as they did before."""
        for _, module in ordered_modules(self._model):
            set_island(module, _without(get_island(module), self._islands))
        self._islands = set()
        for module, name, dtype in self._statistics:
            module[name] = module[name].astype(dtype)
        self._statistics = []

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layers to a ``.json`` file that :func:`float32_layers` takes."""
        save_float32_layers(path, self.where)

    def __enter__(self) -> "Float32Layers":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Float32Layers({self.where})"


def float32_layers(model: nn.Module, where: Where) -> Float32Layers:
    """Let layers of a float16 or bfloat16 model compute in float32.

    What goes into such a layer and what it holds is cast to float32 for the call, and
    what comes out is cast back, so that all that follows is as fast and as small as
    before. Use it where the forward pass overflows: no loss scale helps there. The
    parameters keep their names, their dtype and their place; saving, loading,
    freezing, LoRA and quantizing go on as before. Only the running statistics of a
    ``nn.BatchNorm`` become float32: a variance above 65504 would be inf, and small
    changes of a mean would be lost. In a layer that computes in float32
    anyway nothing changes. A step that was compiled before has to be compiled again.

    Where the value that is too large is handed on from layer to layer, as in a
    residual stream, name the first and the last layer: ``"layers.3 to norm"`` are
    these two and every one that the model defines between them, and only the last
    casts back. ``"head to the loss"`` does not cast back at all, so that the loss is
    computed in float32. A list in the list names the layers of one island one by one,
    in the order in which they are called.

    Args:
        model (nn.Module): The model. It is changed in place.
        where (str, list, Callable or Path): A path as ``"layers.3.mlp"``, a glob as
            ``"*.mlp"``, a range as above, a list of these; a function of path
            and module that returns True; what :func:`find_float32_layers`
            returned; or the ``.json`` file that it was saved in.

    Returns:
        Float32Layers: Has ``undo()``, and does it by itself after ``with``.

    Raises:
        ValueError: Something names no module. The model is as it was.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale import float32_layers
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model.set_dtype(mx.float16)
        >>> model.layers[0].weight *= 30000
        >>> model.layers[1].weight *= 0
        >>> x = mx.full((1, 2), 1000, mx.float16)
        >>> mx.isfinite(model(x)).all().item()
        False
        >>> layers = float32_layers(model, "layers.0 to layers.1")
        >>> mx.isfinite(model(x)).all().item(), model(x).dtype
        (True, mlx.core.float16)
        >>> layers.undo()
    """
    found = find_members(model, where)
    made: list[tuple[str, Island]] = []
    for members in found:
        chain = Chain(members.name)
        modules = [module for _, module in members.modules]
        last = None if members.open else modules[-1]
        for path, module in members.modules:
            ends = module is modules[0], module is last
            island = Island(chain, *ends, before=get_island(module))
            set_island(module, island)
            made.append((path, island))
    inside = [module for members in found for _, module in members.modules]
    statistics = _raise_statistics(inside)
    return Float32Layers(model, [members.name for members in found], made, statistics)


def list_float32_layers(model: nn.Module) -> list[Entry]:
    """Return which layers :func:`float32_layers` has changed, as it takes them.

    Args:
        model (nn.Module): The model.
    """
    islands = [get_island(module) for _, module in ordered_modules(model)]
    every = [each for i in islands if i for each in reversed(list(i.all()))]
    chains = {id(each.chain): each.chain for each in every}
    return [chain.name for chain in chains.values()]


def remove_float32_layers(model: nn.Module) -> None:
    """Undo every :func:`float32_layers` of a model, as of one that was unpickled.

    Args:
        model (nn.Module): The model.
    """
    for _, module in ordered_modules(model):
        set_island(module, None)


@contextlib.contextmanager
def kept_in_float32(
    model: nn.Module,
    compute_dtype: mx.Dtype | None = None,
    keep: Callable[[str, mx.array], bool] | None = None,
) -> Iterator[Callable[[str, mx.array], bool]]:
    """Run modules with parameters that are to be kept as islands, for the while.

    Yields a function of path and parameter: whether the parameter is not to be cast
    to ``compute_dtype``, because ``keep`` says so or because it is in an island. In
    the meantime islands cast back to ``compute_dtype`` where nothing else says so,
    and gradients of parameters in islands are float32.

    A module that holds other modules casts only its own parameters and its outputs;
    the outermost one casts nothing, as the loss comes after it.

    Args:
        model (nn.Module): The model.
        compute_dtype (Dtype, optional): What the other parameters are cast to.
        keep (Callable, optional): Told the path and value of a trainable parameter,
            returns True to leave it as it is.
    """
    modules = dict(ordered_modules(model))
    inside = {path for path, module in modules.items() if get_island(module)}
    undo: list[Callable[[], Any]] = []
    put_back = at_once(undo)

    def kept(path: str, parameter: mx.array) -> bool:
        return _is_in_any(path, inside) or bool(keep and keep(path, parameter))

    try:
        for path in _owners(model, modules, keep) if keep else []:
            if path and not _is_in_any(path, inside):
                module = modules[path]
                undo.append(partial(vars(module).pop, ISLAND, None))
                undo.append(
                    partial(object.__setattr__, module, "__class__", type(module))
                )
                set_island(module, Island(Chain(path), deep=False))
        with computing_in(compute_dtype), float32_gradients():
            yield kept
    finally:
        put_back()


def _raise_statistics(modules: list[nn.Module]) -> list[Statistic]:
    """Cast the running statistics in modules to float32, and return what they were."""
    raised = []
    for module in (inner for outer in modules for inner in outer.modules()):
        for name in half_statistics(module):
            raised.append((module, name, module[name].dtype))
            module[name] = module[name].astype(mx.float32)
    return raised


def half_statistics(module: nn.Module) -> list[str]:
    """Return the names of a BatchNorm's running statistics in half precision."""
    if not isinstance(module, nn.BatchNorm):
        return []
    names = ("running_mean", "running_var")
    return [name for name in names if name in module and module[name].dtype in HALF]


def _is_in_any(path: str, outer: set[str]) -> bool:
    if not outer:
        return False
    keys = path.split(".")
    return any(".".join(keys[:n]) in outer for n in range(len(keys) + 1))


def _without(island: Island | None, gone: set[Island]) -> Island | None:
    while island in gone:
        island = island.before
    if island is not None:
        island.before = _without(island.before, gone)
    return island


def _owners(
    model: nn.Module,
    modules: dict[str, nn.Module],
    keep: Callable[[str, mx.array], bool],
) -> list[str]:
    """Return the paths of modules that hold a parameter that is kept."""
    owners = {}
    for path, parameter in tree_flatten(model.trainable_parameters()):
        if keep(path, parameter):
            # A parameter in a list or dict belongs to the module around that.
            owner = path.rpartition(".")[0]
            while owner not in modules:
                owner = owner.rpartition(".")[0]
            owners[owner] = True
    return list(owners)
