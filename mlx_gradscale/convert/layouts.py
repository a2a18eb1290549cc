"""Map each tensor of a PyTorch model to its MLX name and layout.

A plan is made once per checkpoint and applies to both weights and moments, in both
directions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .names import (
    DROPPED,
    Target,
    is_adapter,
    known_after_sanitize,
    known_names,
    new_names,
)
from .options import Options, matches
from .tree import ConvertError, list_some


@dataclass(frozen=True)
class Layout:
    """How one PyTorch tensor becomes ``count`` MLX arrays, and back."""

    to_mlx: Callable[[mx.array], list[mx.array]]
    to_torch: Callable[[list[mx.array]], mx.array]
    count: int = 1


LAYOUTS: dict[str, Layout] = {
    "same": Layout(lambda x: [x], lambda xs: xs[0]),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": Layout(
        lambda x: [mx.swapaxes(x, 0, 1)], lambda xs: mx.swapaxes(xs[0], 0, 1)
    ),
    # (out, in, *kernel) <-> (out, *kernel, in); nn.Bilinear: (out, in1, in2)
    "conv": Layout(
        lambda x: [mx.moveaxis(x, 1, -1)], lambda xs: mx.moveaxis(xs[0], -1, 1)
    ),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": Layout(
        lambda x: [mx.moveaxis(x, 0, -1)], lambda xs: mx.moveaxis(xs[0], -1, 0)
    ),
    # nn.MultiheadAttention's in_proj: query, key and value fused in one tensor
    "split_qkv": Layout(lambda x: list(mx.split(x, 3)), mx.concatenate, count=3),
}


@dataclass(frozen=True)
class Entry:
    """One PyTorch tensor: its MLX names and layout.

    A fused tensor has several names. So does a tied one whose names are separate
    parameters in MLX: all of them get its values, and the first is converted back.
    """

    torch: str
    mlx: tuple[str, ...]
    layout: str = "same"

    @property
    def copies(self) -> list[tuple[str, ...]]:
        """The MLX names of each copy; more than one if MLX unties a tied tensor."""
        count = LAYOUTS[self.layout].count
        return [self.mlx[i : i + count] for i in range(0, len(self.mlx), count)]

    def to_mlx(self, tensor: mx.array) -> dict[str, mx.array]:
        """Convert a PyTorch tensor, weight or moment, to MLX arrays."""
        arrays = LAYOUTS[self.layout].to_mlx(tensor)
        return dict(zip(self.mlx, arrays * len(self.copies), strict=True))

    def to_torch(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Convert MLX arrays, weights or moments, to the PyTorch tensor."""
        held = [arrays[name] for name in self.copies[0]]
        try:
            return LAYOUTS[self.layout].to_torch(held)
        except (IndexError, ValueError) as error:
            raise ConvertError(
                f"{self.mlx[0]} has shape {held[0].shape}, which the layout "
                f"{self.layout!r} does not fit: {error}"
            ) from error


@dataclass
class Plan:
    """All tensors of a PyTorch state dict, by their PyTorch names.

    ``tied`` maps aliases to the name whose tensor they share, ``torch_only`` lists
    names without an MLX counterpart, and ``sanitized`` holds the names and shapes to
    call the model's ``sanitize`` with.
    """

    entries: dict[str, Entry]
    tied: dict[str, str] = field(default_factory=dict)
    torch_only: tuple[str, ...] = ()
    sanitized: dict[str, tuple[int, ...]] | None = None

    def to_mlx(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the MLX weights of a PyTorch state dict."""
        out: dict[str, mx.array] = {}
        for name, entry in self.entries.items():
            out |= entry.to_mlx(tensors[name])
        return out

    def notes(self) -> list[str]:
        """Return notes for the user on names and tensors."""
        notes = []
        untied = {e.torch: e.copies for e in self.entries.values() if e.copies[1:]}
        tied = [f"{a} = {name}" for a, name in self.tied.items() if name not in untied]
        if tied:
            notes.append(
                f"Tied weights are kept once: {list_some(tied)}. For an MLX model with "
                "a parameter of its own there, give the model (--model)."
            )
        for name, copies in untied.items():
            said = " and ".join(", ".join(copy) for copy in copies)
            notes.append(
                f"{name} is one tensor in PyTorch under several names, and {said} are "
                "different parameters in the MLX model: all get its values and its "
                "optimizer state, but they will train apart, and then there is no way "
                "back. To keep them tied, use one array (embedding.as_linear)."
            )
        if any(n.endswith(".lora_a") for e in self.entries.values() for n in e.mlx):
            notes.append(
                "LoRA adapters of PEFT: mlx-lm multiplies them by the scale in its "
                "adapter_config.json, which must be PEFT's lora_alpha / r (with "
                "use_rslora, lora_alpha / sqrt(r))."
            )
        counters = "num_batches_tracked"  # BatchNorm's, which MLX does not count
        dropped = [n for n in self.torch_only if not n.endswith(counters)]
        if dropped:
            notes.append(f"Not in the MLX model: {list_some(dropped)}.")
        return notes


def make_plan(
    tensors: Mapping[str, mx.array],
    model: nn.Module | None = None,
    options: Options | None = None,
    is_lightning: bool = False,
) -> Plan:
    """Plan the conversion of a PyTorch state dict.

    With an MLX model, names and layouts come from its layers (``layers`` of an
    ``nn.Sequential`` is added, convolutions are transposed, a fused attention
    weight is split) and every shape is checked. Without one, only ``options.rename``
    changes names, and every tensor with 3 or more dimensions needs a pattern.

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
        if name.endswith(without_place) or matches(name, options.drop)
    ]
    excluded = set(torch_only)
    shapes = {n: tuple(x.shape) for n, x in tensors.items() if n not in excluded}
    known = known_names(model) if model is not None else None
    learned, sanitized = new_names(
        shapes, options.renamed, model, known or (), is_lightning
    )
    if model is not None and sanitized is not None:
        known = known_after_sanitize(model, sanitized)
    plan = Plan({}, sanitized=sanitized)
    owners: dict[int, str] = {}
    lost: list[str] = []
    for name in shapes:
        owner = owners.get(id(tensors[name]))
        entry = _entry(name, *learned[name], tensors[name], known, options)
        if owner is not None:
            plan.tied[name] = owner
            if entry is not None and known is not None:
                plan.entries[owner] = _with_copy(plan.entries[owner], entry)
        elif entry is not None:
            owners[id(tensors[name])] = name
            plan.entries[name] = entry
        elif learned[name][1] == DROPPED:
            torch_only.append(name)
        else:
            lost.append(name)
    # An unmatched name of a tensor that matches by another name becomes its alias.
    for name in [*torch_only, *lost]:
        if id(tensors[name]) in owners:
            plan.tied[name] = owners[id(tensors[name])]
    plan.torch_only = tuple(n for n in torch_only if n not in plan.tied)
    lost = [n for n in lost if n not in plan.tied]
    _check_names(plan, lost, known, is_partial=is_adapter(shapes))
    return plan


def _with_copy(entry: Entry, alias: Entry) -> Entry:
    """Return the entry of a tied tensor that is a separate parameter in MLX."""
    if alias.mlx in entry.copies:
        return entry
    if alias.layout != entry.layout:
        raise ConvertError(
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
    options: Options,
) -> Entry | None:
    if learned == DROPPED:
        return None
    chosen = options.layout(name, tensor.ndim) or learned
    if known is None:
        return _entry_by_patterns(name, new, chosen, tensor)
    target = known.get(new)
    if target is None:
        return None
    layout = chosen or target.layout or _layout_of_unknown(name, tensor, target)
    shapes = _mlx_shapes(name, tensor, layout)
    if shapes != target.shapes:
        hint = ""
        if tensor.ndim == 2 and tuple(tensor.shape[::-1]) == target.shapes[0]:
            hint = f" If it is (in, out) in PyTorch, give --transpose {name!r}."
        raise ConvertError(
            f"{name} has shape {tuple(tensor.shape)}, which is {shapes[0]} in MLX's "
            f"layout ({layout}); the model's {' and '.join(target.mlx)} has "
            f"{target.shapes[0]}.{hint}"
        )
    return Entry(name, target.mlx, layout)


def _mlx_shapes(
    name: str, tensor: mx.array, layout: str
) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(x.shape for x in LAYOUTS[layout].to_mlx(tensor))
    except (IndexError, ValueError) as error:
        raise ConvertError(
            f"{name} has shape {tuple(tensor.shape)}, which the layout {layout!r} does "
            f"not fit: {error}"
        ) from error


def _entry_by_patterns(
    name: str, new: str, chosen: str | None, tensor: mx.array
) -> Entry:
    if new.split(".", 1)[0].isdigit():
        raise ConvertError(
            f"{name} starts with a number, which no MLX module's parameter does: give "
            r"the MLX model, or a rename such as '^(\d+)\.=layers.\1.'."
        )
    is_fused = name.rpartition(".")[2] in ("in_proj_weight", "in_proj_bias")
    if chosen is None and (is_fused or tensor.ndim > 2):
        raise ConvertError(
            f"{name} has shape {tuple(tensor.shape)} and no layout: give the MLX "
            "model, or say what it is by a pattern, with --conv, --conv-transpose, "
            "--split-qkv or (to leave it as it is) --keep-layout."
        )
    if chosen != "split_qkv":
        return Entry(name, (new,), chosen or "same")
    _mlx_shapes(name, tensor, chosen)
    if not is_fused:
        raise ConvertError(
            f"{name} is not PyTorch's fused attention (in_proj_weight or "
            "in_proj_bias): --split-qkv does not apply."
        )
    stem, _, leaf = new.rpartition("in_proj_")
    parts = ("query", "key", "value")
    return Entry(name, tuple(f"{stem}{p}_proj.{leaf}" for p in parts), chosen)


def _layout_of_unknown(name: str, tensor: mx.array, target: Target) -> str:
    """Keep the layout of a custom layer, unless another layout matches as well."""
    others = [mx.moveaxis(tensor, i, -1).shape for i in (0, 1) if i < tensor.ndim]
    if tensor.ndim > 1 and target.shapes[0] in others:
        raise ConvertError(
            f"{name} has shape {tuple(tensor.shape)} and belongs to a layer that is "
            f"not MLX's own; more than its own layout fits the model's "
            f"{target.shapes[0]}: say which with --conv, --conv-transpose or "
            "--keep-layout."
        )
    return "same"


def _check_names(
    plan: Plan, lost: list[str], known: dict[str, Target] | None, is_partial: bool
) -> None:
    taken: dict[str, str] = {}
    for entry in plan.entries.values():
        for name in entry.mlx:
            if name in taken:
                raise ConvertError(
                    f"{taken[name]} and {entry.torch} would both become {name}: give "
                    "renames that keep them apart."
                )
            taken[name] = entry.torch
    wanted = {n for target in (known or {}).values() for n in target.mlx}
    if is_partial:  # the base model is elsewhere
        wanted = {n for n in wanted if n.endswith((".lora_a", ".lora_b"))}
        if lost and known is not None and not wanted:
            raise ConvertError(
                "The checkpoint holds LoRA adapters, and the MLX model has no LoRA "
                "layers: add them first (mlx_lm.tuner.utils.linear_to_lora_layers), or "
                "leave --model out of the command."
            )
    missing = [name for name in sorted(wanted) if name not in taken]
    if lost or missing:
        raise ConvertError(_mismatch(lost, missing))


_BEFORE_SAVING = (
    "are not converted: in PyTorch call {} before saving. The optimizer's state is "
    "then of the old parameters: leave it out (--optimizer-key '')."
)
# Keys that PyTorch stores in place of a plain weight, and what to do about them.
_REWRITTEN = {
    r"(^|\.)parametrizations\.": "Parametrized weights "
    + _BEFORE_SAVING.format(
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    ),
    r"\w_orig$": "Weights that are pruned or have a spectral norm "
    + _BEFORE_SAVING.format(
        "torch.nn.utils.prune.remove(module, 'weight') or "
        "torch.nn.utils.remove_spectral_norm(module)"
    ),
    r"\bweight_g$": "Weights with a weight norm "
    + _BEFORE_SAVING.format("torch.nn.utils.remove_weight_norm(module)"),
    r"(weight|bias)_[ih]h_l\d": "PyTorch's recurrent layers (RNN, LSTM, GRU) have two "
    "biases where MLX's have one, and are not converted: set their weights in MLX by "
    "hand, and convert the rest with --drop and an MLX model without them.",
}


def _mismatch(lost: list[str], missing: list[str]) -> str:
    """Return the error for names that exist on one side only."""
    parts = []
    if lost:
        parts.append(f"the MLX model has no place for {list_some(lost)}")
    if missing:
        parts.append(f"the checkpoint lacks the model's {list_some(missing)}")
    text = "; ".join(parts)
    hint = "Give names with rename=... (--rename), or drop tensors (--drop)."
    prefix = lost[0].split(".", 1)[0] + "." if lost and "." in lost[0] else ""
    is_wrapper = prefix and all(name.startswith(prefix) for name in lost)
    if is_wrapper and missing and not any(n.startswith(prefix) for n in missing):
        hint = (
            f"If {prefix!r} is only a wrapper, rename it away: rename=... "
            f"(--rename '^{re.escape(prefix)}=')."
        )
    for pattern, rewritten in _REWRITTEN.items():
        if any(re.search(pattern, name) for name in lost):
            hint = rewritten
    return f"{text[0].upper()}{text[1:]}. {hint}"


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


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
                f"{name}: a GroupNorm without pytorch_compatible=True groups other "
                "channels than PyTorch's. Build it with pytorch_compatible=True."
            )
        elif isinstance(module, _CONVOLUTIONS):
            channels = module.weight.shape[0]
        elif isinstance(module, nn.Linear):
            inputs = module.weight.shape[1]
            if channels and inputs > channels and inputs % channels == 0:
                notes.append(
                    f"{name} has {inputs} inputs, and the convolution before it "
                    f"{channels} channels: if its input is flattened in between, "
                    "PyTorch flattens with the channels first and MLX with the "
                    "channels last. In the MLX model move them first: "
                    "mx.moveaxis(x, -1, 1).flatten(1)."
                )
            channels = 0
    return notes
