"""PyTorch's optimizers and MLX's, as one table: names, settings, differences.

Each entry was checked against both sources (torch 2.13, mlx 0.32.4) and is run
against both in the tests. Where MLX computes something else than PyTorch, either MLX
does the same when built in a certain way (``forced``), or the setting is refused
(``refused``) until the user accepts it by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.optimizers as optim

from .tree import ConvertError, list_some, number

Group = Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        mlx (type): MLX's class.
        slots (dict): PyTorch's state name -> MLX's.
        settings (dict): PyTorch's group key -> MLX's constructor argument.
        required (frozenset): Group keys that it always has.
        forbidden (frozenset): Group keys that it never has.
        refused (dict): Group key -> (values that turn it off, what differs).
        forced (dict): Constructor arguments with which MLX computes the same.
        has_step (bool): Whether PyTorch keeps a step count.
        decay_is_per_rate (bool): Whether the weight decay is divided by the first
            learning rate.
        by_name_only (bool): Whether nothing but the user tells it from another one.
        notes (tuple): Sentences for the user in any case.
        ignored (frozenset): Further group keys that change nothing in MLX.
        doubt (Callable): (group) -> a sentence on what its keys do not tell, or None.
    """

    mlx: type[optim.Optimizer]
    slots: dict[str, str]
    settings: dict[str, str]
    required: frozenset[str]
    forbidden: frozenset[str]
    refused: dict[str, tuple[Any, str]]
    forced: dict[str, Any] = field(default_factory=dict)
    has_step: bool = True
    decay_is_per_rate: bool = False
    by_name_only: bool = False
    notes: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    doubt: Callable[[Group], str | None] = lambda group: None


# Written into the groups by the schedules of torch.optim.lr_scheduler.
SCHEDULED = frozenset(
    {*("initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum")}
)
# What torch.optim's groups of 1.6 to 2.13 hold besides the settings of the rule.
_COMMON = SCHEDULED | {
    *("params", "param_names", "name"),
    *("foreach", "capturable", "differentiable", "fused"),
}
_MAXIMIZE = {
    "maximize": (
        (False,),
        "MLX only minimizes: negate the loss and set maximize to False",
    )
}


def _l2(name: str) -> dict[str, tuple[Any, str]]:
    text = f"PyTorch adds weight_decay * w to the gradient (L2); MLX's {name} does not"
    return {"weight_decay": ((0,), text)} | _MAXIMIZE


def _lion_doubt(group: Group) -> str | None:
    # lion_pytorch keeps the switch in the object; timm's groups have more keys.
    if not number(group["weight_decay"]) or "maximize" in group:
        return None
    return (
        "Lion: its state does not tell whether it was lion_pytorch's with "
        "decoupled_weight_decay=True. If so, convert with optimizer='LionDecoupled' "
        "(--optimizer LionDecoupled)."
    )


_ADAM_REFUSED = {
    "amsgrad": (
        (False,),
        "amsgrad divides by the largest second moment so far, which MLX's Adam does "
        "not keep",
    )
} | _MAXIMIZE
_ADAM: dict[str, Any] = {
    "slots": {"exp_avg": "m", "exp_avg_sq": "v"},
    "required": frozenset({"betas", "eps", "amsgrad"}),
    "forbidden": frozenset({"momentum_decay"}),
    "forced": {"bias_correction": True},
    "ignored": frozenset({"decoupled_weight_decay"}),
}
_ADAM_SETTINGS = {"lr": "learning_rate", "betas": "betas", "eps": "eps"}
# The layout that google/automl, lion-pytorch and timm share: one exp_avg.
_LION: dict[str, Any] = {
    "slots": {"exp_avg": "m"},
    "settings": {
        "lr": "learning_rate",
        "betas": "betas",
        "weight_decay": "weight_decay",
    },
    "required": frozenset({"betas", "weight_decay"}),
    "forbidden": frozenset({"eps"}),
    "refused": {
        "caution": ((False,), "MLX's Lion has no cautious masking"),
        "cautious_factor": ((1,), "MLX's Lion has no cautious masking"),
        "corrected_weight_decay": (
            (False,),
            "MLX's Lion decays by lr * weight_decay",
        ),
    }
    | _MAXIMIZE,
    "has_step": False,
}

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "Adam": OptimizerSpec(
        optim.Adam,
        settings=_ADAM_SETTINGS,
        refused=_ADAM_REFUSED | _l2("Adam"),
        **_ADAM,
    ),
    "AdamW": OptimizerSpec(
        optim.AdamW,
        settings=_ADAM_SETTINGS | {"weight_decay": "weight_decay"},
        refused=_ADAM_REFUSED,
        **_ADAM,
    ),
    "SGD": OptimizerSpec(
        optim.SGD,
        slots={"momentum_buffer": "v"},
        settings={
            "lr": "learning_rate",
            "momentum": "momentum",
            "weight_decay": "weight_decay",
            "dampening": "dampening",
            "nesterov": "nesterov",
        },
        required=frozenset({"momentum", "dampening", "nesterov"}),
        forbidden=frozenset(),
        refused=_MAXIMIZE,
        has_step=False,
    ),
    "RMSprop": OptimizerSpec(
        optim.RMSprop,
        slots={"square_avg": "v"},
        settings={"lr": "learning_rate", "alpha": "alpha", "eps": "eps"},
        required=frozenset({"alpha", "centered", "momentum"}),
        forbidden=frozenset(),
        refused={
            "momentum": ((0,), "MLX's RMSprop has no momentum"),
            "centered": (
                (False,),
                "centered subtracts the squared mean gradient under the root, which "
                "MLX's RMSprop does not keep",
            ),
        }
        | _l2("RMSprop"),
    ),
    "Adagrad": OptimizerSpec(
        optim.Adagrad,
        slots={"sum": "v"},
        settings={"lr": "learning_rate", "eps": "eps"},
        required=frozenset({"lr_decay", "eps", "initial_accumulator_value"}),
        forbidden=frozenset(),
        refused=_l2("Adagrad")
        | {"lr_decay": ((0,), "MLX's Adagrad takes a schedule in its place")},
        ignored=frozenset({"initial_accumulator_value"}),
    ),
    "Adadelta": OptimizerSpec(
        optim.AdaDelta,
        slots={"square_avg": "v", "acc_delta": "u"},
        settings={"lr": "learning_rate", "rho": "rho", "eps": "eps"},
        required=frozenset({"rho", "eps"}),
        forbidden=frozenset(),
        refused=_l2("AdaDelta"),
    ),
    "Lion": OptimizerSpec(optim.Lion, doubt=_lion_doubt, **_LION),
    "LionDecoupled": OptimizerSpec(
        optim.Lion, decay_is_per_rate=True, by_name_only=True, **_LION
    ),
    "Muon": OptimizerSpec(
        optim.Muon,
        slots={"momentum_buffer": "v"},
        settings={
            "lr": "learning_rate",
            "momentum": "momentum",
            "nesterov": "nesterov",
            "ns_steps": "ns_steps",
        },
        required=frozenset({"momentum", "ns_steps", "ns_coefficients"}),
        forbidden=frozenset({"dampening"}),
        refused={
            "weight_decay": (
                (0,),
                "PyTorch's Muon decays the weights directly, MLX's adds weight_decay "
                "* w to the gradient before the orthogonalization",
            ),
            "ns_coefficients": (
                ((3.4445, -4.775, 2.0315),),
                "MLX's Muon has fixed coefficients",
            ),
            "adjust_lr_fn": (("original",), "MLX's Muon scales as 'original' does"),
        },
        forced={"weight_decay": 0.0},
        has_step=False,
        notes=(
            "Muon: PyTorch orthogonalizes in bfloat16 and MLX in the gradient's own "
            "precision, so updates differ by about 1e-2.",
        ),
        ignored=frozenset({"eps"}),
    ),
}
# What --accept takes besides the keys of the groups.
ACCEPTABLE = tuple(
    sorted(
        {key for spec in OPTIMIZERS.values() for key in spec.refused}
        | {"bias_correction", "dampening"}
    )
)


@dataclass(frozen=True)
class Difference:
    """One thing that the other side computes differently.

    Attributes:
        key (str): The word to accept it by.
        text (str): The sentence that says what differs.
    """

    key: str
    text: str


def recognise(
    groups: Sequence[Group], slots: Iterable[str], name: str | None = None
) -> str:
    """Return the key of :data:`OPTIMIZERS` that a state dict belongs to.

    A state dict does not hold its class: the keys of its groups and of its state tell
    it. A ``name`` that the user gives is checked.

    Example:
        >>> recognise([{"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0,
        ...             "nesterov": False, "params": []}], [])
        'SGD'
    """
    if not groups:
        raise ConvertError("The optimizer state has no parameter groups.")
    held = set(slots)
    keys = f"its groups have {list_some(sorted(groups[0]), 20)} and its state has "
    keys += list_some(sorted(held), 20) or "nothing"
    fits = [n for n, spec in OPTIMIZERS.items() if _fits(spec, groups, held)]
    if name is not None:
        if name not in OPTIMIZERS:
            raise ConvertError(
                f"Unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}."
            )
        if name not in fits:
            raise ConvertError(f"The optimizer state is not that of {name}: {keys}.")
        return name
    fits = [name for name in fits if not OPTIMIZERS[name].by_name_only]
    if set(fits) == {"Adam", "AdamW"}:
        return _adam_or_adamw(groups)
    if len(fits) == 1:
        return fits[0]
    what = "is of none of the known kinds"
    advice = (
        "leave it out with keys={'optimizer': ''} (--optimizer-key '', or the key "
        "of another one). It then goes back unchanged"
    )
    if fits:
        what = f"could be that of {' or '.join(fits)}"
        advice = "name one with optimizer=... (--optimizer)"
    raise ConvertError(
        f"The optimizer state {what}: {keys}. Known are {', '.join(OPTIMIZERS)}; "
        f"{advice}."
    )


def _fits(spec: OptimizerSpec, groups: Sequence[Group], held: set[str]) -> bool:
    extra = held - set(spec.slots) - {"step"}
    # amsgrad, centered and RMSprop's momentum add slots of their own; they are
    # refused later, by name.
    extra -= {"max_exp_avg_sq", "grad_avg"} | (
        {"momentum_buffer"} if "square_avg" in spec.slots else set()
    )
    missing = set(spec.slots) - held if held - {"step"} else set()
    return (
        not extra
        and not missing
        and all(spec.required <= set(g) and not spec.forbidden & set(g) for g in groups)
    )


def _adam_or_adamw(groups: Sequence[Group]) -> str:
    flags = [group.get("decoupled_weight_decay") for group in groups]
    if all(flag is True for flag in flags) or all(flag is False for flag in flags):
        return "AdamW" if flags[0] else "Adam"
    if all(not number(group.get("weight_decay", 0)) for group in groups):
        return "Adam"  # without weight decay they are the same
    raise ConvertError(
        "The optimizer state could be that of Adam or AdamW: it was written by a "
        "PyTorch that does not say which, and has weight decay. Name it with "
        "optimizer=... (--optimizer)."
    )


def torch_differences(
    name: str, group: Group, is_complete: bool = True
) -> list[Difference]:
    """Return what MLX would compute differently from a PyTorch group.

    The group is complete if every parameter has its state already.

    Example:
        >>> torch_differences("RMSprop", {"centered": True})[0].key
        'centered'
    """
    spec = OPTIMIZERS[name]
    found = [
        Difference(key, f"{name} has {key}={plain_setting(group[key])!r}: {text}.")
        for key, (off, text) in spec.refused.items()
        if plain_setting(group.get(key)) not in (*off, None)
    ]
    known = {*spec.settings, *spec.required, *spec.refused, *spec.ignored, *_COMMON}
    found += [
        Difference(
            key,
            f"The optimizer's groups have {key!r}, which PyTorch's {name} does not "
            "have: it may be another optimizer, and MLX ignores the key.",
        )
        for key in group
        if key not in known
    ]
    has_momentum = name == "SGD" and number(group.get("momentum", 0))
    dampening = number(group.get("dampening", 0)) if has_momentum else 0
    if dampening and (dampening < 0 or not is_complete):
        found.append(
            Difference(
                "dampening",
                f"SGD has dampening={dampening!r} and no momentum buffer yet: PyTorch "
                "starts it with the whole gradient, MLX with (1 - dampening) of it.",
            )
        )
    return found


def plain_setting(value: Any) -> Any:
    """Return a setting with Python numbers, a list as a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(map(number, value))
    return number(value)


def mlx_differences(
    name: str, settings: Mapping[str, Any], step: int
) -> list[Difference]:
    """Return what PyTorch would compute differently from an MLX optimizer.

    Example:
        >>> settings = {"class": "Adam", "bias_correction": False}
        >>> mlx_differences("Adam", settings, 3)[0].key
        'bias_correction'
    """
    spec = OPTIMIZERS[name]
    mine = spec.mlx.__name__
    if settings["class"] != mine:
        raise ConvertError(
            f"The MLX optimizer is {settings['class']}, and the PyTorch checkpoint "
            f"holds {name}: give a checkpoint of that optimizer as the template, or "
            "leave the optimizer out."
        )
    found = []
    if "bias_correction" in spec.forced and not settings.get("bias_correction", True):
        found.append(
            Difference(
                "bias_correction",
                f"MLX's {mine} ran without bias correction, which is its default, and "
                f"PyTorch's always corrects: next time build it as {mine}(..., "
                "bias_correction=True). If accepted, moments and step count stay, and "
                f"PyTorch's next update is {_correction(settings, step)} times MLX's, "
                "which goes to 1 with the steps.",
            )
        )
    if name == "Muon" and settings.get("weight_decay"):
        found.append(
            Difference(
                "weight_decay",
                f"MLX's Muon ran with weight_decay={settings['weight_decay']}, which "
                "it adds to the gradient; PyTorch's decays the weights directly.",
            )
        )
    return found


def _correction(settings: Mapping[str, Any], step: int) -> str:
    """Return the factor of Adam's bias correction after ``step`` steps."""
    try:
        first, second = settings.get("betas", (0.9, 0.999))
        change = (1 - second ** (step + 1)) ** 0.5 / (1 - first ** (step + 1))
        return f"{change:.3g}"
    except (ArithmeticError, TypeError, ValueError):  # betas of 1 and the like
        return "an unknown number of"


def check_differences(found: Iterable[Difference], accept: Iterable[str]) -> list[str]:
    """Raise on differences that were not accepted; return sentences on the others."""
    accepted = set(accept)
    found = list(dict.fromkeys(found))
    bad = [each for each in found if each.key not in accepted]
    if bad:
        keys = ", ".join(dict.fromkeys(each.key for each in bad))
        raise ConvertError(
            " ".join(each.text for each in bad) + " To convert all the same and "
            f"leave it out, accept it by name: {keys} (accept=..., --accept)."
        )
    return [each.text for each in found]


def check_accept(accept: Iterable[str], groups: Iterable[Group]) -> None:
    """Raise on an accepted word that is no setting of any group, nor of the table."""
    keys = {str(key) for group in groups for key in group} - {"params", "param_names"}
    for word in accept:
        if word not in keys | set(ACCEPTABLE):
            raise ConvertError(
                f"--accept {word}: there is no such setting; known are "
                f"{list_some(sorted(keys | set(ACCEPTABLE)), 40)}."
            )
