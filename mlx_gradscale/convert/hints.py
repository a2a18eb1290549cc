"""Notes and errors that suggest the option a checkpoint needs."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

import mlx.nn as nn

from ..files.text import list_some
from .layouts import Row, Shape

NO_LORA = (
    "The checkpoint contains LoRA adapters, but the MLX model has no LoRA layers. Add "
    "them with mlx_lm.tuner.utils.linear_to_lora_layers. On the command line, do this "
    "in a function and pass it as --model MODULE:NAME."
)
LORA_SCALE = (
    "The checkpoint contains LoRA adapters from PEFT. Set the scale in mlx-lm's "
    "adapter_config.json to PEFT's lora_alpha / r, or to lora_alpha / sqrt(r) if "
    "use_rslora was set."
)
GIVEN_IN_ORDER = (
    "The given names were assigned to the optimizer's groups in order. If they are in "
    "the order of model.named_parameters(), list them group by group instead."
)


def doubt_order(modules: Sequence[str]) -> str:
    """Return a note on an order of parameters that nothing confirms."""
    return (
        "The optimizer does not store the names of its parameters, so the order of the "
        "model's state dict was used. Shapes alone cannot confirm it, because "
        f"{list_some(modules, 3)} have equal shapes. If the optimizer was created with "
        f"another order, their moments are swapped. {advise_names()}"
    )


def advise_names(some_are_left: bool = False) -> str:
    """Return advice on the names of the optimizer's parameters."""
    which = " if p.requires_grad" if some_are_left else ""
    return (
        "Create the PyTorch optimizer with model.named_parameters() before saving, or "
        "pass the names of its parameters with names=... (--names FILE). For an "
        "optimizer of model.parameters(), even if it splits them by weight decay, they "
        f"are [name for name, p in model.named_parameters(){which}]. Otherwise, list "
        "them in the optimizer's order, group by group."
    )


def explain_shape(
    wrong: Sequence[Row],
    square: Sequence[str],
    shapes: Mapping[str, Shape],
    own: Mapping[str, Shape],
) -> str:
    """Return an error about rows whose shapes do not match the model's."""
    first, hint = wrong[0], "Create the MLX model with the sizes of the PyTorch model."
    turned = [row.torch for row in wrong if shapes[row.torch][::-1] == own[row.mlx[0]]]
    if turned:
        hint = "If PyTorch stores weights as (in, out), as Transformers' Conv1D does, "
        hint += f"pass {_transposed(turned)}."
        if square:
            hint += " Square weights, whose shapes do not show it, may need the same: "
            hint += f"{_transposed(square)}."
    shape = shapes[first.torch]
    made = first.mlx_shapes(shape)[0]
    moved = f", or {made} in MLX's layout ({first.layout})," if made != shape else ","
    return (
        f"{first.torch} has shape {shape} in PyTorch{moved} but the MLX model has "
        f"shape {own[first.mlx[0]]} for {' and '.join(first.mlx)}. {hint}"
    )


def _transposed(names: Iterable[str]) -> str:
    """Return the option that transposes weights, with one pattern for all blocks."""
    patterns = [re.sub(r"(?<![^.])\d+(?=\.)", "*", name[:100]) for name in names]
    texts = [shlex.quote(f"{each}=transpose") for each in dict.fromkeys(patterns)]
    return f"layouts=... ({' '.join(f'--layout {text}' for text in texts[:8])})"


def describe_model(
    model: nn.Module, rows: Mapping[str, Row], unused: Sequence[str]
) -> list[str]:
    """Return notes on how an MLX model differs from the PyTorch model."""
    notes = []
    if any(row.mlx[0].endswith(".lora_a") for row in rows.values()):
        notes.append(LORA_SCALE)
    if unused:
        notes.append(
            f"The MLX model has no parameters for {list_some(unused)}. These tensors "
            "and their optimizer state are written back to PyTorch unchanged."
        )
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
