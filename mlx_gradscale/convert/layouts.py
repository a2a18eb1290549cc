"""Map each tensor of a PyTorch model to its MLX name and layout.

A plan is made once per checkpoint and applies to both weights and moments, in both
directions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .names import (
    AXES,
    CONVOLUTIONS,
    TRANSPOSED,
    Names,
    Shape,
    Target,
    find_names,
    is_adapter,
)
from .options import Options
from .tree import ConvertError, list_some

# nn.MultiheadAttention's in_proj: query, key and value fused in one tensor.
_FUSED = "split_qkv"
LAYOUTS = (*AXES, _FUSED)


@dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: its MLX names (several if it is fused) and layout."""

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """Convert a PyTorch tensor, weight or moment, to MLX arrays."""
        if self.layout == _FUSED:
            return dict(zip(self.mlx, mx.split(tensor, 3), strict=True))
        return {self.mlx[0]: mx.transpose(tensor, AXES[self.layout](tensor.ndim))}

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Convert MLX arrays, weights or moments, to the PyTorch tensor."""
        held = [arrays[name] for name in self.mlx]
        try:
            if self.layout == _FUSED:
                return mx.concatenate(held)
            axes = AXES[self.layout](held[0].ndim)
            return mx.transpose(held[0], np.argsort(axes).tolist())
        except ValueError as error:
            raise ConvertError(
                f"{self.mlx[0]} has shape {held[0].shape}, which does not match the "
                f"layout {self.layout!r}: {error}"
            ) from error


@dataclass
class Plan:
    """All tensors of a PyTorch state dict, by their PyTorch names.

    Attributes:
        entries (dict): The tensors that MLX has.
        tied (dict): Alias -> the name whose tensor it shares.
        torch_only (tuple): Names without an MLX counterpart.
        change_model (Callable): See :class:`~mlx_gradscale.convert.names.Names`.
    """

    entries: dict[str, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    torch_only: tuple[str, ...] = ()
    change_model: Callable[[], None] = lambda: None

    def to_mlx(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Convert a PyTorch state dict to MLX weights."""
        out: dict[str, mx.array] = {}
        for name, entry in self.entries.items():
            out |= entry.to_mlx(tensors[name])
        return out

    def notes(self) -> list[str]:
        """Return notes for the user on names and tensors."""
        notes = []
        if any(n.endswith(".lora_a") for e in self.entries.values() for n in e.mlx):
            notes.append(
                "The checkpoint contains LoRA adapters from PEFT. Set the scale in "
                "mlx-lm's adapter_config.json to PEFT's lora_alpha / r, or to "
                "lora_alpha / sqrt(r) if use_rslora was set."
            )
        counters = "num_batches_tracked"  # BatchNorm's, which MLX does not count
        dropped = [n for n in self.torch_only if not n.endswith(counters)]
        if dropped:
            notes.append(f"The MLX model does not have {list_some(dropped)}.")
        return notes


def make_plan(
    tensors: Mapping[str, mx.array], model: nn.Module, options: Options | None = None
) -> Plan:
    """Plan the conversion of a PyTorch state dict.

    Names and layouts come from the model's layers (``layers`` of an ``nn.Sequential``
    is added, convolutions are transposed, a fused attention weight is split), and
    every shape is checked.

    Example:
        >>> tensors = {"0.weight": mx.zeros((8, 3, 5, 5)), "0.bias": mx.zeros(8)}
        >>> plan = make_plan(tensors, nn.Sequential(nn.Conv2d(3, 8, 5)))
        >>> plan.to_mlx(tensors)["layers.0.weight"].shape
        (8, 5, 5, 3)
    """
    options = options or Options()
    options.check_patterns(tensors)
    # BatchNorm's step count, and results of torch.nn.Module.get_extra_state.
    without_place = ("num_batches_tracked", "_extra_state")
    torch_only = [
        name
        for name in tensors
        if name.endswith(without_place) or options.is_dropped(name)
    ]
    excluded = set(torch_only)
    shapes = {n: tuple(x.shape) for n, x in tensors.items() if n not in excluded}
    names = find_names(shapes, options.renamed, model)
    plan = Plan({}, change_model=names.change_model)
    owners: dict[int, str] = {}
    lost: list[str] = []
    for name in shapes:
        owner = owners.get(id(tensors[name]))
        entry = _entry(name, shapes[name], names, options)
        if owner is not None:
            plan.tied[name] = owner
            if entry and entry.mlx != plan.entries[owner].mlx:
                raise ConvertError(
                    f"{owner} and {name} share one tensor in PyTorch, but are separate "
                    "parameters in the MLX model and would diverge in training. Tie "
                    "them in MLX (embedding.as_linear), or untie them in PyTorch "
                    "before saving."
                )
        elif entry is not None:
            owners[id(tensors[name])] = name
            plan.entries[name] = entry
        else:
            (torch_only if names.new[name] is None else lost).append(name)
    # An unmatched name of a tensor that matches by another name becomes its alias.
    for name in [*torch_only, *lost]:
        if id(tensors[name]) in owners:
            plan.tied[name] = owners[id(tensors[name])]
    plan.torch_only = tuple(n for n in torch_only if n not in plan.tied)
    lost = [n for n in lost if n not in plan.tied]
    _check_names(plan, lost, names.known, is_partial=is_adapter(shapes))
    return plan


def _entry(name: str, shape: Shape, names: Names, options: Options) -> Entry | None:
    found = names.new[name]
    if found is None:
        return None
    new, learned = found
    chosen = options.layout(name, len(shape)) or learned
    target = names.known.get(new)
    if target is None:
        return None
    layout = chosen or target.layout or _layout_of_unknown(name, shape, target)
    made = _mlx_shapes(shape, layout)
    if made != target.shapes:
        hint = ""
        if shape[::-1] == target.shapes[0]:
            hint = f" If PyTorch stores it as (in, out), use --layout {name}=transpose."
        raise ConvertError(
            f"{name} has shape {shape}, or {made[0]} in MLX's layout ({layout}), but "
            f"{' and '.join(target.mlx)} in the MLX model has shape "
            f"{target.shapes[0]}.{hint}"
        )
    return Entry(name, target.mlx, layout)


def _mlx_shapes(shape: Shape, layout: str) -> tuple[Shape, ...]:
    """Return the shapes in MLX, or the shape itself if the layout does not match."""
    if layout == _FUSED:
        is_fused = shape and shape[0] % 3 == 0
        return ((shape[0] // 3, *shape[1:]),) * 3 if is_fused else (shape,)
    axes = AXES[layout](len(shape))
    if len(axes) != len(shape):
        return (shape,)
    return (tuple(shape[axis] for axis in axes),)


def _layout_of_unknown(name: str, shape: Shape, target: Target) -> str:
    """Keep the layout of a custom layer, unless another layout matches as well."""
    others = [_mlx_shapes(shape, layout) for layout in ("conv", "conv_transpose")]
    if target.shapes in others:
        raise ConvertError(
            f"{name} has shape {shape} and belongs to a custom layer, where several "
            f"layouts match the MLX shape {target.shapes[0]}. Choose one with --layout "
            f"{name}=conv, {name}=conv_transpose or {name}=same."
        )
    return "same"


def _check_names(
    plan: Plan, lost: list[str], known: dict[str, Target], is_partial: bool
) -> None:
    taken: dict[str, str] = {}
    for entry in plan.entries.values():
        for name in entry.mlx:
            if name in taken:
                raise ConvertError(
                    f"{taken[name]} and {entry.torch} would both become {name}. Change "
                    "the renames so that the names stay distinct."
                )
            taken[name] = entry.torch
    wanted = {n for target in known.values() for n in target.mlx}
    if is_partial:  # the base model is elsewhere
        wanted = {n for n in wanted if n.endswith((".lora_a", ".lora_b"))}
        if lost and not wanted:
            raise ConvertError(
                "The checkpoint contains LoRA adapters, but the MLX model has no LoRA "
                "layers. Add them with mlx_lm.tuner.utils.linear_to_lora_layers; for "
                "the command, in a function passed as --model MODULE:NAME."
            )
    missing = [name for name in sorted(wanted) if name not in taken]
    said = []
    if lost:
        said.append(f"The MLX model has no parameter for {list_some(lost)}.")
    if missing:
        said.append(f"The checkpoint has no tensor for {list_some(missing)}.")
    if said:
        hint = next((h for p, h in _REWRITTEN.items() if any(map(p.search, lost))), "")
        hint = hint or (
            "Rename tensors with rename=... (--rename; '^net[.]=' removes a prefix), "
            "or ignore them with drop=... (--drop)."
        )
        raise ConvertError(" ".join([*said, hint]))


# Names that PyTorch stores in place of a plain weight, and what to do about them.
_REWRITTEN = {
    re.compile(
        r"(^|\.)parametrizations\.|\w_orig$|\bweight_g$"
    ): "Parametrized, pruned and normalised weights cannot be converted. Before "
    "saving, call remove_parametrizations, prune.remove, remove_weight_norm or "
    "remove_spectral_norm from torch.nn.utils, and leave the optimizer out "
    "(--optimizer-key '').",
    re.compile(r"(weight|bias)_[ih]h_l\d"): "Recurrent layers (RNN, LSTM, GRU) cannot "
    "be converted, because PyTorch's have two biases and MLX's have one. Use --drop "
    "and an MLX model without these layers to convert the rest.",
}


def model_notes(model: nn.Module) -> list[str]:
    """Return notes on layers whose weights match but whose results may differ."""
    notes, channels = [], 0
    for name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        # With one group, or one channel per group, both sides group the same way.
        if (
            isinstance(module, nn.GroupNorm)
            and not module.pytorch_compatible
            and 1 < module.num_groups < module.dims
        ):
            notes.append(
                f"{name} is a GroupNorm without pytorch_compatible=True, which groups "
                "channels differently from PyTorch. Create it with "
                "pytorch_compatible=True."
            )
        elif isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
            channels = module.weight.shape[0]
        elif isinstance(module, nn.Linear):
            inputs = module.weight.shape[1]
            if channels and inputs > channels and inputs % channels == 0:
                notes.append(
                    f"{name} has {inputs} inputs, and the convolution before it has "
                    f"{channels} channels. PyTorch flattens with the channels first. "
                    "If the MLX model flattens here, use "
                    "mx.moveaxis(x, -1, 1).flatten(1)."
                )
            channels = 0
    return notes
