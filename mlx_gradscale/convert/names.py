"""Map each tensor of a PyTorch state dict to its MLX name and layout.

Wrappers (DistributedDataParallel, torch.compile, FSDP, Lightning) add words to names,
and PEFT has its own names. A plan is made once per checkpoint and applies to both
weights and moments, in both directions.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.text import list_some
from .layouts import AXES, Entry, Shape, known_names, probe_sanitize, try_sanitize
from .options import Options
from .tree import ConvertError

# Words added by DistributedDataParallel, torch.compile, FullyShardedDataParallel and
# activation checkpointing.
_WRAPPERS = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# Prefixes in LightningModules, and in Transformers' GPT-2 with a head.
_PREFIXES = ("model.", "transformer.")
# base_model.model.<path>.lora_A[.<adapter>].weight
_PEFT = "base_model.model."
_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_COUNTER = "num_batches_tracked"  # BatchNorm's step count, which MLX does not have


@dataclass
class Plan:
    """The mapping of a PyTorch state dict to MLX, by PyTorch name."""

    entries: dict[str, Entry] = field(default_factory=dict)  # tensors that MLX has
    tied: dict[str, str] = field(default_factory=dict)  # alias -> name in entries
    torch_only: tuple[str, ...] = ()  # names without an MLX counterpart
    notes: list[str] = field(default_factory=list)  # for the user
    # Changes the model as its sanitize does.
    change_model: Callable[[], object] = lambda: None

    def to_mlx(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Convert a PyTorch state dict to MLX weights."""
        out: dict[str, mx.array] = {}
        for name, entry in self.entries.items():
            out |= entry.to_mlx(tensors[name])
        return out


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


def make_plan(
    tensors: Mapping[str, mx.array], model: nn.Module, options: Options | None = None
) -> Plan:
    """Map a PyTorch state dict to the parameters of an MLX model.

    Names and layouts come from the model's ``sanitize`` method or from its layers:
    names inside an ``nn.Sequential`` get the prefix ``layers``, convolution weights
    are transposed, and fused attention weights are split. Every shape is checked.
    """
    options = options or Options()
    given = _given_layouts(options.layouts, tensors)
    dropped = {n for pattern in options.drop for n in _matches(pattern, tensors)}
    # torch.nn.Module.get_extra_state() adds names that end in _extra_state.
    dropped |= {n for n in tensors if n.endswith((_COUNTER, "_extra_state"))}
    shapes = {n: tuple(x.shape) for n, x in tensors.items() if n not in dropped}
    own = {n: x.shape for n, x in tree_flatten(model.parameters())}
    new, known, change_model = _find_names(shapes, options.rename, model)
    plan = Plan(change_model=change_model)
    owners: dict[int, str] = {}
    wrong: list[Entry] = []
    square: list[str] = []  # weights that may be transposed or not
    for name, shape in shapes.items():
        mlx_name, layout = new.get(name) or ("", "")
        if mlx_name not in known:
            continue
        target, layout = known[mlx_name], given.get(name, layout)
        if not layout and len(shape) == 2 and shape[0] == shape[1]:
            square.append(name)
        entry = Entry(name, target.mlx, layout or target.layout or "same")
        wanted = [own[n] for n in entry.mlx]
        if not layout and not target.layout:
            _check_custom(entry, shape, wanted)
        if entry.mlx_shapes(shape) != wanted:
            wrong.append(entry)
        owner = owners.setdefault(id(tensors[name]), name)
        if owner == name:
            plan.entries[name] = entry
        elif entry.mlx != plan.entries[owner].mlx:
            raise ConvertError(
                f"{owner} and {name} share one tensor in PyTorch, but are separate "
                "parameters in the MLX model and would diverge in training. Tie them "
                "in MLX (embedding.as_linear), or untie them in PyTorch before saving."
            )
    _check_shapes(wrong, square, shapes, own)
    # If a tensor matches by one of its names, its unmatched names are aliases.
    rest = [name for name in tensors if name not in plan.entries]
    plan.tied = {n: owners[id(tensors[n])] for n in rest if id(tensors[n]) in owners}
    rest = [name for name in rest if name not in plan.tied]
    plan.torch_only = tuple(n for n in rest if new.get(n) is None)
    lost = [n for n in rest if new.get(n) is not None]
    _check_names(plan, lost, known, is_partial=is_adapter(shapes))
    plan.notes = _notes(plan, tensors, model)
    if square and "transpose" in given.values():
        plan.notes.append(
            "Some weights are transposed, but these square ones are not: "
            f"{list_some(square)}. If PyTorch stores them as (in, out) too, pass "
            f"{_transposed(square)}; otherwise, pass =same."
        )
    return plan


def _check_custom(entry: Entry, shape: Shape, wanted: list[Shape]) -> None:
    others = [replace(entry, layout=x) for x in ("same", "conv", "conv_transpose")]
    fits = [x.layout for x in others if x.mlx_shapes(shape) == wanted]
    if {*fits} - {"same"}:
        name = entry.torch
        raise ConvertError(
            f"{name} has shape {shape} in PyTorch and {wanted[0]} in the MLX model. It "
            "belongs to a custom layer, so its layout is unknown. Pass it with "
            f"layouts=... (--layout {' or '.join(f'{name}={x}' for x in fits)})."
        )


def _check_shapes(
    wrong: list[Entry],
    square: list[str],
    shapes: Mapping[str, Shape],
    own: Mapping[str, Shape],
) -> None:
    """Raise if there are ``wrong`` entries, whose shapes do not match the model's."""
    if not wrong:
        return
    first, hint = wrong[0], "Create the MLX model with the sizes of the PyTorch model."
    turned = [e.torch for e in wrong if shapes[e.torch][::-1] == own[e.mlx[0]]]
    if turned:
        hint = "If PyTorch stores weights as (in, out), as Transformers' Conv1D does, "
        hint += f"pass {_transposed(turned)}."
        if square:
            hint += " Square weights, whose shapes do not show it, may need the same: "
            hint += f"{_transposed(square)}."
    shape, made = shapes[first.torch], first.mlx_shapes(shapes[first.torch])[0]
    moved = f", or {made} in MLX's layout ({first.layout})," if made != shape else ","
    raise ConvertError(
        f"{first.torch} has shape {shape} in PyTorch{moved} but the MLX model has "
        f"shape {own[first.mlx[0]]} for {' and '.join(first.mlx)}. {hint}"
    )


def _transposed(names: list[str]) -> str:
    """Return the option that transposes weights, with one pattern for all blocks."""
    patterns = [re.sub(r"(?<![^.])\d+(?=\.)", "*", name[:100]) for name in names]
    texts = [shlex.quote(f"{each}=transpose") for each in dict.fromkeys(patterns)]
    return f"layouts=... ({' '.join(f'--layout {text}' for text in texts[:8])})"


def _notes(plan: Plan, tensors: Mapping[str, mx.array], model: nn.Module) -> list[str]:
    notes = []
    if any(n.endswith(".lora_a") for e in plan.entries.values() for n in e.mlx):
        notes.append(
            "The checkpoint contains LoRA adapters from PEFT. Set the scale in "
            "mlx-lm's adapter_config.json to PEFT's lora_alpha / r, or to lora_alpha / "
            "sqrt(r) if use_rslora was set."
        )
    dropped = [n for n in plan.torch_only if not n.endswith(_COUNTER)]
    if dropped:
        notes.append(
            f"The MLX model has no parameters for {list_some(dropped)}. These tensors "
            "and their optimizer state are written back to PyTorch unchanged."
        )
    rounded = [n for n in plan.entries if tensors[n].dtype == mx.float64]
    if rounded:
        notes.append(f"Tensors rounded from float64 to float32: {list_some(rounded)}.")
    grouped = [
        name or "the model itself"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.GroupNorm)
        and not layer.pytorch_compatible
        and 1 < layer.num_groups < layer.dims
    ]
    if grouped:
        notes.append(
            "These layers group channels differently from PyTorch's GroupNorm: "
            f"{list_some(grouped)}. Create them with pytorch_compatible=True."
        )
    return notes


def _matches(pattern: str, names: Collection[str]) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConvertError(
            f"The pattern {pattern!r} matches no tensor. Use a pattern for the PyTorch "
            f"names, which are {list_some(names)}."
        )
    return found


def _given_layouts(
    patterns: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern, layout in patterns.items():
        if layout not in AXES:
            raise ConvertError(
                f"{layout!r} is not a layout. Use one of {', '.join(AXES)}."
            )
        for name in _matches(pattern, tensors):
            if tensors[name].ndim >= AXES[layout][0]:
                found.setdefault(name, layout)
    return found


_Names = Mapping[str, tuple[str, str] | None]


def _find_names(
    shapes: Mapping[str, Shape], rename: Callable[[str], str], model: nn.Module
) -> tuple[_Names, dict[str, Entry], Callable[[], object]]:
    """Find the MLX name of each tensor, and its layout if it is known.

    A tensor that ``sanitize`` drops maps to None. Also return the names that the
    model accepts, and a function that changes the model as ``sanitize`` does.
    """
    has_sanitize = hasattr(model, "sanitize") and not is_adapter(shapes)
    known, change_model = known_names(model), Plan.change_model
    found = []
    for candidate in _rename_candidates(rename):
        plain = {name: from_peft(candidate(name)) for name in shapes}
        names: _Names = plain
        if has_sanitize:  # it does not expect LoRA adapters
            asked = {new: shapes[n] for n, (new, layout) in plain.items() if not layout}
            kept, known = try_sanitize(model, asked)
            change_model = partial(probe_sanitize, model, asked)
            names = {n: x if x[1] else kept.get(x[0]) for n, x in plain.items()}
        hits = sum(x is not None and x[0] in known for x in names.values())
        found.append((hits, names, known, change_model))
        if hits == len(shapes):
            break
    # Of equal results, max() returns the first, which removes the least.
    return max(found, key=lambda each: each[0])[1:]


def _rename_candidates(rename: Callable[[str], str]) -> Iterator[Callable[[str], str]]:
    """Yield functions that may map PyTorch's names to the model's, simplest first."""
    yield rename
    for prefix in ("", *_PREFIXES):
        yield partial(lambda p, name: bare_name(rename(name)).removeprefix(p), prefix)
        yield partial(lambda p, name: rename(bare_name(name).removeprefix(p)), prefix)


def _check_names(
    plan: Plan, lost: list[str], known: Mapping[str, Entry], is_partial: bool
) -> None:
    taken: dict[str, str] = {}
    for entry in plan.entries.values():
        for name in entry.mlx:
            if name in taken:
                raise ConvertError(
                    f"{taken[name]} and {entry.torch} would both become {name}. Rename "
                    "one with rename=... (--rename), or drop it with drop=... (--drop)."
                )
            taken[name] = entry.torch
    wanted = {n for target in known.values() for n in target.mlx}
    if is_partial:  # the checkpoint has no base model
        wanted = {n for n in wanted if n.endswith((".lora_a", ".lora_b"))}
        if lost and not wanted:
            raise ConvertError(
                "The checkpoint contains LoRA adapters, but the MLX model has no LoRA "
                "layers. Add them with mlx_lm.tuner.utils.linear_to_lora_layers. On "
                "the command line, do this in a function and pass it as --model "
                "MODULE:NAME."
            )
    missing = [name for name in sorted(wanted) if name not in taken]
    problems = []
    if lost:
        problems.append(f"The MLX model has no parameter for {list_some(lost)}.")
    if missing:
        problems.append(f"The checkpoint has no tensor for {list_some(missing)}.")
    if problems:
        drop = ", or ignore them with drop=... (--drop)" if lost else ""
        raise ConvertError(
            f"{' '.join(problems)} Pass rename=... (or --rename '^net[.]=' to drop the "
            f"prefix 'net.'){drop}. "
            "Recurrent layers and parametrized or pruned weights cannot be converted."
        )
