"""Read the parameter groups of optimizers, and find the names of their parameters.

A state dict identifies parameters by number or by name. torch.distributed may flatten
the state dict (``state.<name>.<slot>``) or write the numbers as strings.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..files.text import list_some
from .files import TENSORS, ConvertError
from .hints import advise_names
from .layouts import Row, Shape
from .optimizer_table import OPTIMIZERS, OptimizerSpec, plain_setting, recognize
from .rows import Options, bare_name, from_peft
from .sections import is_flat

Index = int | str

# What reading a value of the wrong type raises.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Group:
    """A parameter group of a PyTorch optimizer, and its place in the MLX state."""

    held: dict[Any, Any]  # the optimizer's state dict in the checkpoint
    settings: dict[str, Any]  # of the group, with its params
    states: Mapping[str, dict[str, Any]]  # str(index) -> slots, for all groups
    kind: str  # a key of OPTIMIZERS
    rows: dict[Index, Row] = field(default_factory=dict)  # parameters that MLX has
    step: int = 0  # in the PyTorch checkpoint
    # The prefix of the group's MLX state: "states.<i>." in a MultiOptimizer, and empty
    # if one MLX optimizer covers all groups.
    prefix: str = ""

    @property
    def spec(self) -> OptimizerSpec:
        """The ``OPTIMIZERS`` entry for ``kind``."""
        return OPTIMIZERS[self.kind]

    def slots(self, index: Index) -> dict[str, Any]:
        """Return a parameter's state, or an empty dict if it has none yet."""
        return self.states.get(str(index)) or {}

    def lacks_state(self, index: Index) -> bool:
        """Return whether the checkpoint lacks any of a parameter's slots."""
        slots = self.slots(index)
        return any(slots.get(slot) is None for slot in self.spec.slots)

    def shape(self, index: Index) -> Shape | None:
        """Return the shape of a parameter's moments, or None if there are none."""
        for slot, value in self.slots(index).items():
            if slot != "step" and isinstance(value, TENSORS):
                return tuple(value.shape)
        return None

    def set_slot(self, index: Index, slot: str, value: Any) -> None:
        """Write a value of a parameter's state into the state dict."""
        if is_flat(self.held):
            self.held[f"state.{index}.{slot}"] = value
        else:
            states = self.held.setdefault("state", {})
            key = type(next(iter(states), index))(index)  # a number or a string
            states.setdefault(key, {})[slot] = value

    def set(self, key: str, value: Any) -> None:
        """Write a setting of the group into the state dict."""
        if is_flat(self.held):
            for name in self.settings["params"]:
                self.held[f"param_groups.{name}.{key}"] = value
        else:
            self.settings[key] = value


@contextmanager
def damage_is_an_error(section: str) -> Iterator[None]:
    """Raise a ``ConvertError`` for what only a damaged section raises."""
    try:
        yield
    except ConvertError:
        raise
    except _DAMAGE as error:
        raise ConvertError(
            f"The {section} state is damaged: {type(error).__name__}: {error}. Save it "
            f"again in PyTorch, or leave it out with keys={{'{section}': ''}} "
            f"(--{section}-key '')."
        ) from error


def read_groups(held: dict[Any, Any]) -> list[Group]:
    """Return the groups of a nested or flat state dict."""
    if is_flat(held):
        groups, states = _nest(held)
    else:
        groups, states = held["param_groups"], held.get("state", {})
    # torch.distributed.checkpoint writes numbers as strings.
    by_text = {str(index): slots for index, slots in states.items()}
    kind = recognize(groups, {slot for slots in states.values() for slot in slots})
    return [Group(held, group, by_text, kind) for group in groups]


def _nest(held: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the groups and states of a flat state dict.

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
    return [*groups.values()], parts["state"]


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
    indices = [index for group in groups for index in group.settings["params"]]
    places = [i for i, group in enumerate(groups) for _ in group.settings["params"]]
    shapes = [group.shape(x) for group in groups for x in group.settings["params"]]
    saved = [x for group in groups for x in group.settings.get("param_names", ())]
    given: Collection[str] | None = options.names
    if given is None and indices and all(isinstance(x, str) for x in indices):
        # FullyShardedDataParallel and torch.distributed use names as indices.
        given = [str(index) for index in indices]
    elif given is None and len(saved) == len(indices):
        given = saved
    if given is not None:
        names = _match(given, tensors, rows, options, len(indices))
        # Transformers' Trainer splits the parameters into groups by weight decay.
        if not _fits(names, tensors, shapes):
            return _deal(names, tensors, places, shapes), []
        owners = {(shape, place) for shape, place in zip(shapes, places, strict=True)}
        is_sure = options.names is None or len(owners) == len({*shapes})
        note = "The given names were assigned to the optimizer's groups in order. If "
        note += "they are in the order of model.named_parameters(), list them group by "
        return names, [] if is_sure else [f"{note}group instead."]
    # Each tied tensor counts once. Integers are buffers.
    unique: dict[Any, str] = {}
    for name, x in tensors.items():
        is_float = x.dtype is None or "float" in str(x.dtype)
        if name.rpartition(".")[2] not in _BUFFERS and is_float:
            unique.setdefault(id(x), rows[name].torch if name in rows else name)
    names = [*unique.values()]
    if len(groups) > 1 or not is_ordered or not _fits(names, tensors, shapes):
        names = _deal(names, tensors, places, shapes, is_ordered)
    return names, _describe_doubt(names, tensors, places) if any(shapes) else []


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

    spelled: dict[str, list[str]] = {}
    for name in tensors:
        spelled.setdefault(plain(name), []).append(name)
    fits = [[n] if n in tensors else spelled.get(plain(n), []) for n in given]
    wrong = [name for name, fit in zip(given, fits, strict=True) if len(fit) != 1]
    names = [rows[n].torch if n in rows else n for fit in fits for n in fit[:1]]
    if wrong or not len(given) == len({*names}) == count:
        what = f" No match or no unique match: {list_some(wrong)}." if wrong else ""
        raise ConvertError(
            f"The names must match the optimizer's {count} parameters one to one, but "
            f"the list of {len(given)} names matches {len({*names})} different tensors "
            f"of the model.{what} {advise_names(len(given) > count)}"
        )
    return names


def _fits(
    names: Sequence[str], tensors: Mapping[str, Any], shapes: Sequence[Shape | None]
) -> bool:
    return len(names) == len(shapes) and all(
        shape in (None, tuple(tensors[name].shape))
        for name, shape in zip(names, shapes, strict=True)
    )


def _deal(
    names: Sequence[str],
    tensors: Mapping[str, Any],
    places: Sequence[int],
    shapes: Sequence[Shape | None],
    is_ordered: bool = True,
) -> list[str]:
    """Assign names to parameters by shape; ``places`` are the parameters' groups.

    Names of equal shape keep their order, which is known only if they belong to one
    group whose other parameters are in the same order. Names of other shapes belong to
    parameters that the optimizer does not have.
    """
    found: dict[int, int] = {}  # parameter -> position in names
    unsure: set[int] = set()  # groups with several parameters of equal shape
    for shape in dict.fromkeys(shapes):
        owned = [at for at, x in enumerate(shapes) if x == shape]
        fits = [at for at, n in enumerate(names) if tuple(tensors[n].shape) == shape]
        groups = {places[at] for at in owned}
        is_one = len(fits) == 1 or (is_ordered and len(groups) == 1)
        if len(fits) != len(owned) or not is_one:
            what = "without state" if shape is None else f"of shape {shape}"
            why = f"are in {len(groups)} of its groups, and the model has {len(fits)}"
            if not is_ordered:
                why = "are in a safetensors file, which does not store their order"
            raise ConvertError(
                f"The order of the optimizer's parameters is unknown: {len(owned)} "
                f"{what} {why}. {advise_names(len(names) > len(shapes))} The flat "
                "states of DeepSpeed and fairseq cannot be converted. Leave them out "
                "with keys={'optimizer': ''} (--optimizer-key '')."
            )
        found |= zip(owned, fits, strict=True)
        unsure |= groups if len(fits) > 1 else set()
    for group in unsure:
        order = [found[at] for at, place in enumerate(places) if place == group]
        if order != sorted(order):
            raise ConvertError(
                "The parameters of the optimizer are in another order than the model's "
                f"tensors. {advise_names()}"
            )
    return [names[found[at]] for at in range(len(shapes))]


def _describe_doubt(
    names: Sequence[str], tensors: Mapping[str, Any], places: Sequence[int]
) -> list[str]:
    """Return a note if the optimizer may have another order of modules.

    Another order has the same shapes only if two modules start with the same shape.
    """
    starts: dict[str, tuple[int, Shape]] = {}
    for place, name in zip(places, names, strict=True):
        module, _, leaf = name.rpartition(".")
        # PyTorch's layers always have the weight before the bias.
        key = module if module and leaf in ("weight", "bias") else name
        starts.setdefault(key, (place, tuple(tensors[name].shape)))
    every = [*starts.values()]
    alike = [module for module, start in starts.items() if every.count(start) > 1]
    if not alike:
        return []
    return [
        "The optimizer does not store the names of its parameters, so the order of the "
        "model's state dict was used. Shapes alone cannot confirm it, because "
        f"{list_some(alike, 3)} have equal shapes. If the optimizer was created with "
        f"another order, their moments are swapped. {advise_names()}"
    ]
