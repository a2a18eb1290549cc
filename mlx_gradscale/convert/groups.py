"""Read the parameter groups of optimizers, and find the names of their parameters.

A state dict identifies parameters by number or by name. torch.distributed may flatten
the state dict (``state.<name>.<slot>``) or write the numbers as strings.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..files.text import list_some
from .files import ConvertError
from .hints import GIVEN_IN_ORDER, advise_names, doubt_order
from .layouts import Row, Shape
from .optimizer_table import OPTIMIZERS, OptimizerSpec, plain_setting, recognize
from .rows import Options, bare_name, from_peft
from .sections import is_flat

Index = int | str
Slots = dict[str, Any]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Group:
    """A parameter group of a PyTorch optimizer, and its place in the MLX state."""

    held: dict[Any, Any]  # the optimizer's state dict in the checkpoint
    settings: dict[str, Any]
    slots: dict[Index, Slots]  # each parameter's state; empty if it has none yet
    kind: str  # a key of OPTIMIZERS
    spec: OptimizerSpec
    rows: dict[Index, Row] = field(default_factory=dict)  # parameters that MLX has
    step: int = 0  # in the PyTorch checkpoint
    # The prefix of the group's MLX state: "states.<i>." in a MultiOptimizer, and empty
    # if one MLX optimizer covers all groups.
    prefix: str = ""

    def lacks_state(self, index: Index) -> bool:
        """Return whether the checkpoint lacks any of a parameter's moments."""
        return any(self.slots[index].get(slot) is None for slot in self.spec.slots)

    def shape(self, index: Index) -> Shape | None:
        """Return the shape of a parameter's moments, or None if there are none."""
        moments = [self.slots[index].get(slot) for slot in self.spec.slots]
        shapes = [tuple(x.shape) for x in moments if x is not None]
        if len({*shapes}) > 1:
            raise ValueError(f"the moments of parameter {index} differ in shape")
        return shapes[0] if shapes else None

    def moments(self) -> Iterator[tuple[Index, Row]]:
        """Yield the rows that map the parameters' slots to the flat MLX state."""
        for index, row in self.rows.items():
            for slot, ours in self.spec.slots.items():
                names = tuple(f"{self.prefix}{name}.{ours}" for name in row.mlx)
                yield index, replace(row, torch=slot, mlx=names)

    def write(self) -> None:
        """Write the settings, and slots that are new, into the state dict."""
        states = self.held.setdefault("state", {}) if not is_flat(self.held) else None
        own = {key: x for key, x in self.settings.items() if key != "params"}
        for index, slots in self.slots.items():
            if states is None:
                parts = ("state", slots), ("param_groups", own)
                self.held |= {
                    f"{p}.{index}.{k}": x for p, v in parts for k, x in v.items()
                }
            elif slots:
                key = type(next(iter(states), index))(index)  # a number or a string
                states[key] = slots


def read_groups(held: dict[Any, Any]) -> list[Group]:
    """Return the groups of a nested or flat state dict."""
    nested = _nest(held) if is_flat(held) else held
    groups, states = nested["param_groups"], nested.get("state", {})
    kind = recognize(groups, {slot for slots in states.values() for slot in slots})
    # torch.distributed.checkpoint writes numbers as strings.
    by_text = {str(index): slots for index, slots in states.items()}
    every = [{i: by_text.get(str(i)) or {} for i in x["params"]} for x in groups]
    pairs = zip(groups, every, strict=True)
    spec = OPTIMIZERS[kind]
    return [Group(held, group, slots, kind, spec) for group, slots in pairs]


def _nest(held: dict[str, Any]) -> dict[str, Any]:
    """Return a flat state dict as PyTorch nests it.

    Parameters with equal settings form a group.
    """
    parts: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, value in held.items():
        part, _, path = key.partition(".")
        name, _, last = path.rpartition(".")
        parts[part].setdefault(name, {})[last] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, settings in parts["param_groups"].items():
        alike = repr(sorted((k, plain_setting(x)) for k, x in settings.items()))
        groups.setdefault(alike, {**settings, "params": []})["params"].append(name)
    return parts | {"param_groups": [*groups.values()]}


def find_names(
    groups: Sequence[Group],
    tensors: Mapping[str, Any],
    rows: Mapping[str, Row],
    options: Options,
    is_ordered: bool,
) -> tuple[list[str], list[str]]:
    """Return the PyTorch name of each parameter, group by group, and notes.

    Names that were not given or saved are inferred from the order of the model's
    tensors, if it is PyTorch's (``is_ordered``), and from shapes. Where several names
    are possible, an error asks for them.
    """
    # The group and the shape of each parameter.
    places = [(at, x.shape(i)) for at, x in enumerate(groups) for i in x.slots]
    given = _saved_names(groups) if options.names is None else options.names
    if given is None:
        names = _list_parameters(tensors, rows)
    else:
        names, is_ordered = _match(given, tensors, rows, options, len(places)), True
    shapes = [tuple(tensors[name].shape) for name in names]
    is_known = given is not None or (is_ordered and len(groups) == 1)
    is_match = len(shapes) == len(places) and all(
        x in (None, shape) for (_, x), shape in zip(places, shapes, strict=True)
    )
    if not is_known or not is_match:
        # Transformers' Trainer splits the parameters into groups by weight decay.
        names = [names[at] for at in _deal(shapes, places, is_ordered)]
    elif options.names and len({*places}) > len({shape for _, shape in places}):
        return names, [GIVEN_IN_ORDER]
    is_doubtful = given is None and any(shape for _, shape in places)
    return names, _describe_doubt(names, tensors, places) if is_doubtful else []


def _saved_names(groups: Sequence[Group]) -> list[str] | None:
    """Return the names of the parameters that the optimizer saved, if it did."""
    indices = [index for group in groups for index in group.slots]
    # FullyShardedDataParallel and torch.distributed use names as indices.
    if indices and all(isinstance(index, str) for index in indices):
        return [*map(str, indices)]
    names = [x for group in groups for x in group.settings.get("param_names", ())]
    return names if len(names) == len(indices) else None


def _list_parameters(tensors: Mapping[str, Any], rows: Mapping[str, Row]) -> list[str]:
    """Return the names of a state dict's parameters in its order."""
    unique: dict[int, str] = {}  # each tied tensor counts once
    for name, x in tensors.items():
        # Integers are buffers.
        if name.rpartition(".")[2] not in _BUFFERS and "float" in str(x.dtype):
            unique.setdefault(id(x), rows[name].torch if name in rows else name)
    return [*unique.values()]


def _match(
    given: Collection[str],
    tensors: Mapping[str, Any],
    rows: Mapping[str, Row],
    options: Options,
    count: int,
) -> list[str]:
    """Match the given names to tensors, ignoring the words that wrappers insert."""

    def plain(name: str) -> str:
        return from_peft(bare_name(options.rename(name)))[0]

    spelled = {plain(name): name for name in tensors} | {name: name for name in tensors}
    fits = {name: spelled.get(name) or spelled.get(plain(name), "") for name in given}
    names = [rows[n].torch if n in rows else n for n in fits.values()]
    if "" in names or not len(given) == len({*names}) == count:
        wrong = [name for name, fit in fits.items() if not fit]
        what = f" No match: {list_some(wrong)}." if wrong else ""
        raise ConvertError(
            f"The names must match the optimizer's {count} parameters one to one, but "
            f"the list of {len(given)} names matches {len({*names} - {''})} different "
            f"tensors of the model.{what} {advise_names(len(given) > count)}"
        )
    return names


Places = Sequence[tuple[int, Shape | None]]


def _deal(shapes: Sequence[Shape], places: Places, is_ordered: bool) -> list[int]:
    """Return the position, among the shapes of the names, of each parameter.

    Names of equal shape keep their order, which is known only if they belong to one
    group whose other parameters are in the same order. Names of other shapes belong to
    parameters that the optimizer does not have.
    """
    found: dict[int, int] = {}
    unsure: set[int] = set()  # groups with several parameters of equal shape
    for shape in dict.fromkeys(shape for _, shape in places):
        owned = [at for at, (_, x) in enumerate(places) if x == shape]
        fits = [at for at, x in enumerate(shapes) if x == shape]
        groups = {places[at][0] for at in owned}
        is_one = len(fits) == 1 or (is_ordered and len(groups) == 1)
        if len(fits) != len(owned) or not is_one:
            what = "without state" if shape is None else f"of shape {shape}"
            why = f"are in {len(groups)} of its groups, and the model has {len(fits)}"
            if not is_ordered:
                why = "are in a safetensors file, which does not store their order"
            raise ConvertError(
                f"The order of the optimizer's parameters is unknown: {len(owned)} "
                f"{what} {why}. {advise_names(len(shapes) > len(places))} The flat "
                "states of DeepSpeed and fairseq cannot be converted. Leave them out "
                "with keys={'optimizer': ''} (--optimizer-key '')."
            )
        found |= zip(owned, fits, strict=True)
        unsure |= groups if len(fits) > 1 else set()
    for group in unsure:
        order = [found[at] for at, (place, _) in enumerate(places) if place == group]
        if order != sorted(order):
            raise ConvertError(
                "The parameters of the optimizer are in another order than the model's "
                f"tensors. {advise_names()}"
            )
    return [found[at] for at in range(len(places))]


def _describe_doubt(
    names: Sequence[str], tensors: Mapping[str, Any], places: Places
) -> list[str]:
    """Return a note if the optimizer may have another order of modules.

    Another order has the same shapes only if two modules start with the same shape.
    """
    starts: dict[str, tuple[int, Shape]] = {}
    for (place, _), name in zip(places, names, strict=True):
        # PyTorch's layers always have the weight before the bias.
        module = re.sub(r"\.(weight|bias)$", "", name)
        starts.setdefault(module, (place, tuple(tensors[name].shape)))
    count = Counter(starts.values())
    alike = [module for module, start in starts.items() if count[start] > 1]
    return [doubt_order(alike)] if alike else []
