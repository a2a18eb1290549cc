"""PyTorch's parameter groups, with what the MLX optimizer runs with now."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .builder import scheduled_rate, settings
from .compare import Difference, mlx_differences
from .record import OptimizerRecord
from .table import ROWS, number


def torch_groups(
    flat: Mapping[str, mx.array],
    record: OptimizerRecord,
    used: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[dict[str, Any]], list[Difference], list[str]]:
    """Return PyTorch's parameter groups with what the MLX optimizer runs with.

    Args:
        flat (dict): ``tree_flatten(optimizer.state)`` as a dict.
        record (OptimizerRecord): From :func:`to_mlx`.
        used (list, optional): The settings the MLX optimizer(s) ran with, if they are
            known.

    Returns:
        tuple: The groups, what PyTorch would compute differently, and sentences for
        the user.
    """
    name = record.name
    _check_count(flat, record)
    groups: list[dict[str, Any]] = []
    found: list[Difference] = []
    rates: list[str] = []
    for i, group in enumerate(record.groups):
        prefix = record.prefix(i)
        step = number(required(flat, f"{prefix}step"))
        held = number(required(flat, f"{prefix}learning_rate"))
        group = dict(group)
        mine = dict(used[0 if record.joined else i]) if used else settings(name, group)
        found += mlx_differences(name, mine, step)
        group.update(_group_settings(name, group, mine))
        group["lr"] = _learning_rate(name, group, mine, step, held)
        if has_schedule(mine):
            rates.append(f"{number(group['lr']):.6g}")
        groups.append(group)
    note = (
        "MLX's learning rate schedule is not converted: PyTorch gets its rate for the "
        f"next step, {', '.join(dict.fromkeys(rates))}."
    )
    return groups, found, [note] if rates else []


def has_schedule(used: Mapping[str, Any]) -> bool:
    """Tell whether a learning rate changed by more than the optimizer's own divisor.

    Args:
        used (dict): The settings the MLX optimizer ran with.

    Example:
        >>> has_schedule({"class": "SGD", "schedule": True})
        True
    """
    return bool(used.get("schedule")) and not used.get("constant", False)


def _check_count(flat: Mapping[str, mx.array], record: OptimizerRecord) -> None:
    # Only a MultiOptimizer has no step of its own.
    count = 0
    while "step" not in flat and f"states.{count}.step" in flat:
        count += 1
    wanted = 0 if record.joined else len(record.groups)
    if count != wanted:
        raise ValueError(
            f"The MLX state is that of {f'{count} optimizers' if count else 'one'}, "
            f"but PyTorch's {len(record.groups)} parameter groups need "
            f"{'a MultiOptimizer with one each' if wanted else 'one for all'}."
        )


def required(flat: Mapping[str, mx.array], key: str) -> mx.array:
    """Return a value of a flat state, or raise an error that says it is not there."""
    if key not in flat:
        raise ValueError(
            f"The MLX optimizer state has no {key!r}: save all of "
            "tree_flatten(optimizer.state), after optimizer.init or a step."
        )
    return flat[key]


def _group_settings(
    name: str, group: Mapping[str, Any], used: Mapping[str, Any]
) -> dict[str, Any]:
    out = {}
    for theirs, ours in ROWS[name].settings.items():
        if theirs != "lr" and ours in used:
            value = used[ours]
            is_pair = isinstance(value, (list, tuple))
            out[theirs] = type(group[theirs])(value) if is_pair else value
    return out


def _learning_rate(
    name: str, group: Mapping[str, Any], used: Mapping[str, Any], step: int, held: float
) -> Any:
    """Return PyTorch's own (float64) rate while MLX's float32 one is its rounding.

    Where there is a schedule, MLX's state holds the rate of the last step, PyTorch's
    groups that of the next, which is in the settings used.
    """
    lr, divisor = group["lr"], ROWS[name].divisor(group)
    if used.get("schedule") and "learning_rate" in used:
        held, step = used["learning_rate"], step + 1
    # Not every bit: a schedule may have run on another device, or compiled.
    scheduled = number(scheduled_rate(name, group, step))
    if math.isclose(scheduled, held, rel_tol=1e-6):
        return lr
    if divisor is not None and used.get("schedule", True):
        held *= number(divisor(max(step - 1, 0)))
    return mx.array(held, lr.dtype) if isinstance(lr, mx.array) else held
