"""Find the parameter behind each index in PyTorch's optimizer state."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .layouts import Plan
from .names import from_peft, unwrap
from .optimizer_section import Index, OptimizerSection
from .options import Options
from .tree import ConvertError, list_some

# An optimizer's number, and a parameter's index in that optimizer.
Key = tuple[int, Index]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# Limit on search steps for an assignment, about a second. Real models take thousands.
# If more are needed, so many assignments match that none can be trusted.
_MOST_WORK = 1_000_000


def parameter_names(
    sections: Sequence[OptimizerSection],
    tensors: Mapping[str, mx.array],
    plan: Plan,
    options: Options,
    model: nn.Module | None = None,
    is_ordered: bool = True,
) -> tuple[list[dict[Index, str]], list[str]]:
    """Find the PyTorch name behind each index of one or more optimizers.

    If the tensors are not in PyTorch's order, the order of the MLX model is tried. The
    second result is notes on cases where shapes could not confirm the order.
    """
    order = _Order(sections, tensors, plan)
    found, notes = _find(order, options, model, is_ordered)
    out: list[dict[Index, str]] = [{} for _ in sections]
    for number, index in order.keys:
        out[number][index] = found[number, index]
    return out, notes


class _Order:
    """The indices and their candidate names."""

    def __init__(
        self,
        sections: Sequence[OptimizerSection],
        tensors: Mapping[str, mx.array],
        plan: Plan,
    ) -> None:
        self.tensors, self.plan = tensors, plan
        self.groups: list[list[Key]] = [
            [(i, index) for index in group["params"]]
            for i, section in enumerate(sections)
            for group in section.groups
        ]
        self.saved = [
            list(group.get("param_names", ()))
            for section in sections
            for group in section.groups
        ]
        self.keys = [key for group in self.groups for key in group]
        self.shapes = {(i, index): sections[i].shape(index) for i, index in self.keys}

    def candidates(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the possible parameters; a tied tensor is listed by its first name."""
        names = self.tensors if names is None else names
        parameters = [n for n in names if n.rpartition(".")[2] not in _BUFFERS]
        return list(dict.fromkeys(self.plan.tied.get(n, n) for n in parameters))


def _find(
    order: _Order, options: Options, model: nn.Module | None, is_ordered: bool
) -> tuple[dict[Key, str], list[str]]:
    if order.keys and all(isinstance(index, str) for _, index in order.keys):
        # FullyShardedDataParallel and torch.distributed use names as indices.
        given = [str(index) for _, index in order.keys]
        return _match_names(order, given, options.renamed), []
    if options.names is not None:
        found = _match_names(order, options.names, options.renamed)
        if len(order.groups) > 1 and not _fits(order, found):
            # Transformers' Trainer groups them by weight decay: with, then without.
            found = _deal(order, list(found.values()))
        return found, []
    if [len(n) for n in order.saved] == [len(group) for group in order.groups]:
        saved = [name for names in order.saved for name in names]
        return _match_names(order, saved, options.renamed), []
    if is_ordered:
        found = _deal(order, order.candidates())
        return found, _exchange_notes(order, [*found.values()])
    by_shape = _match_shapes(order)
    if by_shape is not None:
        return by_shape, []
    try:
        found = _deal(order, order.candidates(_mlx_order(order, model)))
    except ConvertError:  # no model, or its layers are in another order
        raise ConvertError(
            "The model was read from a safetensors file, which does not keep the order "
            f"of its tensors, and their shapes do not tell them apart. {_advice()}"
        ) from None
    return found, [
        "The optimizer does not name its parameters, and a safetensors file does not "
        "keep their order: the order of the MLX model's layers was taken, and all "
        "shapes match. If PyTorch's model has its layers in another order, moments of "
        f"one shape are now exchanged. To be sure: {_advice()}"
    ]


def _advice(some_are_left: bool = False) -> str:
    trained = "[name for name, p in model.named_parameters() if p.requires_grad]"
    every = "[name for name, _ in model.named_parameters()]"
    names = trained if some_are_left else every
    return (
        "Save the optimizer with named parameters "
        "(optimizer(model.named_parameters())), or give the names in the optimizer's "
        f"order, group by group: names=... (--names FILE), from {names}."
    )


def _match_names(
    order: _Order, given: Sequence[str], rename: Callable[[str], str]
) -> dict[Key, str]:
    """Match explicitly given names, ignoring wrapper prefixes."""
    if len(given) != len(order.keys):
        raise ConvertError(
            f"{len(given)} names for the optimizer's {len(order.keys)} parameters. "
            f"{_advice(len(given) > len(order.keys))}"
        )

    def plain(name: str) -> str:
        return from_peft(unwrap(rename(name)))[0]

    spelled: dict[str, list[str]] = {}
    for name in order.tensors:
        spelled.setdefault(plain(name), []).append(name)
    found = {}
    for key, name in zip(order.keys, given, strict=True):
        fits = [name] if name in order.tensors else spelled.get(plain(name), [])
        if len(fits) != 1:
            what = f"could be {' or '.join(fits)}" if fits else "is not"
            raise ConvertError(
                f"The optimizer's parameter {name!r} {what} in the model's state "
                f"dict. {_advice()}"
            )
        found[key] = order.plan.tied.get(fits[0], fits[0])
    twice = [name for name, n in Counter(found.values()).items() if n > 1]
    if twice:
        raise ConvertError(f"The names give {twice[0]!r} more than once. {_advice()}")
    return found


def _fits(order: _Order, found: Mapping[Key, str]) -> bool:
    return all(
        order.shapes[key] in (None, order.tensors[name].shape)
        for key, name in found.items()
    )


def _match_shapes(order: _Order) -> dict[Key, str] | None:
    """Match names by shape alone, if every shape is unique."""
    names = order.candidates()
    by_shape: dict[Any, str] = {order.tensors[name].shape: name for name in names}
    shapes = [*order.shapes.values()]
    count: Counter[Any] = Counter(order.tensors[name].shape for name in names)
    if len(set(shapes)) < len(shapes) or any(count[shape] != 1 for shape in shapes):
        return None
    return {key: by_shape[shape] for key, shape in order.shapes.items()}


def _mlx_order(order: _Order, model: nn.Module | None) -> list[str]:
    """Return PyTorch's names in the order PyTorch would list the model's parameters.

    A module's own parameters come first, weight before bias, followed by those of its
    submodules in the order in which they were assigned.
    """
    # mlx-lm orders some layers differently from Transformers (Llama's gate, down and
    # up, GPT-2's norms).
    if model is None or hasattr(model, "sanitize"):
        raise ConvertError("No known order.")
    place = {name: i for i, (name, _) in enumerate(tree_flatten(model.parameters()))}
    entries = order.plan.entries
    tree: dict[str, Any] = {}
    for entry in sorted(entries.values(), key=lambda e: place.get(e.mlx[0], -1)):
        *path, leaf = entry.torch.split(".")
        holder = tree
        for word in path:
            holder = holder.setdefault(f"{word}.", {})
        holder[leaf] = entry.torch
    return [*_own_first(tree), *(n for n in order.tensors if n not in entries)]


def _own_first(tree: Mapping[str, Any]) -> Iterator[str]:
    own = {key: name for key, name in tree.items() if not key.endswith(".")}
    yield from (own.pop(key) for key in ("weight", "bias") if key in own)
    yield from own.values()
    for key, inner in tree.items():
        if key.endswith("."):
            yield from _own_first(inner)


def _deal(order: _Order, names: list[str]) -> dict[Key, str]:
    """Assign the names to the groups, keeping the order of names within each group.

    A placing is the number of assigned parameters in each group. It maps to the number
    of ways to reach it (2 means many) and one of them, as linked (key, name) pairs.
    """
    groups = order.groups
    may_skip = len(names) > len(order.keys)
    placings: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    work = 0
    for name in names:
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for dealt, (ways, path) in placings.items():
            work += len(groups)
            if work > _MOST_WORK:
                raise ConvertError(
                    f"Too many orders of the parameters fit. {_advice(may_skip)}"
                )
            for group, done in enumerate(dealt):
                if done == len(groups[group]):
                    continue
                key = groups[group][done]
                if order.shapes[key] in (None, order.tensors[name].shape):
                    work += len(groups)
                    step = tuple(d + (g == group) for g, d in enumerate(dealt))
                    _add(following, step, ways, (key, name, path))
            if may_skip:
                _add(following, dealt, ways, path)
        placings = following
    ways, path = placings.get(tuple(map(len, groups)), (0, None))
    if ways != 1:
        raise ConvertError(_misfit(order, names, ways, may_skip))
    found = {}
    while path is not None:
        key, name, path = path
        found[key] = name
    return {key: found[key] for key in order.keys}


def _add(into: dict[Any, Any], key: tuple[int, ...], ways: int, path: Any) -> None:
    before = into.get(key, (0, None))[0]
    into[key] = (min(before + ways, 2), path)


def _misfit(order: _Order, names: list[str], ways: int, may_skip: bool) -> str:
    known = {tuple(order.tensors[name].shape) for name in names}
    flat = [s for s in order.shapes.values() if s and len(s) == 1 and s not in known]
    if flat and may_skip:
        return (
            f"The optimizer keeps {len(order.keys)} flat tensors for the model's "
            f"{len(names)}, as DeepSpeed, ZeRO and fairseq do in half precision. Such "
            "a state is not converted: leave it out with --optimizer-key '', or save "
            "the optimizer of an unflattened float32 model."
        )
    how_many = "More than one order" if ways else "No order"
    return (
        f"{how_many} of the model's {len(names)} tensors fits the optimizer's "
        f"{len(order.keys)} parameters. {_advice(may_skip)}"
    )


def _exchange_notes(order: _Order, names: list[str]) -> list[str]:
    """Return a note if top-level modules with equal shapes may have been swapped."""
    if len(order.groups) == 1 and not any(order.shapes.values()):
        return []  # nothing to swap
    children: dict[str, list[Any]] = {}
    for name in names:
        head, dot, _ = name.partition(".")
        if dot:
            children.setdefault(head, []).append(tuple(order.tensors[name].shape))
    count = Counter(map(tuple, children.values()))
    alike = [head for head, shapes in children.items() if count[tuple(shapes)] > 1]
    if not alike:
        return []
    return [
        "The optimizer does not name its parameters: the model's order was taken, as "
        f"in optimizer(model.parameters()). {list_some(alike, 3)} have the shapes of "
        "others, so if the optimizer was given another order, their moments are now "
        f"exchanged. To be sure: {_advice()}"
    ]
