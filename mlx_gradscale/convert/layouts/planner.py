"""Make the plan of a checkpoint, from the MLX model's own layers or from patterns."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn

from .choices import Choices, matches
from .hints import listed, mismatch
from .kinds import LAYOUTS, LayoutError
from .names import DROPPED, names_and_layouts
from .plan import Entry, Plan
from .targets import Target, known_names

_COUNTER = "num_batches_tracked"  # BatchNorm's step count; MLX keeps none
_EXTRA = "_extra_state"  # what torch.nn.Module.get_extra_state gave, of any type


def make_plan(
    tensors: Mapping[str, mx.array],
    model: nn.Module | None = None,
    choices: Choices | None = None,
    prefix: str = "",
) -> Plan:
    """Plan the conversion of a PyTorch state dict.

    With an MLX model, names and layouts come from its layers (``layers`` of an
    ``nn.Sequential`` is added, convolutions are transposed, a fused attention
    weight is split) and every shape is checked. Without one, names change only by
    ``choices.rename`` and every tensor of 3 and more dimensions needs a pattern.
    Words that wrappers (DistributedDataParallel, torch.compile, Lightning) put into
    the names are left out.

    Args:
        tensors (dict): The state dict.
        model (nn.Module, optional): The MLX model.
        choices (Choices, optional): What the user says; it wins over the model's
            layers.
        prefix (str): A further beginning of names that is a wrapper's.

    Returns:
        Plan: For the weights and the moments.

    Example:
        >>> tensors = {"0.weight": mx.zeros((8, 3, 5, 5)), "0.bias": mx.zeros(8)}
        >>> plan = make_plan(tensors, nn.Sequential(nn.Conv2d(3, 8, 5)))
        >>> plan.to_mlx(tensors)["layers.0.weight"].shape
        (8, 5, 5, 3)
    """
    choices = choices or Choices()
    _check_patterns(choices, tensors)
    known = known_names(model) if model is not None else None
    entries: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    lost: list[str] = []
    owners: dict[int, str] = {}
    unplaced = [n for n, x in tensors.items() if _has_no_place(n, x, choices)]
    placed = [name for name in tensors if name not in set(unplaced)]
    shapes = {name: tensors[name].shape for name in placed}
    learned = names_and_layouts(shapes, choices.named, model, known, prefix)
    for name in placed:
        tensor = tensors[name]
        owner = owners.get(id(tensor))
        new, layout = learned[name]
        entry = _entry(name, new, layout, tensor, known, choices)
        if owner is not None:
            tied[name] = owner
            if entry is not None and known is not None:
                entries[owner] = _with_copy(entries[owner], entry)
        elif entry is None:
            lost.append(name)
        else:
            owners[id(tensor)] = name
            entries[name] = entry
    # What the model's own sanitize drops has no place either.
    unplaced += [n for n in lost if learned[n][1] == DROPPED]
    lost = [n for n in lost if learned[n][1] != DROPPED]
    # A dropped name of a tensor that is kept under another one must follow it.
    tied |= {n: owners[id(tensors[n])] for n in unplaced if id(tensors[n]) in owners}
    for alias in [name for name in lost if id(tensors[name]) in owners]:
        tied[alias] = owners[id(tensors[alias])]
        lost.remove(alias)
    _check_names(entries, lost, known)
    return Plan(entries, tied, tuple(name for name in unplaced if name not in tied))


def _has_no_place(name: str, value: object, choices: Choices) -> bool:
    is_tensor = isinstance(value, mx.array)
    own = name.rsplit(".", 1)[-1] in (_COUNTER, _EXTRA)
    return own or not is_tensor or matches(name, choices.drop)


def _with_copy(entry: Entry, alias: Entry) -> Entry:
    """Return the entry of a tied tensor that is a parameter of its own in MLX."""
    if alias.mlx in entry.places:
        return entry
    if alias.layout != entry.layout:
        raise LayoutError(
            f"{alias.torch} and {entry.torch} are one tensor in PyTorch, but have "
            f"different layouts in MLX ({alias.layout}, {entry.layout}): untie them "
            "in PyTorch before saving."
        )
    return Entry(entry.torch, entry.mlx + alias.mlx, entry.layout)


def _entry(
    name: str,
    new: str,
    learned: str | None,
    tensor: mx.array,
    known: dict[str, Target] | None,
    choices: Choices,
) -> Entry | None:
    if learned == DROPPED:
        return None
    said = choices.layout(name, tensor.ndim) or learned
    if known is None:
        return _entry_by_patterns(name, new, said, tensor)
    target = known.get(new)
    if target is None:
        return None
    layout = said or target.layout or _unchanged(name, tensor, target)
    if LAYOUTS[layout].count != len(target.mlx):
        raise LayoutError(f"{name} cannot be {layout}: in MLX it is {target.mlx}.")
    if layout == "split_qkv" and tensor.shape[0] % 3:
        raise LayoutError(f"{name} has shape {tensor.shape}: not a fused attention.")
    shapes = tuple(x.shape for x in LAYOUTS[layout].to_mlx(tensor))
    if shapes != target.shapes:
        raise LayoutError(
            f"{name} has shape {tensor.shape}, which is {shapes[0]} in MLX's layout "
            f"({layout}); the model's {target.mlx[0]} has {target.shapes[0]}."
        )
    return Entry(name, target.mlx, layout)


def _entry_by_patterns(
    name: str, new: str, said: str | None, tensor: mx.array
) -> Entry:
    if new.split(".", 1)[0].isdigit():
        raise LayoutError(
            f"{name} starts with a number, which no MLX module's parameter does: give "
            r"the MLX model, or a rename such as '^(\d+)\.=layers.\1.'."
        )
    fused = name.rsplit(".", 1)[-1] in ("in_proj_weight", "in_proj_bias")
    if said is None and (fused or tensor.ndim > 2):
        raise LayoutError(
            f"{name} has shape {tensor.shape} and no layout: give the MLX model, or "
            "say what it is by a pattern, with --conv, --conv-transpose, --split-qkv "
            "or (to leave it as it is) --keep-layout."
        )
    if said != "split_qkv":
        return Entry(name, (new,), said or "same")
    if not fused or tensor.shape[0] % 3:
        raise LayoutError(
            f"{name} is not PyTorch's fused attention (in_proj_weight or in_proj_bias "
            "of three times the size): --split-qkv does not apply."
        )
    stem, leaf = new.rsplit("in_proj_", 1)
    return Entry(
        name, tuple(f"{stem}{p}_proj.{leaf}" for p in ("query", "key", "value")), said
    )


def _unchanged(name: str, tensor: mx.array, target: Target) -> str:
    """Keep the layout of a layer of the user's own, unless another one fits as well."""
    other = [mx.moveaxis(tensor, i, -1).shape for i in (0, 1)]
    if target.shapes[0] in other:
        fits = "more than one layout" if tensor.shape in other else "another layout"
        raise LayoutError(
            f"{name} has shape {tensor.shape} and belongs to a layer that is not "
            f"MLX's own; {fits} fits the model's {target.shapes[0]}: say which with "
            "--conv, --conv-transpose or --keep-layout."
        )
    return "same"


def _check_patterns(choices: Choices, tensors: Mapping[str, mx.array]) -> None:
    for kind in ("conv", "conv_transpose", "split_qkv", "transpose", "keep", "drop"):
        for pattern in getattr(choices, kind):
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise LayoutError(
                    f"The pattern {pattern!r} for {kind} matches no tensor; the names "
                    f"are {listed(tensors)}."
                )


def _check_names(
    entries: Mapping[str, Entry],
    lost: list[str],
    known: dict[str, Target] | None,
) -> None:
    taken: dict[str, str] = {}
    for entry in entries.values():
        for name in entry.mlx:
            if name in taken:
                raise LayoutError(
                    f"{taken[name]} and {entry.torch} would both become {name}: give "
                    "renames that keep them apart."
                )
            taken[name] = entry.torch
    wanted = {n for t in known.values() for n in t.mlx} if known is not None else set()
    missing = [name for name in sorted(wanted) if name not in taken]
    if lost or missing:
        raise LayoutError(mismatch(lost, missing))
