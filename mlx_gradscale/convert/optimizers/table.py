"""PyTorch's optimizers and MLX's, as one table: names, settings, differences.

Each row was checked against both sources (torch 2.13, mlx 0.32.4) and is run
against both in the tests. Where MLX computes something else than PyTorch, the
row says so: either MLX does the same when built in a certain way (``fixed``,
``divisor``), or the setting is refused (``refused``) until it is accepted by
name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.optimizers as optim

Group = Mapping[str, Any]


def number(value: Any) -> Any:
    """Return a Python number from a number or a one-element array."""
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        mlx (type): MLX's class.
        slots (dict): PyTorch's state name -> MLX's.
        settings (dict): PyTorch's group key -> MLX's constructor argument.
        marks (frozenset): Group keys it always has; with ``absent`` they tell it from
            others.
        absent (frozenset): Group keys it never has.
        refused (dict): Group key -> (the value that turns it off, what differs).
        fixed (dict): Constructor arguments under which MLX computes the same.
        divisor (Callable): (group) -> a function of the step by which MLX's learning
            rate must be divided to compute the same, or None.
        counts (bool): Whether PyTorch keeps a step count.
        notes (tuple): Sentences to tell the user in any case.
        carried (frozenset): Further group keys that change nothing in MLX; they come
            back as they were.
        doubt (Callable): (group) -> a sentence on what its keys do not tell, or None.
    """

    mlx: type[optim.Optimizer]
    slots: dict[str, str]
    settings: dict[str, str]
    marks: frozenset[str]
    absent: frozenset[str]
    refused: dict[str, tuple[Any, str]]
    fixed: dict[str, Any] = field(default_factory=dict)
    divisor: Callable[[Group], Callable[..., Any] | None] = lambda group: None
    counts: bool = True
    notes: tuple[str, ...] = ()
    carried: frozenset[str] = frozenset()
    doubt: Callable[[Group], str | None] = lambda group: None

    def unknown(self, group: Group) -> list[str]:
        """Return group keys that are none of this optimizer's: a subclass's, say."""
        known = {*self.settings, *self.marks, *self.refused, *self.carried, *_CARRIED}
        return [key for key in group if key not in known]


# What the schedules of torch.optim.lr_scheduler note in the groups.
SCHEDULED = frozenset({
    *("initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum")
})  # fmt: skip
# What torch.optim's groups of 1.6 to 2.13 hold besides the settings of the rule: how
# it is computed, and what schedules note.
_CARRIED = SCHEDULED | {
    *("params", "param_names", "name"),
    *("foreach", "capturable", "differentiable", "fused"),
}
_L2 = "PyTorch adds weight_decay * w to the gradient (L2); MLX's {} has no such term"
_MAXIMIZE = {
    "maximize": (False, "MLX only minimizes: negate the loss and set maximize to False")
}


def _l2(name: str) -> dict[str, tuple[Any, str]]:
    return {"weight_decay": (0, _L2.format(name))} | _MAXIMIZE


def _adagrad_divisor(group: Group) -> Callable[..., Any] | None:
    decay = number(group.get("lr_decay", 0))
    # MLX asks with the steps done, which is the (step - 1) of PyTorch's formula.
    return (lambda step: 1 + decay * step) if decay else None


def _adamax_divisor(group: Group) -> Callable[..., Any]:
    beta = number(group["betas"][0])
    return lambda step: 1 - beta ** (step + 1)


def _lion_doubt(group: Group) -> str | None:
    # lion_pytorch keeps the switch in the object; timm's groups have more keys.
    decay, rate = number(group["weight_decay"]), number(group["lr"])
    if not decay or "maximize" in group:
        return None
    first = number(group.get("initial_lr", rate))
    other = f" ({decay / first:.6g})" if first else ""
    return (
        "Lion: its state does not tell whether it is lion_pytorch's with "
        "decoupled_weight_decay=True, which divides the weight decay by the first "
        f"learning rate. If so, set the MLX optimizer's weight_decay to that{other}."
    )


_ADAM_REFUSED = {
    "amsgrad": (
        False,
        "amsgrad divides by the largest second moment so far, which MLX's Adam does "
        "not keep",
    )
} | _MAXIMIZE
_ADAM: dict[str, Any] = {
    "slots": {"exp_avg": "m", "exp_avg_sq": "v"},
    "marks": frozenset({"betas", "eps", "amsgrad"}),
    "absent": frozenset({"momentum_decay"}),
    "fixed": {"bias_correction": True},
    "carried": frozenset({"decoupled_weight_decay"}),
}

ROWS: dict[str, Row] = {
    "Adam": Row(
        optim.Adam,
        settings={"lr": "learning_rate", "betas": "betas", "eps": "eps"},
        refused=_ADAM_REFUSED | _l2("Adam"),
        **_ADAM,
    ),
    "AdamW": Row(
        optim.AdamW,
        settings={
            "lr": "learning_rate",
            "betas": "betas",
            "eps": "eps",
            "weight_decay": "weight_decay",
        },
        refused=_ADAM_REFUSED,
        **_ADAM,
    ),
    "SGD": Row(
        optim.SGD,
        slots={"momentum_buffer": "v"},
        settings={
            "lr": "learning_rate",
            "momentum": "momentum",
            "weight_decay": "weight_decay",
            "dampening": "dampening",
            "nesterov": "nesterov",
        },
        marks=frozenset({"momentum", "dampening", "nesterov"}),
        absent=frozenset(),
        refused=_MAXIMIZE,
        counts=False,
    ),
    "RMSprop": Row(
        optim.RMSprop,
        slots={"square_avg": "v"},
        settings={"lr": "learning_rate", "alpha": "alpha", "eps": "eps"},
        marks=frozenset({"alpha", "centered", "momentum"}),
        absent=frozenset(),
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
    "Adagrad": Row(
        optim.Adagrad,
        slots={"sum": "v"},
        settings={"lr": "learning_rate", "eps": "eps"},
        marks=frozenset({"lr_decay", "eps", "initial_accumulator_value"}),
        absent=frozenset(),
        refused=_l2("Adagrad"),
        divisor=_adagrad_divisor,
    ),
    "Adadelta": Row(
        optim.AdaDelta,
        slots={"square_avg": "v", "acc_delta": "u"},
        settings={"lr": "learning_rate", "rho": "rho", "eps": "eps"},
        marks=frozenset({"rho", "eps"}),
        absent=frozenset(),
        refused=_l2("AdaDelta"),
    ),
    "Adamax": Row(
        optim.Adamax,
        slots={"exp_avg": "m", "exp_inf": "v"},
        settings={"lr": "learning_rate", "betas": "betas", "eps": "eps"},
        marks=frozenset({"betas", "eps", "weight_decay"}),
        absent=frozenset({"amsgrad", "decoupled_weight_decay", "momentum_decay"}),
        refused=_l2("Adamax"),
        divisor=_adamax_divisor,
        notes=(
            "Adamax: PyTorch adds eps to |g| inside the maximum, MLX to the "
            "denominator; updates differ by a factor of at most 1 + eps / v.",
        ),
    ),
    # The layout that google/automl, lion-pytorch and timm share: one exp_avg.
    "Lion": Row(
        optim.Lion,
        slots={"exp_avg": "m"},
        settings={
            "lr": "learning_rate",
            "betas": "betas",
            "weight_decay": "weight_decay",
        },
        marks=frozenset({"betas", "weight_decay"}),
        absent=frozenset({"eps"}),
        refused={
            "caution": (False, "MLX's Lion has no cautious masking"),
            "cautious_factor": (1, "MLX's Lion has no cautious masking"),
            "corrected_weight_decay": (False, "MLX's Lion decays by lr * weight_decay"),
        }
        | _MAXIMIZE,
        counts=False,
        doubt=_lion_doubt,
    ),
}
