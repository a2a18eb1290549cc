"""Where each tensor of a PyTorch model is in the MLX model, and in which layout.

A :class:`Plan` is made once per checkpoint, from the MLX model's own layers or
from patterns, and then applied to the weights and to each of the optimizer's
moments alike, in both directions.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn

from .layout_hints import listed, mismatch
from .layout_names import DROPPED, names_and_layouts
from .layout_targets import Target, known_names

Rename = Mapping[str, str] | Callable[[str], str] | Iterable[tuple[str, str]] | None


@dataclass(frozen=True)
class Layout:
    """How one PyTorch tensor becomes ``parts`` MLX arrays, and back."""

    to_mlx: Callable[[mx.array], list[mx.array]]
    to_torch: Callable[[list[mx.array]], mx.array]
    parts: int = 1


LAYOUTS: dict[str, Layout] = {
    "same": Layout(lambda x: [x], lambda xs: xs[0]),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": Layout(
        lambda x: [mx.swapaxes(x, 0, 1)], lambda xs: mx.swapaxes(xs[0], 0, 1)
    ),
    # (out, in, *kernel) <-> (out, *kernel, in)
    "conv": Layout(
        lambda x: [mx.moveaxis(x, 1, -1)], lambda xs: mx.moveaxis(xs[0], -1, 1)
    ),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": Layout(
        lambda x: [mx.moveaxis(x, 0, -1)], lambda xs: mx.moveaxis(xs[0], -1, 0)
    ),
    # nn.Bilinear: (out, in1, in2) <-> (out, in2, in1)
    "bilinear": Layout(
        lambda x: [mx.swapaxes(x, 1, 2)], lambda xs: mx.swapaxes(xs[0], 1, 2)
    ),
    # nn.MultiheadAttention's in_proj: query, key and value in one tensor
    "split_qkv": Layout(lambda x: mx.split(x, 3), mx.concatenate, parts=3),
}
_COUNTER = "num_batches_tracked"  # BatchNorm's step count; MLX keeps none
_EXTRA = "_extra_state"  # what torch.nn.Module.get_extra_state gave, of any type


class LayoutError(ValueError):
    """A tensor whose name or layout on the other side is not known."""


@dataclass(frozen=True)
class Choices:
    """What the user says about names and layouts.

    The patterns are shell patterns (``features.*.weight``, ``*``) on PyTorch
    names.

    Attributes:
        rename: PyTorch name -> MLX name, as a mapping, a function, or (regular
            expression, replacement) pairs tried in turn.
        conv: convolution weights.
        conv_transpose: weights of transposed convolutions.
        split_qkv: fused attention weights to split in query, key and value.
        transpose: weights of two dimensions, (in, out) in PyTorch.
        keep: tensors of 3 and more dimensions whose layout stays.
        drop: tensors the MLX model does not have; kept for the way back.
    """

    rename: Rename = None
    conv: tuple[str, ...] = ()
    conv_transpose: tuple[str, ...] = ()
    split_qkv: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def named(self, name: str) -> str:
        """The MLX name the user gives a PyTorch name."""
        if self.rename is None:
            return name
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        if callable(self.rename):
            return self.rename(name)
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name

    def layout(self, name: str, ndim: int) -> str | None:
        """The layout the user's patterns give a tensor; None where they say nothing."""
        fits = [
            layout
            for layout, patterns, least in (
                ("conv", self.conv, 3),
                ("conv_transpose", self.conv_transpose, 3),
                ("split_qkv", self.split_qkv, 1),
                ("transpose", self.transpose, 2),
                ("same", self.keep, 0),
            )
            if ndim >= least and _matches(name, patterns)
        ]
        if len(fits) > 1:
            raise LayoutError(
                f"{name} is matched by the patterns for {' and '.join(fits)}: make "
                "one of them narrower."
            )
        return fits[0] if fits else None


@dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: its MLX names and layout.

    A fused tensor has several names. So has a tied one whose names are parameters
    of their own in MLX: all get its values, and the first gives them back.
    """

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    @property
    def places(self) -> list[tuple[str, ...]]:
        """The MLX names of each copy; more than one where a tie is undone."""
        parts = LAYOUTS[self.layout].parts
        return [self.mlx[i : i + parts] for i in range(0, len(self.mlx), parts)]

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """The MLX arrays of a PyTorch tensor, weight or moment."""
        arrays = LAYOUTS[self.layout].to_mlx(tensor)
        return dict(zip(self.mlx, arrays * len(self.places), strict=True))

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """The PyTorch tensor of the MLX arrays, weight or moment."""
        parts = [arrays[name] for name in self.places[0]]
        try:
            return LAYOUTS[self.layout].to_torch(parts)
        except (IndexError, ValueError) as error:
            raise LayoutError(
                f"{self.mlx[0]} has shape {parts[0].shape}, which has no layout "
                f"{self.layout!r} to undo: {error}"
            ) from error


@dataclass(frozen=True)
class Plan:
    """All tensors of a PyTorch state dict.

    Attributes:
        entries: by PyTorch name, in the state dict's order.
        tied: alias -> the name it shares its tensor with, whose entry it is in.
        aside: what MLX has no place for (BatchNorm's counters, dropped tensors, extra
            states of modules and other values that are no tensors).
    """

    entries: dict[str, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()

    def to_mlx(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The MLX weights of a PyTorch state dict."""
        out: dict[str, mx.array] = {}
        for name, entry in self.entries.items():
            out |= entry.to_mlx(tensors[name])
        return out

    def to_torch(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The PyTorch tensors of MLX weights; aliases are the same object."""
        missing = [n for e in self.entries.values() for n in e.mlx if n not in weights]
        if missing:
            raise LayoutError(f"The MLX weights lack {listed(missing)}.")
        for entry in self.entries.values():
            _check_equal(entry, weights)
        out = {name: entry.to_torch(weights) for name, entry in self.entries.items()}
        return out | {alias: out[name] for alias, name in self.tied.items()}


def make_plan(
    tensors: Mapping[str, mx.array],
    model: nn.Module | None = None,
    choices: Choices | None = None,
    prefix: str = "",
) -> Plan:
    """Plans the conversion of a PyTorch state dict.

    With an MLX model, names and layouts come from its layers (``layers`` of an
    ``nn.Sequential`` is added, convolutions are transposed, a fused attention
    weight is split) and every shape is checked. Without one, names change only by
    ``choices.rename`` and every tensor of 3 and more dimensions needs a pattern.
    Words that wrappers (DistributedDataParallel, torch.compile, Lightning) put into
    the names are left out.

    Args:
        tensors: the state dict.
        model: the MLX model.
        choices: what the user says; it wins over the model's layers.
        prefix: a further beginning of names that is a wrapper's.

    Returns:
        Plan: for the weights and the moments.

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
    aside = [n for n, x in tensors.items() if _has_no_place(n, x, choices)]
    placed = [name for name in tensors if name not in set(aside)]
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
    aside += [n for n in lost if learned[n][1] == DROPPED]
    lost = [n for n in lost if learned[n][1] != DROPPED]
    # A dropped name of a tensor that is kept under another one must follow it.
    tied |= {n: owners[id(tensors[n])] for n in aside if id(tensors[n]) in owners}
    for alias in [name for name in lost if id(tensors[name]) in owners]:
        tied[alias] = owners[id(tensors[alias])]
        lost.remove(alias)
    _check_names(entries, lost, known)
    return Plan(entries, tied, tuple(name for name in aside if name not in tied))


def _has_no_place(name: str, value: object, choices: Choices) -> bool:
    is_tensor = isinstance(value, mx.array)
    own = name.rsplit(".", 1)[-1] in (_COUNTER, _EXTRA)
    return own or not is_tensor or _matches(name, choices.drop)


def _with_copy(entry: Entry, alias: Entry) -> Entry:
    """The entry of a tied tensor that is a parameter of its own in MLX as well."""
    if alias.mlx in entry.places:
        return entry
    if alias.layout != entry.layout:
        raise LayoutError(
            f"{alias.torch} and {entry.torch} are one tensor in PyTorch, but have "
            f"different layouts in MLX ({alias.layout}, {entry.layout}): untie them "
            "in PyTorch before saving."
        )
    return Entry(entry.torch, entry.mlx + alias.mlx, entry.layout)


def _check_equal(entry: Entry, weights: Mapping[str, mx.array]) -> None:
    first, *others = entry.places
    for other in others:
        for a, b in zip(first, other, strict=True):
            if not mx.array_equal(weights[a], weights[b], equal_nan=True).item():
                raise LayoutError(
                    f"{a} and {b} are one tensor in PyTorch ({entry.torch}) and have "
                    "different values in MLX, so there is no way back: tie them in "
                    "the MLX model (embedding.as_linear, say) before training on, or "
                    "give both the same values."
                )


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
    if LAYOUTS[layout].parts != len(target.mlx):
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
    """A layer of the user's own keeps its layout, unless another one fits as well."""
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


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
