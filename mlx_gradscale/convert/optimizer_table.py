"""Table of PyTorch's and MLX's optimizers: names, settings and differences.

Each entry was checked against both sources (torch 2.13, mlx 0.32.4), and the tests run
it against both. Where MLX's update differs from PyTorch's, either constructor arguments
make it match (``forced``), or the setting is refused (``refused``) until the user
accepts it by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.optimizers as optim

from .tree import ConvertError, list_some, number

Group = Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer on both sides.

    Attributes:
        mlx (type): MLX's class.
        slots (dict): PyTorch's state name -> MLX's.
        settings (dict): PyTorch's group key -> MLX's constructor argument.
        required (frozenset): Group keys that are always present.
        refused (dict): Group key -> (the value that turns it off, what differs).
        forced (dict): Constructor arguments that make MLX match PyTorch.
        has_step (bool): Whether PyTorch keeps a step count.
        note (str): A sentence that is always shown to the user.
        ignored (frozenset): Other group keys that have no effect in MLX.
    """

    mlx: type[optim.Optimizer]
    slots: dict[str, str]
    settings: dict[str, str]
    required: frozenset[str]
    refused: dict[str, tuple[Any, str]]
    forced: dict[str, Any] = field(default_factory=dict)
    has_step: bool = True
    note: str = ""
    ignored: frozenset[str] = frozenset()


# Group keys written by the schedules in torch.optim.lr_scheduler.
SCHEDULED = frozenset(
    {*("initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum")}
)
# Other group keys in torch.optim 1.6 to 2.13 that do not change the update rule.
_COMMON = SCHEDULED | {
    *("params", "param_names", "name"),
    *("foreach", "capturable", "differentiable", "fused"),
}
_MAXIMIZE = {
    "maximize": (
        False,
        "MLX only minimizes: negate the loss and set maximize to False",
    )
}


def _l2(name: str) -> dict[str, tuple[Any, str]]:
    text = f"PyTorch adds weight_decay * w to the gradient (L2); MLX's {name} does not"
    return {"weight_decay": (0, text)} | _MAXIMIZE


def _settings(*names: str) -> dict[str, str]:
    return {"lr": "learning_rate"} | {name: name for name in names}


_ADAM_REFUSED = {
    "amsgrad": (
        False,
        "amsgrad divides by the largest second moment so far, which MLX's Adam does "
        "not keep",
    )
} | _MAXIMIZE
_ADAM: dict[str, Any] = {
    "slots": {"exp_avg": "m", "exp_avg_sq": "v"},
    "required": frozenset({"betas", "eps", "amsgrad"}),
    "forced": {"bias_correction": True},
    "ignored": frozenset({"decoupled_weight_decay"}),
}

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "Adam": OptimizerSpec(
        optim.Adam,
        settings=_settings("betas", "eps"),
        refused=_ADAM_REFUSED | _l2("Adam"),
        **_ADAM,
    ),
    "AdamW": OptimizerSpec(
        optim.AdamW,
        settings=_settings("betas", "eps", "weight_decay"),
        refused=_ADAM_REFUSED,
        **_ADAM,
    ),
    "SGD": OptimizerSpec(
        optim.SGD,
        slots={"momentum_buffer": "v"},
        settings=_settings("momentum", "weight_decay", "dampening", "nesterov"),
        required=frozenset({"momentum", "dampening", "nesterov"}),
        refused=_MAXIMIZE,
        has_step=False,
    ),
    "RMSprop": OptimizerSpec(
        optim.RMSprop,
        slots={"square_avg": "v"},
        settings=_settings("alpha", "eps"),
        required=frozenset({"alpha", "centered", "momentum"}),
        refused={
            "momentum": (0, "MLX's RMSprop has no momentum"),
            "centered": (
                False,
                "centered subtracts the squared mean gradient under the root, which "
                "MLX's RMSprop does not keep",
            ),
        }
        | _l2("RMSprop"),
    ),
    "Adagrad": OptimizerSpec(
        optim.Adagrad,
        slots={"sum": "v"},
        settings=_settings("eps"),
        required=frozenset({"lr_decay", "eps", "initial_accumulator_value"}),
        refused=_l2("Adagrad")
        | {"lr_decay": (0, "MLX's Adagrad takes a schedule in its place")},
        ignored=frozenset({"initial_accumulator_value"}),
    ),
    "Adadelta": OptimizerSpec(
        optim.AdaDelta,
        slots={"square_avg": "v", "acc_delta": "u"},
        settings=_settings("rho", "eps"),
        required=frozenset({"rho", "eps"}),
        refused=_l2("AdaDelta"),
    ),
    # google/automl, lion-pytorch and timm share this layout: a single exp_avg.
    "Lion": OptimizerSpec(
        optim.Lion,
        slots={"exp_avg": "m"},
        settings=_settings("betas", "weight_decay"),
        required=frozenset({"betas", "weight_decay"}),
        refused={
            "caution": (False, "MLX's Lion has no cautious masking"),
            "cautious_factor": (1, "MLX's Lion has no cautious masking"),
            "corrected_weight_decay": (
                False,
                "MLX's Lion decays by lr * weight_decay",
            ),
        }
        | _MAXIMIZE,
        has_step=False,
        note="Lion: its state does not tell whether it was lion_pytorch's with "
        "decoupled_weight_decay=True. If so, do not continue it in MLX, whose Lion "
        "decays by lr * weight_decay.",
    ),
}
# Values that --accept takes in addition to group keys.
ACCEPTABLE = tuple(
    sorted(
        {key for spec in OPTIMIZERS.values() for key in spec.refused}
        | {"bias_correction", "dampening"}
    )
)


def recognise(
    groups: Sequence[Group], slots: Iterable[str], name: str | None = None
) -> str:
    """Return the key of :data:`OPTIMIZERS` that a state dict belongs to.

    A state dict does not name its class, so it is inferred from the keys of its groups
    and state. A ``name`` given by the user is checked.
    """
    if not groups:
        raise ConvertError("The optimizer state has no parameter groups.")
    held = set(slots)
    keys = f"its groups have {list_some(sorted(groups[0]), 20)} and its state has "
    keys += list_some(sorted(held), 20) or "nothing"
    fits = [n for n, spec in OPTIMIZERS.items() if _fits(spec, groups, held)]
    if name is not None:
        if name not in fits:
            raise ConvertError(
                f"The optimizer state is not that of {name}: {keys}. Known are "
                f"{', '.join(OPTIMIZERS)}."
            )
        return name
    if set(fits) == {"Adam", "AdamW"}:
        return _adam_or_adamw(groups)
    if len(fits) == 1:
        return fits[0]
    raise ConvertError(
        f"The optimizer state is of none of the known kinds: {keys}. Known are "
        f"{', '.join(OPTIMIZERS)}; leave it out with keys={{'optimizer': ''}} "
        "(--optimizer-key '', or the key of another one). It then goes back unchanged."
    )


def _fits(spec: OptimizerSpec, groups: Sequence[Group], held: set[str]) -> bool:
    extra = held - set(spec.slots) - {"step"}
    # amsgrad, centered and RMSprop's momentum add their own slots. They are refused
    # later, by name.
    extra -= {"max_exp_avg_sq", "grad_avg"} | (
        {"momentum_buffer"} if "square_avg" in spec.slots else set()
    )
    missing = set(spec.slots) - held if held - {"step"} else set()
    return (
        not extra
        and not missing
        and all(
            spec.required <= set(group) and ("eps" in group) == ("eps" in spec.settings)
            for group in groups
        )
    )


def _adam_or_adamw(groups: Sequence[Group]) -> str:
    flags = [group.get("decoupled_weight_decay") for group in groups]
    if all(flag is True for flag in flags) or all(flag is False for flag in flags):
        return "AdamW" if flags[0] else "Adam"
    if all(not number(group.get("weight_decay", 0)) for group in groups):
        return "Adam"  # identical without weight decay
    raise ConvertError(
        "The optimizer state could be that of Adam or AdamW: it was written by a "
        "PyTorch that does not say which, and has weight decay. Name it with "
        "optimizer=... (--optimizer)."
    )


def torch_differences(
    name: str, group: Group, is_complete: bool = True
) -> dict[str, str]:
    """Return the differences between MLX's update and a PyTorch group's.

    Each is a sentence, with the key by which the user accepts it. The group is complete
    if every parameter already has state.
    """
    spec = OPTIMIZERS[name]
    found = {
        f"{name} has {key}={plain_setting(group[key])!r}: {text}.": key
        for key, (off, text) in spec.refused.items()
        if plain_setting(group.get(key)) not in (off, None)
    }
    known = {*spec.settings, *spec.required, *spec.refused, *spec.ignored, *_COMMON}
    found |= {
        f"The optimizer's groups have {key!r}, which PyTorch's {name} does not have: "
        "it may be another optimizer, and MLX ignores the key.": key
        for key in group
        if key not in known
    }
    has_momentum = name == "SGD" and number(group.get("momentum", 0))
    dampening = number(group.get("dampening", 0)) if has_momentum else 0
    if dampening and (dampening < 0 or not is_complete):
        text = (
            f"SGD has dampening={dampening!r} and no momentum buffer yet: PyTorch "
            "starts it with the whole gradient, MLX with (1 - dampening) of it."
        )
        found[text] = "dampening"
    return found


def plain_setting(value: Any) -> Any:
    """Return a setting with Python numbers, and lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(number, value))
    return number(value)


def mlx_differences(name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the differences between PyTorch's update and an MLX optimizer's."""
    spec = OPTIMIZERS[name]
    mine = spec.mlx.__name__
    if settings["class"] != mine:
        raise ConvertError(
            f"The MLX optimizer is {settings['class']}, and the PyTorch checkpoint "
            f"holds {name}: give a checkpoint of that optimizer as the template, or "
            "leave the optimizer out."
        )
    if "bias_correction" not in spec.forced or settings.get("bias_correction", True):
        return {}
    text = (
        f"MLX's {mine} ran without bias correction, which is its default, and "
        f"PyTorch's always corrects: next time build it as {mine}(..., "
        "bias_correction=True). If accepted, moments and step count stay, and "
        "PyTorch's updates differ from MLX's in the first thousands of steps."
    )
    return {text: "bias_correction"}


def check_differences(found: Mapping[str, str], accept: Iterable[str]) -> list[str]:
    """Raise on differences that were not accepted; return notes on the others."""
    bad = {text: key for text, key in found.items() if key not in set(accept)}
    if bad:
        keys = ", ".join(dict.fromkeys(bad.values()))
        raise ConvertError(
            f"{' '.join(bad)} To convert all the same and leave it out, accept it by "
            f"name: {keys} (accept=..., --accept)."
        )
    return list(found)
