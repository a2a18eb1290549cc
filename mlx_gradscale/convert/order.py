"""Which parameter each index of a PyTorch optimizer state means."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..layouts import Plan
from .parts import Unordered

_BUFFERS = ("running_mean", "running_var")
# Ways to place the names that are followed at once; beyond it, it is a guess.
_MOST_PLACINGS = 10_000
_HOW = (
    "Save the optimizer with named parameters (optimizer(model.named_parameters())), "
    "or give the names in order: names=... (--names FILE), from "
    "[name for name, _ in model.named_parameters()]."
)


class OrderError(ValueError):
    """The parameters behind an optimizer's indices cannot be told."""


def parameter_names(
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    plan: Plan,
    names: Iterable[str] | None = None,
) -> tuple[dict[int, str], str]:
    """Finds the PyTorch name behind each index of an optimizer's state.

    Args:
        state_dict: PyTorch's, with ``"state"`` and ``"param_groups"``.
        tensors: the model's state dict.
        plan: its plan; buffers and tied names are not parameters.
        names: all names in the optimizer's order, where they are known.

    Returns:
        tuple: index -> name, and a word on where the names came from.

    Raises:
        OrderError: if more than one assignment fits, or none.

    Example:
        >>> from mlx_gradscale.layouts import make_plan
        >>> tensors = {"a": mx.zeros((2, 3)), "b": mx.zeros(3)}
        >>> groups = [{"params": [0]}, {"params": [1]}]
        >>> states = {0: {"exp_avg": mx.zeros(3)}, 1: {"exp_avg": mx.zeros((2, 3))}}
        >>> parameter_names({"state": states, "param_groups": groups}, tensors,
        ...                 make_plan(tensors))[0]
        {0: 'b', 1: 'a'}
    """
    groups = state_dict["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    if names is not None:
        given, source = list(names), "given"
    elif all(len(g.get("param_names", ())) == len(g["params"]) for g in groups):
        given = [name for group in groups for name in group["param_names"]]
        source = "param_names"
    elif isinstance(tensors, Unordered):
        return _matched(state_dict, tensors, plan), "their shapes alone"
    else:
        return _placed(state_dict, tensors, plan), "the model's order, by shape"
    if len(given) != len(indices):
        raise OrderError(
            f"{len(given)} names for the optimizer's {len(indices)} parameters. {_HOW}"
        )
    found = {}
    for index, name in zip(indices, given, strict=True):
        name = plan.tied.get(name, name)
        if name not in plan.entries:
            raise OrderError(
                f"The optimizer's parameter {name!r} is not in the model's state "
                f"dict. {_HOW}"
            )
        found[index] = name
    return found, source


def _matched(
    state_dict: Mapping[str, Any], tensors: Mapping[str, mx.array], plan: Plan
) -> dict[int, str]:
    """Names by shape alone, where each shape comes once."""
    indices = [
        index for group in state_dict["param_groups"] for index in group["params"]
    ]
    names: dict[Any, list[str]] = {}
    for name in _candidates(plan):
        names.setdefault(tensors[name].shape, []).append(name)
    shapes = [_shape(state_dict["state"].get(index, {})) for index in indices]
    doubtful = any(len(names.get(shape, ())) != 1 for shape in shapes)
    if doubtful or len(set(shapes)) != len(shapes):
        raise OrderError(
            "The model was read from a safetensors file, which does not keep the order "
            f"of its tensors, and their shapes do not tell them apart. {_HOW}"
        )
    found = zip(indices, shapes, strict=True)
    return {index: names[shape][0] for index, shape in found}


def _candidates(plan: Plan) -> list[str]:
    return [name for name in plan.entries if name.rsplit(".", 1)[-1] not in _BUFFERS]


def _placed(
    state_dict: Mapping[str, Any], tensors: Mapping[str, mx.array], plan: Plan
) -> dict[int, str]:
    """Deals the model's names out to the groups, each group in the model's order."""
    groups = [list(group["params"]) for group in state_dict["param_groups"]]
    shapes = {
        index: _shape(state_dict["state"].get(index, {}))
        for group in groups
        for index in group
    }
    names = _candidates(plan)
    may_skip = len(names) > len(shapes)
    # A placing is how many of each group are dealt; it maps to the number of ways
    # there (2 stands for many) and one of them, as linked (index, name) pairs.
    placings: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, None)}
    for name in names:
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for dealt, (ways, path) in placings.items():
            for group, done in enumerate(dealt):
                if done == len(groups[group]):
                    continue
                index = groups[group][done]
                if shapes[index] in (None, tensors[name].shape):
                    step = tuple(d + (g == group) for g, d in enumerate(dealt))
                    _add(following, step, ways, (index, name, path))
            if may_skip:
                _add(following, dealt, ways, path)
        placings = following
        if len(placings) > _MOST_PLACINGS:
            raise OrderError(f"Too many orders of the parameters fit. {_HOW}")
    ways, path = placings.get(tuple(map(len, groups)), (0, None))
    if ways != 1:
        how_many = "More than one order" if ways else "No order"
        raise OrderError(
            f"{how_many} of the model's {len(names)} tensors fits the optimizer's "
            f"{len(shapes)} parameters. {_HOW}"
        )
    found = {}
    while path is not None:
        index, name, path = path
        found[index] = name
    return dict(sorted(found.items()))


def _add(into: dict, key: tuple[int, ...], ways: int, path: Any) -> None:
    before = into.get(key, (0, None))[0]
    into[key] = (min(before + ways, 2), path)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    for key, value in state.items():
        if key != "step" and isinstance(value, mx.array):
            return value.shape
    return None
