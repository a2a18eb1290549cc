"""Which PyTorch optimizer a state came from, and what the other side does otherwise."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .table import ROWS, Row, number

# What is refused until it is accepted.
ACCEPTED = tuple(
    sorted(
        {key for row in ROWS.values() for key in row.refused}
        | {"bias_correction", "dampening"}
    )
)


class OptimizerMismatch(ValueError):
    """MLX's and PyTorch's optimizer would compute different things."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on the other side.

    Attributes:
        key (str): The setting to accept, to convert in spite of it.
        text (str): The sentence that says what differs.
    """

    key: str
    text: str


def recognise(state_dict: Mapping[str, Any], name: str | None = None) -> str:
    """Name the PyTorch optimizer a state dict came from.

    A state dict does not hold its class: the keys of its groups and of its state
    tell it.

    Args:
        state_dict (dict): With ``"state"`` and ``"param_groups"``.
        name (str, optional): The class name, where it is known; it is checked.

    Returns:
        str: A key of :data:`ROWS`.

    Example:
        >>> group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0,
        ...          "nesterov": False, "params": []}
        >>> recognise({"state": {}, "param_groups": [group]})
        'SGD'
    """
    groups = state_dict["param_groups"]
    if not groups:
        raise ValueError("The optimizer state has no parameter groups.")
    if name is not None and name not in ROWS:
        raise ValueError(f"Unknown optimizer {name!r}: one of {', '.join(ROWS)}.")
    held = {key for state in state_dict["state"].values() for key in state}
    fits = [each for each, row in ROWS.items() if _fits(row, groups, held)]
    if name is not None:
        if name not in fits:
            raise ValueError(
                f"The optimizer state is not that of {name}: its groups have "
                f"{sorted(groups[0])} and its state has {sorted(held)}."
            )
        return name
    if set(fits) == {"Adam", "AdamW"}:
        return _adam_or_adamw(groups)
    if fits == ["Adamax"] and "exp_inf" not in held:
        _refuse_radam(groups)
    if len(fits) == 1:
        return fits[0]
    if fits:
        what = f"could be {' or '.join(fits)}"
        what_to_do = "name one with optimizer=... (--optimizer)"
    else:
        what = "is of none of the known kinds"
        what_to_do = (
            "any other is left out, and kept for the way back, with "
            "keys={'optimizer': ''} (--optimizer-key '')"
        )
    raise ValueError(
        f"The optimizer state {what}: its groups have {sorted(groups[0])} and its "
        f"state has {sorted(held)}. Known are {', '.join(ROWS)}; {what_to_do}."
    )


def _fits(row: Row, groups: list[Mapping[Any, Any]], held: set[str]) -> bool:
    extra = held - set(row.slots) - {"step"}
    # amsgrad, centered and RMSprop's momentum add slots of their own; they are
    # refused later, by name.
    extra -= {"max_exp_avg_sq", "grad_avg"} | (
        {"momentum_buffer"} if "square_avg" in row.slots else set()
    )
    missing = set(row.slots) - held if held - {"step"} else set()
    return (
        not extra
        and not missing
        and all(row.marks <= set(g) and not row.absent & set(g) for g in groups)
    )


def _adam_or_adamw(groups: list[Mapping[Any, Any]]) -> str:
    flags = {group.get("decoupled_weight_decay") for group in groups}
    if flags <= {True, False} and len(flags) == 1:
        return "AdamW" if flags.pop() else "Adam"
    if all(not number(group.get("weight_decay", 0)) for group in groups):
        return "Adam"  # without weight decay they are the same
    raise ValueError(
        "The optimizer state could be Adam's or AdamW's: it was written by a PyTorch "
        "that does not say which, and has weight decay. Name it with optimizer=... "
        "(--optimizer)."
    )


def _refuse_radam(groups: list[Mapping[Any, Any]]) -> None:
    # Adamax has "maximize" since PyTorch 1.12; RAdam has it since 2.4, but since 2.2
    # it has "decoupled_weight_decay", which Adamax does not have.
    if not all("maximize" in group for group in groups):
        raise ValueError(
            "The optimizer state could be Adamax's, or RAdam's of a PyTorch before "
            "2.2: before the first step nothing tells them apart. Adamax is named with "
            "optimizer='Adamax' (--optimizer Adamax); RAdam, which MLX does not "
            "have, is left out with keys={'optimizer': ''} (--optimizer-key '')."
        )


def differences(
    name: str, group: Mapping[str, Any], complete: bool = True
) -> list[Difference]:
    """Return what MLX would compute differently from a PyTorch group.

    Args:
        name (str): A key of :data:`ROWS`.
        group (dict): One of ``param_groups``.
        complete (bool): Whether every parameter of the group has its state already.

    Returns:
        list: Empty where both compute the same.

    Example:
        >>> differences("RMSprop", {"centered": True})[0].key
        'centered'
    """
    row = ROWS[name]
    found = [
        Difference(key, f"{name} has {key}={number(group[key])!r}: {text}.")
        for key, (off, text) in row.refused.items()
        if number(group.get(key)) not in (off, None)
    ]
    found += [
        Difference(
            key,
            f"The optimizer's groups have {key!r}, which PyTorch's {name} does "
            "not have: it may be another optimizer, and MLX leaves what the key "
            "means out.",
        )
        for key in row.unknown(group)
    ]
    has_momentum = name == "SGD" and number(group.get("momentum", 0))
    dampening = number(group.get("dampening", 0)) if has_momentum else 0
    if dampening and (dampening < 0 or not complete):
        found.append(Difference(
            "dampening",
            f"SGD has dampening={dampening!r} and no momentum buffer yet: PyTorch "
            "starts the buffer with the whole gradient, MLX with (1 - dampening) of "
            "it.",
        ))  # fmt: skip
    return found


def mlx_differences(
    name: str, used: Mapping[str, Any], step: int = 0
) -> list[Difference]:
    """Return what PyTorch would compute differently from an MLX optimizer.

    Args:
        name (str): A key of :data:`ROWS`.
        used (dict): The settings the MLX optimizer ran with.
        step (int): How many steps it made.

    Returns:
        list: Empty where both compute the same.

    Example:
        >>> mlx_differences("Adam", {"bias_correction": False})[0].key
        'bias_correction'
    """
    found = []
    mine = ROWS[name].mlx.__name__
    if used.get("class", mine) != mine:
        raise OptimizerMismatch(
            f"The MLX run used {used['class']}, the PyTorch checkpoint holds {name}."
        )
    if ROWS[name].fixed and not used.get("bias_correction", True):
        found.append(Difference(
            "bias_correction",
            f"MLX's {name} ran without bias correction, which is its default, and "
            f"PyTorch's always corrects: next time build it as {mine}(..., "
            "bias_correction=True). If this is accepted, moments and step count stay, "
            f"and PyTorch's next update is {_correction(used, step):.3g} times MLX's, "
            "which goes to 1 with the steps.",
        ))  # fmt: skip
    if name == "Adamax" and not used.get("schedule", True):
        found.append(Difference(
            "bias_correction",
            "MLX's Adamax ran with a constant learning rate and PyTorch's divides it "
            "by 1 - beta1**step: build it with mlx_gradscale.convert.optimizers.build.",
        ))  # fmt: skip
    return found


def _correction(used: Mapping[str, Any], step: int) -> float:
    """Return the factor of Adam's bias correction after ``step`` steps."""
    first, second = used.get("betas", (0.9, 0.999))
    change: float = (1 - second ** (step + 1)) ** 0.5 / (1 - first ** (step + 1))
    return change


def check(found: Iterable[Difference], accept: Iterable[str] = ()) -> list[str]:
    """Raise on differences that were not accepted; return the accepted ones.

    Args:
        found (Iterable): From :func:`differences` or :func:`mlx_differences`.
        accept (Iterable): Keys to convert in spite of; the setting is then left out.

    Returns:
        list: A sentence for each accepted difference.

    Raises:
        OptimizerMismatch: With all sentences, and how to accept them.
    """
    accept = set(accept)
    found = list(dict.fromkeys(found))
    bad = [each for each in found if each.key not in accept]
    if bad:
        keys = ", ".join(dict.fromkeys(each.key for each in bad))
        raise OptimizerMismatch(
            " ".join(each.text for each in bad) + " To convert all the same and "
            f"leave it out, accept it by name: {keys} (accept=..., --accept)."
        )
    return [each.text for each in found]


def check_accepted(accept: Iterable[str], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise on a word to accept that is not a setting: it would be a typing error.

    Args:
        accept (Iterable): The words.
        groups (Iterable): The optimizer's; their keys are settings, too.
    """
    keys = {str(key) for group in groups for key in group} - {"params", "param_names"}
    known = sorted({*ACCEPTED, *keys})
    for word in accept:
        if word not in known:
            raise ValueError(
                f"--accept {word}: there is no such setting; known are "
                f"{', '.join(known)}."
            )
