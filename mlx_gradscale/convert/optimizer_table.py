"""Table of PyTorch's and MLX's optimizers: names, settings and differences.

Each entry was checked against the source code of both libraries (torch 2.13, mlx
0.32.4), and the tests compare their updates. Where MLX's update differs from PyTorch's,
either constructor arguments make it match (``forced``), or the setting is refused
(``refused``) unless the user accepts the difference.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.optimizers as optim

from ..core.trees import CONTAINERS
from ..files.text import list_some
from .files import ConvertError, number

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer in PyTorch and its counterpart in MLX."""

    mlx: type[optim.Optimizer]
    slots: dict[str, str]  # PyTorch's state name -> MLX's
    settings: tuple[str, ...]  # group keys that are MLX's constructor arguments
    required: set[str]  # group keys that are always present
    refused: dict[str, str]  # setting -> the difference if it is on
    refused_slots: tuple[str, ...] = ()  # state of settings that are refused
    forced: dict[str, Any] = field(default_factory=dict)  # to match PyTorch
    has_step: bool = True  # whether PyTorch keeps a step count
    note: str = ""  # always shown to the user


# Group keys written by the schedules in torch.optim.lr_scheduler.
SCHEDULED = (
    *("initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("base_momentum", "max_momentum"),
)
# Whether Adam's weight decay is AdamW's. PyTorch before 2.7 does not save it.
DECOUPLED = "decoupled_weight_decay"
# Other group keys in torch.optim 1.6 to 2.13 that do not change MLX's update.
IGNORED = {
    *("lr", "params", "param_names", "name", *SCHEDULED),
    *("foreach", "capturable", "differentiable", "fused"),
    *(DECOUPLED, "initial_accumulator_value"),
}
# Values that turn settings off, if not 0 or False.
OFF = {"cautious_factor": 1, "bias_correction": 1}
# What no optimizer in MLX has.
REFUSED = {"maximize": "MLX only minimizes. Negate the loss and set maximize to False"}
_L2 = {"weight_decay": "MLX's version does not add weight_decay * w to the gradient"}
_ADAM: dict[str, Any] = {
    "slots": {"exp_avg": "m", "exp_avg_sq": "v"},
    "required": {"betas", "eps", "amsgrad"},
    "refused_slots": ("max_exp_avg_sq",),
    "forced": {"bias_correction": True},
}
_REFUSED_ADAM = {
    "amsgrad": "MLX does not track the largest second moment",
    "bias_correction": "PyTorch always corrects the bias, so the two differ in early "
    "steps. For new MLX runs, pass bias_correction=True",
}

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "Adam": OptimizerSpec(
        optim.Adam,
        settings=("betas", "eps"),
        refused=_REFUSED_ADAM | _L2,
        **_ADAM,
    ),
    "AdamW": OptimizerSpec(
        optim.AdamW,
        settings=("betas", "eps", "weight_decay"),
        refused=_REFUSED_ADAM,
        **_ADAM,
    ),
    "SGD": OptimizerSpec(
        optim.SGD,
        slots={"momentum_buffer": "v"},
        settings=("momentum", "weight_decay", "nesterov"),
        required={"momentum", "dampening", "nesterov"},
        refused={
            "dampening": "PyTorch initializes the momentum with the gradient, and MLX "
            "with (1 - dampening) times the gradient"
        },
        has_step=False,
    ),
    "RMSprop": OptimizerSpec(
        optim.RMSprop,
        slots={"square_avg": "v"},
        settings=("alpha", "eps"),
        required={"alpha", "centered", "momentum"},
        refused=_L2
        | {
            "momentum": "MLX's RMSprop has no momentum",
            "centered": "MLX's RMSprop does not track the mean gradient",
        },
        refused_slots=("momentum_buffer", "grad_avg"),
    ),
    "Adagrad": OptimizerSpec(
        optim.Adagrad,
        slots={"sum": "v"},
        settings=("eps",),
        required={"lr_decay", "eps", "initial_accumulator_value"},
        refused=_L2
        | {"lr_decay": "MLX's Adagrad has no lr_decay. Use a schedule instead"},
    ),
    "Adadelta": OptimizerSpec(
        optim.AdaDelta,
        slots={"square_avg": "v", "acc_delta": "u"},
        settings=("rho", "eps"),
        required={"rho", "eps"},
        refused=_L2,
    ),
    # google/automl, lion-pytorch and timm share this layout: a single exp_avg.
    "Lion": OptimizerSpec(
        optim.Lion,
        slots={"exp_avg": "m"},
        settings=("betas", "weight_decay"),
        required={"betas", "weight_decay"},
        refused={
            "caution": "MLX's Lion has no cautious masking",
            "cautious_factor": "MLX's Lion has no cautious masking",
            "corrected_weight_decay": "MLX's Lion decays by lr * weight_decay",
        },
        has_step=False,
        note="MLX's Lion decays weights by lr * weight_decay. If the run used "
        "lion_pytorch with decoupled_weight_decay=True, which its state does not "
        "record, do not continue it in MLX.",
    ),
}


def recognize(groups: Sequence[Settings], slots: Iterable[str]) -> str:
    """Return the optimizer, a key of ``OPTIMIZERS``, that a state dict belongs to.

    A state dict does not name the optimizer's class, so the class is inferred from the
    groups and the keys of the state.
    """
    held = set(slots)
    fits = [name for name, spec in OPTIMIZERS.items() if _fits(spec, groups, held)]
    if fits == ["Adam", "AdamW"]:
        flags = {group.get(DECOUPLED) for group in groups}
        # Without weight decay, the two are identical.
        is_decayed = any(group.get("weight_decay") for group in groups)
        return "AdamW" if flags == {True} or (is_decayed and None in flags) else "Adam"
    if len(fits) == 1:
        return fits[0]
    raise ConvertError(
        "The optimizer state has an unknown format: the keys of its first parameter "
        f"group are {list_some(sorted(groups[0]), 20)}, and those of its parameters' "
        f"state are {list_some(sorted(held), 20) or 'none'}. Supported optimizers are "
        f"{', '.join(OPTIMIZERS)}. To convert the model alone, pass keys={{'optimizer':"
        " ''} (--optimizer-key ''); the optimizer's state is then written back to "
        "PyTorch unchanged."
    )


def _fits(spec: OptimizerSpec, groups: Sequence[Settings], held: set[str]) -> bool:
    is_new = held <= {"step"}
    return (
        (is_new or held >= spec.slots.keys())
        and held <= {"step", *spec.slots, *spec.refused_slots}
        and all(spec.required <= set(group) for group in groups)
        and all(("eps" in group) == ("eps" in spec.settings) for group in groups)
    )


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Convert arrays and NumPy scalars in settings to numbers, and tuples to lists."""
    plain: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, (list, tuple)) and key != "params":
            if any(isinstance(item, CONTAINERS) for item in value):
                raise TypeError(f"{key} is nested")  # and may be endless to print
            plain[key] = [number(item) for item in value]
        elif key != "params":
            plain[key] = number(value)
    return plain


def find_differences(
    spec: OptimizerSpec, whose: str, plain: Settings
) -> dict[str, str]:
    """Return a sentence for each setting that is on and that the other side lacks."""
    return {
        key: f"{whose} has {key}={plain[key]!r}. {text}."
        for key, text in (spec.refused | REFUSED).items()
        if plain.get(key) not in (OFF.get(key, 0), None)
    }


def check_differences(found: Mapping[str, str], accept: Collection[str]) -> list[str]:
    """Raise unless all differences are accepted; return them as notes."""
    bad = [key for key in found if key not in accept]
    if bad:
        raise ConvertError(
            f"{' '.join(found[key] for key in bad)} To convert anyway and ignore the "
            f"difference, pass accept={bad} "
            f"({' '.join(f'--accept {key}' for key in bad)})."
        )
    return [*found.values()]
