"""The MLX optimizer that computes what PyTorch's parameter groups compute."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .table import ROWS, number

# A learning rate as mlx.optimizers take it: a number, or a function of the step.
Rate = float | mx.array | Callable[[mx.array], mx.array]


def settings(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLX constructor arguments that compute what a PyTorch group computes.

    Args:
        name (str): A key of :data:`ROWS`.
        group (dict): One of ``param_groups``.

    Returns:
        dict: Plain Python numbers; a schedule, where MLX needs one, is not in it
        (see :func:`build`).

    Example:
        >>> settings("Adam", {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
        {'learning_rate': 0.1, 'betas': [0.9, 0.99], 'eps': 1e-08, \
'bias_correction': True}
    """
    row = ROWS[name]
    out = {}
    for theirs, ours in row.settings.items():
        if theirs not in group:
            raise ValueError(f"A parameter group of {name} has no {theirs!r}.")
        value = group[theirs]
        is_pair = isinstance(value, (tuple, list))
        out[ours] = [number(v) for v in value] if is_pair else number(value)
    return out | row.fixed


def build(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Iterable[str]] = (),
    learning_rate: Rate | Sequence[Rate] | None = None,
) -> optim.Optimizer:
    """Build the MLX optimizer that goes on where PyTorch's groups stopped.

    Args:
        name (str): A key of :data:`ROWS`.
        groups (list): PyTorch's ``param_groups``; several become a ``MultiOptimizer``.
        members (list): For several groups, the MLX parameter names of each.
        learning_rate (float, Callable or list, optional): A number or a schedule in
            the place of the groups' own, as ``mlx.optimizers`` take it. Groups whose
            rates differ need a list of them, one for each.

    Returns:
        optim.Optimizer: With a learning rate schedule where MLX needs one to
        compute the same (Adamax, Adagrad with lr_decay).

    Example:
        >>> build("Adam", [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]).betas
        [0.9, 0.99]
    """
    made = []
    for group, rate in zip(groups, _rates(groups, learning_rate), strict=True):
        arguments = settings(name, group)
        arguments["learning_rate"] = _for_mlx(_divided(name, group, rate))
        made.append(ROWS[name].mlx(**arguments))
    if len(made) == 1:
        return made[0]
    sets = [frozenset(names) for names in members]
    if len(sets) != len(made):
        raise ValueError("Several groups need the names of each group's parameters.")
    filters = [lambda path, _, mine=mine: path in mine for mine in sets[:-1]]
    return optim.MultiOptimizer(made, filters)


def scheduled_rate(name: str, group: Mapping[str, Any], step: int) -> mx.array:
    """Return the rate in the MLX state after ``step`` steps, as MLX holds it.

    Example:
        >>> scheduled_rate("SGD", {"lr": 0.5}, 3).item()
        0.5
    """
    rate = _divided(name, group, number(group["lr"]))
    if not callable(rate):
        return mx.array(rate, mx.float32)
    # The state holds the rate of the last step done.
    return rate(mx.array(max(step - 1, 0), mx.uint64)).astype(mx.float32)


def _rates(
    groups: Sequence[Mapping[str, Any]], given: Rate | Sequence[Rate] | None
) -> list[Rate]:
    own: list[Rate] = [number(group["lr"]) for group in groups]
    if given is None:
        return own
    # In a warmup's first step all rates are 0, and only these tell the groups apart.
    initial: list[Rate] = [
        number(group.get("initial_lr", group["lr"])) for group in groups
    ]
    if isinstance(given, (list, tuple)):
        if len(given) != len(groups):
            raise ValueError(
                f"learning_rate has {len(given)} entries and the MLX optimizer "
                f"{len(groups)} parts: one for each parameter group, where groups with "
                "equal settings are one part."
            )
        return [_checked(rate) for rate in given]
    for rates in (own, initial):
        if len(set(rates)) > 1:
            raise ValueError(
                f"The parameter groups have different learning rates ({rates}): give "
                "learning_rate as a list, a number or schedule for each in this order."
            )
    return [_checked(given)] * len(groups)


def _checked(rate: Any) -> Rate:
    is_number = isinstance(rate, (Real, mx.array)) and not isinstance(rate, bool)
    if not is_number and not callable(rate):
        raise TypeError(
            "learning_rate must be a number, or a function from the step count to "
            f"one, got {rate!r}."
        )
    checked: Rate = rate
    return checked


@dataclass(frozen=True)
class Divided:
    """A schedule: a learning rate by what MLX must divide it by (``Row.divisor``)."""

    rate: Rate
    divisor: Callable[[mx.array], mx.array]

    @property
    def is_constant(self) -> bool:
        """Whether the rate itself is not a schedule."""
        return not callable(self.rate)

    def __call__(self, step: mx.array) -> mx.array:
        rate = self.rate(step) if callable(self.rate) else self.rate
        return rate / self.divisor(step)


def _for_mlx(rate: Rate) -> Rate:
    first = rate(mx.array(0, mx.uint64)) if callable(rate) else mx.array(rate)
    if not isinstance(first, mx.array):
        raise TypeError(
            "A learning rate schedule must return an mx.array, which mlx.optimizers "
            f"need; this one returned {first!r}."
        )
    return rate


def _divided(name: str, group: Mapping[str, Any], rate: Rate) -> Rate:
    divisor = ROWS[name].divisor(group)
    return rate if divisor is None else Divided(rate, divisor)
