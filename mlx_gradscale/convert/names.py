"""Find the names of an optimizer's parameters, which state dicts rarely store."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..files.text import list_some
from .files import ConvertError
from .layouts import Row, Shape
from .optimizers import Group
from .rows import Options, bare_name, from_peft

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# The group and the shape of each parameter; None if it has no state.
Places = Sequence[tuple[int, Shape | None]]


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
        return names, [
            "The given names were assigned to the optimizer's groups in order. If they "
            "are in the order of model.named_parameters(), list them group by group "
            "instead."
        ]
    shaped = [place for place in places if place[1] is not None]
    if given is not None or len({*shaped}) == len(shaped):
        return names, []
    return names, [
        "The optimizer does not store the names of its parameters, so the order of the "
        "model's state dict was used. Shapes alone cannot confirm it, because some are "
        "equal. If the optimizer was created with another order, their moments are "
        f"swapped. {_advise()}"
    ]


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
            f"tensors of the model.{what} {_advise(len(given) > count)}"
        )
    return names


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
                f"{what} {why}. {_advise(len(shapes) > len(places))} The flat "
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
                f"tensors. {_advise()}"
            )
    return [found[at] for at in range(len(places))]


def _advise(some_are_left: bool = False) -> str:
    """Return advice on the names of the optimizer's parameters."""
    which = " if p.requires_grad" if some_are_left else ""
    return (
        "Create the PyTorch optimizer with model.named_parameters() before saving, or "
        "pass the names of its parameters with names=... (--names FILE). For an "
        "optimizer of model.parameters(), even if it splits them by weight decay, they "
        f"are [name for name, p in model.named_parameters(){which}]. Otherwise, list "
        "them in the optimizer's order, group by group."
    )
