"""The MLX optimizer that computes what PyTorch's parameter groups compute."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from .table import ROWS, number


def settings(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """MLX constructor arguments that compute what a PyTorch group computes.

    Args:
        name: a key of :data:`ROWS`.
        group: one of ``param_groups``.

    Returns:
        dict: plain Python numbers; a schedule, where MLX needs one, is not in it
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
    name: str, groups: list[Mapping[str, Any]], members: list[Iterable[str]] = ()
) -> optim.Optimizer:
    """Builds the MLX optimizer that goes on where PyTorch's groups stopped.

    Args:
        name: a key of :data:`ROWS`.
        groups: PyTorch's ``param_groups``; several become a ``MultiOptimizer``.
        members: for several groups, the MLX parameter names of each.

    Returns:
        optim.Optimizer: with a learning rate schedule where MLX needs one to
        compute the same (Adamax, Adagrad with lr_decay).

    Example:
        >>> build("Adam", [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]).betas
        [0.9, 0.99]
    """
    made = []
    for group in groups:
        arguments = settings(name, group)
        schedule = ROWS[name].schedule(group)
        if schedule is not None:
            arguments["learning_rate"] = schedule
        made.append(ROWS[name].mlx(**arguments))
    if len(made) == 1:
        return made[0]
    sets = [frozenset(names) for names in members]
    if len(sets) != len(made):
        raise ValueError("Several groups need the names of each group's parameters.")
    filters = [lambda path, _, mine=mine: path in mine for mine in sets[:-1]]
    return optim.MultiOptimizer(made, filters)


def scheduled_rate(name: str, group: Mapping[str, Any], step: int) -> mx.array:
    """The learning rate in the MLX state after ``step`` steps, as MLX holds it.

    Example:
        >>> scheduled_rate("SGD", {"lr": 0.5}, 3).item()
        0.5
    """
    schedule = ROWS[name].schedule(group)
    if schedule is None:
        return mx.array(number(group["lr"]), mx.float32)
    # The state holds the rate of the last step done.
    return schedule(mx.array(max(step - 1, 0), mx.uint64)).astype(mx.float32)
