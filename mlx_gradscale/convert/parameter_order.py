"""Which parameter each index of a PyTorch optimizer state means."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .layouts import Plan
from .layouts.wrappers import unwrapped
from .sections import Unordered

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "_extra_state")
# Ways to place the names that are followed at once; beyond it, it is a guess.
_MOST_PLACINGS = 10_000


class OrderError(ValueError):
    """The parameters behind an optimizer's indices are not known."""


def parameter_names(
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    plan: Plan,
    names: Iterable[str] | None = None,
    rename: Callable[[str], str] = lambda name: name,
    order: Sequence[str] | None = None,
) -> tuple[dict[int, str], list[str]]:
    """Find the PyTorch name behind each index of an optimizer's state.

    Args:
        state_dict (dict): PyTorch's, with ``"state"`` and ``"param_groups"``.
        tensors (dict): The model's state dict.
        plan (Plan): Its plan; buffers and tied names are not parameters.
        names (Iterable, optional): All names in the optimizer's order, where they are
            known; or in the model's, from which groups took theirs by shape.
        rename (Callable): What the user makes of a name; names that it makes equal
            (with and without a wrapper's prefix, say) are taken for each other.
        order (list, optional): The names of ``tensors`` in the MLX model's order
            (:func:`mlx_order`), for a file that does not keep PyTorch's.

    Returns:
        tuple: Index -> name in ``tensors``; and sentences for the user, where the
        model's order was taken and shapes could not check it.

    Raises:
        OrderError: If more than one assignment fits in the model's order, or none.

    Example:
        >>> from mlx_gradscale.convert.layouts import make_plan
        >>> tensors = {"a": mx.zeros((2, 3)), "b": mx.zeros(3)}
        >>> groups = [{"params": [0]}, {"params": [1]}]
        >>> states = {0: {"exp_avg": mx.zeros(3)}, 1: {"exp_avg": mx.zeros((2, 3))}}
        >>> parameter_names({"state": states, "param_groups": groups}, tensors,
        ...                 make_plan(tensors))
        ({0: 'b', 1: 'a'}, [])
    """
    groups = state_dict["param_groups"]
    keys = _indices(state_dict)
    if keys and all(isinstance(key, str) for key in keys):
        # FullyShardedDataParallel's and torch.distributed's: the keys are the names.
        return _names_as_given(state_dict, keys, tensors, plan, rename), []
    if names is not None:
        found = _names_as_given(state_dict, list(names), tensors, plan, rename)
        if len(groups) > 1 and not _fit(found, state_dict, tensors):
            # As Transformers' Trainer parts them: those that decay, and the others.
            ordered = {name: tensors[name] for name in found.values()}
            found = _dealt_to_groups(state_dict, ordered, plan)
        return found, []
    named = [group.get("param_names", ()) for group in groups]
    if [len(n) for n in named] == [len(group["params"]) for group in groups]:
        saved = [name for each in named for name in each]
        return _names_as_given(state_dict, saved, tensors, plan, rename), []
    if not isinstance(tensors, Unordered):
        found = _dealt_to_groups(state_dict, tensors, plan)
        return found, _ambiguity_notes(found, state_dict, tensors, plan)
    try:
        return _matched_by_shape(state_dict, tensors, plan), []
    except OrderError as error:
        if order is None:
            raise
        try:
            ordered = {name: tensors[name] for name in order}
            found = _dealt_to_groups(state_dict, ordered, plan)
        except OrderError:  # the MLX model's layers are in another order
            raise error from None
    return found, [
        "The optimizer does not name its parameters, and a safetensors file does not "
        "keep their order: that of the MLX model's layers was taken, and fits by all "
        "shapes. If PyTorch's model has its layers in another order, moments of one "
        f"shape are now mixed up. To be sure: {_advice()}"
    ]


def mlx_order(
    tensors: Mapping[str, Any], plan: Plan, model: nn.Module | None
) -> list[str] | None:
    """Return PyTorch's names in the order in which PyTorch would give the model's.

    A module's own parameters come first, its weight before its bias, and then those
    of its modules, in the order in which they were assigned.

    Args:
        tensors (dict): The model's state dict.
        plan (Plan): Its plan.
        model (nn.Module, optional): The MLX model; without it, nothing is known.

    Example:
        >>> from mlx_gradscale.convert.layouts import make_plan
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> tensors = {f"{i}.{x}": mx.ones(2) for i in (1, 0) for x in ("bias",)}
        >>> tensors |= {"0.weight": mx.ones((2, 2)), "1.weight": mx.ones(2)}
        >>> mlx_order(tensors, make_plan(tensors, model), model)
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    # mlx-lm's models have layers in other orders than Transformers' (Llama's gate, down
    # and up, GPT-2's norms).
    if model is None or hasattr(model, "sanitize"):
        return None
    place = {name: i for i, (name, _) in enumerate(tree_flatten(model.parameters()))}
    known = sorted(plan.entries.values(), key=lambda entry: place[entry.mlx[0]])
    tree: dict[str, Any] = {}
    for entry in known:
        *path, leaf = entry.torch.split(".")
        holder = tree
        for word in path:
            holder = holder.setdefault(f"{word}.", {})
        holder[leaf] = entry.torch
    rest = [name for name in tensors if name not in plan.entries]
    return [*_leaves_first(tree), *rest]


def _leaves_first(tree: Mapping[str, Any]) -> Iterator[str]:
    leaves = {key: name for key, name in tree.items() if not key.endswith(".")}
    yield from (leaves.pop(key) for key in ("weight", "bias") if key in leaves)
    yield from leaves.values()
    for key, inner in tree.items():
        if key.endswith("."):
            yield from _leaves_first(inner)


def _advice(some_are_left: bool = False) -> str:
    trained = "[name for name, p in model.named_parameters() if p.requires_grad]"
    every = "[name for name, _ in model.named_parameters()]"
    names = trained if some_are_left else every
    return (
        "Save the optimizer with named parameters "
        "(optimizer(model.named_parameters())), or give the names in the optimizer's "
        f"order, group by group: names=... (--names FILE), from {names}."
    )


def _names_as_given(
    state_dict: Mapping[str, Any],
    given: Sequence[Any],
    tensors: Mapping[str, mx.array],
    plan: Plan,
    rename: Callable[[str], str],
) -> dict[int, str]:
    indices = _indices(state_dict)
    if len(given) != len(indices):
        raise OrderError(
            f"{len(given)} names for the optimizer's {len(indices)} parameters. "
            f"{_advice(len(given) > len(indices))}"
        )

    def plain(name: str) -> str:
        return unwrapped(rename(name))

    spelled: dict[str, list[str]] = {}
    for name in tensors:
        spelled.setdefault(plain(name), []).append(name)
    found = {}
    for index, name in zip(indices, given, strict=True):
        fits = [name] if name in tensors else spelled.get(plain(name), [])
        if len(fits) != 1 or not isinstance(tensors[fits[0]], mx.array):
            what = f"could be {' or '.join(fits)}" if fits[1:] else "is not"
            raise OrderError(
                f"The optimizer's parameter {name!r} {what} in the model's state "
                f"dict. {_advice()}"
            )
        found[index] = plan.tied.get(fits[0], fits[0])
    twice = [name for name, n in Counter(found.values()).items() if n > 1]
    if twice:
        raise OrderError(f"The names give {twice[0]!r} more than once. {_advice()}")
    return found


def _fit(
    found: Mapping[int, str],
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
) -> bool:
    states = state_dict["state"]
    return all(
        _shape(states.get(index, {})) in (None, tensors[name].shape)
        for index, name in found.items()
    )


def _ambiguity_notes(
    found: Mapping[int, str],
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    plan: Plan,
) -> list[str]:
    """Return a word where another assignment would fit the shapes as well."""
    held = any(_shape(state) is not None for state in state_dict["state"].values())
    if not held and len(state_dict["param_groups"]) == 1:
        return []  # nothing to mix up
    names = _candidates(tensors, plan)
    if len(names) == len(found) and not _fits_another(found, state_dict, tensors):
        return []
    shapes = Counter(tensors[name].shape for name in names)
    alike = [name for name in found.values() if shapes[tensors[name].shape] > 1]
    if not alike:
        return []
    return [
        "The optimizer does not name its parameters: the model's order was taken, as "
        f"in optimizer(model.parameters()). {len(alike)} of {len(found)} have the "
        f"shape of another ({', '.join(alike[:2])}, ...), so if the optimizer was "
        f"given another order, their moments are now mixed up. To be sure: {_advice()}"
    ]


def _fits_another(
    found: Mapping[int, str],
    state_dict: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
) -> bool:
    """Tell whether the shapes fit in the reverse or alphabetical order as well.

    Where they do not, it is the model's order, but for layers of the same shapes that
    somebody exchanged as a whole.
    """
    groups = [
        [found[index] for index in group["params"]]
        for group in state_dict["param_groups"]
    ]
    for other in ([g[::-1] for g in groups], [sorted(g) for g in groups]):
        pairs = [
            (a, b)
            for group, turned in zip(groups, other, strict=True)
            for a, b in zip(group, turned, strict=True)
        ]
        if any(a != b for a, b in pairs) and all(
            tensors[a].shape == tensors[b].shape for a, b in pairs
        ):
            return True
    return False


def _indices(state_dict: Mapping[str, Any]) -> list[int]:
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _matched_by_shape(
    state_dict: Mapping[str, Any], tensors: Mapping[str, mx.array], plan: Plan
) -> dict[int, str]:
    """Match names by shape alone, where each shape comes once."""
    indices = _indices(state_dict)
    names: dict[Any, list[str]] = {}
    for name in _candidates(tensors, plan):
        names.setdefault(tensors[name].shape, []).append(name)
    shapes = [_shape(state_dict["state"].get(index, {})) for index in indices]
    doubtful = any(len(names.get(shape, ())) != 1 for shape in shapes)
    if doubtful or len(set(shapes)) != len(shapes):
        raise OrderError(
            "The model was read from a safetensors file, which does not keep the order "
            f"of its tensors, and their shapes do not tell them apart. {_advice()}"
        )
    found = zip(indices, shapes, strict=True)
    return {index: names[shape][0] for index, shape in found}


def _candidates(tensors: Mapping[str, mx.array], plan: Plan) -> list[str]:
    """Return what may be a parameter, in the model's order; dropped ones may be too."""
    names: dict[str, None] = {}  # a tied tensor stands at its first name
    for name, tensor in tensors.items():
        is_buffer = name.rsplit(".", 1)[-1] in _BUFFERS
        if isinstance(tensor, mx.array) and not is_buffer:
            names[plan.tied.get(name, name)] = None
    return list(names)


def _dealt_to_groups(
    state_dict: Mapping[str, Any], tensors: Mapping[str, mx.array], plan: Plan
) -> dict[int, str]:
    """Deal the model's names out to the groups, each group in the model's order."""
    groups = [list(group["params"]) for group in state_dict["param_groups"]]
    shapes = {
        index: _shape(state_dict["state"].get(index, {}))
        for group in groups
        for index in group
    }
    names = _candidates(tensors, plan)
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
            raise OrderError(
                f"Too many orders of the parameters fit. {_advice(may_skip)}"
            )
    ways, path = placings.get(tuple(map(len, groups)), (0, None))
    if ways != 1:
        how_many = "More than one order" if ways else "No order"
        raise OrderError(
            f"{how_many} of the model's {len(names)} tensors fits the optimizer's "
            f"{len(shapes)} parameters. {_advice(may_skip)}"
        )
    found = {}
    while path is not None:
        index, name, path = path
        found[index] = name
    return dict(sorted(found.items()))


def _add(into: dict[Any, Any], key: tuple[int, ...], ways: int, path: Any) -> None:
    before = into.get(key, (0, None))[0]
    into[key] = (min(before + ways, 2), path)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    for key, value in state.items():
        if key != "step" and isinstance(value, mx.array):
            return value.shape
    return None
