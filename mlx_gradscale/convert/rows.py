"""Make the table of rows that maps a PyTorch state dict to an MLX model.

Wrappers (DistributedDataParallel, torch.compile, FSDP, Lightning) add words to names,
and PEFT has its own names. The table is made once per checkpoint and applies to both
weights and moments, in both directions.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.text import list_some
from .files import ConvertError
from .layouts import AXES, Row, Shape, known_rows, probe_sanitize, try_sanitize

# Words added by DistributedDataParallel, torch.compile, FullyShardedDataParallel and
# activation checkpointing.
_WRAPPERS = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# None, and the prefixes in LightningModules and in Transformers' GPT-2 with a head.
_PREFIXES = ("", "model.", "transformer.")
# base_model.model.<path>.lora_A[.<adapter>].weight
_PEFT = "base_model.model."
_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")
# BatchNorm's step count, which MLX does not have, and get_extra_state() of a module.
_TORCH_ONLY = ("num_batches_tracked", "_extra_state")


@dataclass(frozen=True)
class Options:
    """What a user may specify about a conversion; see ``load_torch``."""

    rename: Callable[[str], str] = str
    layouts: Mapping[str, str] = field(default_factory=dict)
    drop: Collection[str] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Collection[str] | None = None
    accept: Collection[str] = ()


@dataclass
class Table:
    """Rows by PyTorch name. All names of a tied tensor have the same row."""

    rows: dict[str, Row]
    # Names of tensors without a row, but for those that the model's sanitize drops.
    lost: list[str] = field(default_factory=list)
    known: dict[str, Row] = field(default_factory=dict)  # all that the model accepts
    # Changes the model as its sanitize does.
    change_model: Callable[[], object] = lambda: None
    notes: list[str] = field(default_factory=list)


def bare_name(name: str) -> str:
    """Remove the words that wrappers such as torch.compile insert into a name."""
    return _WRAPPERS.sub("", name)


def from_peft(name: str) -> tuple[str, str]:
    """Return mlx-lm's name and layout for a tensor named by PEFT.

    PEFT stores A as (rank, in) and B as (out, rank). mlx-lm transposes both. Tensors
    that are not adapters lose PEFT's prefix and have the layout ``""`` (unknown).
    """
    name = name.removeprefix(_PEFT)
    found = _ADAPTER.fullmatch(name)
    if found is None:
        return name, ""
    return f"{found[1]}.lora_{found[2].lower()}", "transpose"


def is_adapter(names: Collection[str]) -> bool:
    """Return whether a state dict holds PEFT adapters without the base model."""
    return any(_ADAPTER.fullmatch(n) for n in names) and all(
        n.startswith(_PEFT) or _ADAPTER.fullmatch(n) for n in names
    )


def make_table(
    tensors: Mapping[str, Any], model: nn.Module, options: Options | None = None
) -> Table:
    """Map a PyTorch state dict to the parameters of an MLX model.

    Names and layouts come from the model's ``sanitize`` method or from its layers:
    names inside an ``nn.Sequential`` get the prefix ``layers``, convolution weights
    are transposed, and fused attention weights are split. Every shape is checked.
    """
    options = options or Options()
    given = _given_layouts(options.layouts, tensors)
    dropped = {n for pattern in options.drop for n in _match(pattern, tensors)}
    dropped |= {name for name in tensors if name.endswith(_TORCH_ONLY)}
    shapes = {n: tuple(x.shape) for n, x in tensors.items() if n not in dropped}
    own = {name: x.shape for name, x in tree_flatten(model.parameters())}
    table = _find_rows(shapes, options.rename, model)
    owners: dict[int, Row] = {}  # by tensor: several names may be tied
    for name, row in table.rows.items():
        shape, wanted = shapes[name], {n: own[n] for n in row.mlx}
        layout = given.get(name) or row.layout or _find_custom(row, shape, wanted)
        row = replace(row, layout=layout)
        if row.mlx_shapes(shape) != wanted:
            made, fit = row.mlx_shapes(shape)[row.mlx[0]], wanted[row.mlx[0]]
            moved = f", or {made} in MLX's layout ({layout})" if made != shape else ""
            hint = "Create the MLX model with the sizes of the PyTorch model."
            if shape[::-1] == fit:
                hint = (
                    "If PyTorch stores weights as (in, out), as Transformers' Conv1D "
                    "does, pass layouts=... with a pattern for all of them (--layout "
                    f"'{name}=transpose'). Square weights, whose shapes do not show "
                    "it, need the same."
                )
            raise ConvertError(
                f"{name} has shape {shape} in PyTorch{moved}, but the MLX model has "
                f"shape {fit} for {' and '.join(row.mlx)}. {hint}"
            )
        owner = owners.setdefault(id(tensors[name]), row)
        if owner.mlx != row.mlx:
            raise ConvertError(
                f"{owner.torch} and {name} share one tensor in PyTorch, but are "
                "separate parameters in the MLX model and would diverge in training. "
                "Tie them in MLX (embedding.as_linear), or untie them in PyTorch "
                "before saving."
            )
    # If a tensor matches by one of its names, its unmatched names are aliases.
    table.rows = {n: owners[id(x)] for n, x in tensors.items() if id(x) in owners}
    table.lost = [name for name in table.lost if name not in table.rows]
    _check_names(table, is_partial=is_adapter(shapes))
    grouped = [
        name or "the model itself"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.GroupNorm)
        and not layer.pytorch_compatible
        and 1 < layer.num_groups < layer.dims
    ]
    if grouped:
        table.notes.append(
            "These layers group channels differently from PyTorch's GroupNorm: "
            f"{list_some(grouped)}. Create them with pytorch_compatible=True."
        )
    return table


def _find_custom(row: Row, shape: Shape, wanted: Mapping[str, Shape]) -> str:
    """Return the layout of a custom layer; raise if shapes do not tell it."""
    layouts = ("same", "conv", "conv_transpose")
    fits = [x for x in layouts if replace(row, layout=x).mlx_shapes(shape) == wanted]
    if {*fits} - {"same"}:
        flags = " or ".join(f"{row.torch}={layout}" for layout in fits)
        raise ConvertError(
            f"{row.torch} has shape {shape} in PyTorch and {wanted[row.mlx[0]]} in "
            "the MLX model. It belongs to a custom layer, so its layout is unknown. "
            f"Pass it with layouts=... (--layout {flags})."
        )
    return "same"


def _match(pattern: str, names: Collection[str]) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConvertError(
            f"The pattern {pattern!r} matches no tensor. Use a pattern for the PyTorch "
            f"names, which are {list_some(names)}."
        )
    return found


def _given_layouts(
    patterns: Mapping[str, str], tensors: Mapping[str, Any]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern, layout in patterns.items():
        if layout not in AXES:
            raise ConvertError(
                f"{layout!r} is not a layout. Use one of {', '.join(AXES)}."
            )
        for name in _match(pattern, tensors):
            if len(tensors[name].shape) >= AXES[layout][0]:
                found.setdefault(name, layout)
    return found


def _find_rows(
    shapes: Mapping[str, Shape], rename: Callable[[str], str], model: nn.Module
) -> Table:
    """Match tensors to the rows that a model accepts, by name alone."""
    has_sanitize = hasattr(model, "sanitize") and not is_adapter(shapes)
    known, change_model = known_rows(model), Table.change_model
    found: list[Table] = []
    for candidate in _rename_candidates(rename):
        names: dict[str, tuple[str, str]] = {n: from_peft(candidate(n)) for n in shapes}
        if has_sanitize:  # it does not expect LoRA adapters
            asked = {new: shapes[n] for n, (new, layout) in names.items() if not layout}
            kept, known = try_sanitize(model, asked)
            change_model = partial(probe_sanitize, model, asked)
            kept |= {new: (new, layout) for new, layout in names.values() if layout}
            names = {n: kept[new] for n, (new, _) in names.items() if new in kept}
        rows = {
            n: replace(known[new], torch=n, layout=layout or known[new].layout)
            for n, (new, layout) in names.items()
            if new in known
        }
        lost = [name for name in names if name not in rows]
        found.append(Table(rows, lost, known, change_model))
        if len(rows) == len(shapes):
            break
    # Of equal results, max() returns the first, which removes the least.
    return max(found, key=lambda table: len(table.rows))


def _rename_candidates(rename: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """Yield functions that may map PyTorch's names to the model's, simplest first."""
    yield rename
    for prefix in _PREFIXES:
        yield partial(lambda p, name: bare_name(rename(name)).removeprefix(p), prefix)
        yield partial(lambda p, name: rename(bare_name(name).removeprefix(p)), prefix)


def _check_names(table: Table, is_partial: bool) -> None:
    """Raise unless each parameter of the model has exactly one tensor."""
    taken: dict[str, Row] = {}
    for row in table.rows.values():
        for name in row.mlx:
            if taken.setdefault(name, row) is not row:
                raise ConvertError(
                    f"{taken[name].torch} and {row.torch} would both become {name}. "
                    "Rename one with rename=... (--rename), or drop it with drop=... "
                    "(--drop)."
                )
    wanted = {name for row in table.known.values() for name in row.mlx}
    advice = (
        "Pass a function as rename= (or --rename '^net[.]=' to drop the prefix "
        "'net.'), or ignore tensors with drop=... (--drop). Recurrent layers and "
        "parametrized or pruned weights cannot be converted."
    )
    if is_partial:  # the checkpoint has no base model
        wanted = {n for n in wanted if n.endswith((".lora_a", ".lora_b"))}
        advice = (
            "Add LoRA layers to the MLX model as in the checkpoint, with mlx_lm.tuner."
            "utils.linear_to_lora_layers. On the command line, pass a function that "
            "does so as --model MODULE:NAME."
        )
    missing = sorted(wanted - taken.keys())
    problems = ""
    if table.lost:
        problems += f"The MLX model has no parameter for {list_some(table.lost)}. "
    if missing:
        problems += f"The checkpoint has no tensor for {list_some(missing)}. "
    if problems:
        raise ConvertError(problems + advice)
