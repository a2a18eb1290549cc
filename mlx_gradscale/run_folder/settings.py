"""What an optimizer computes with, besides its state: for checks and for the record."""

from typing import Any

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..guard import schedules, single_optimizers


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return class, schedules and plain attributes of each part.

    Example:
        >>> import mlx.optimizers as optim
        >>> settings(optim.Lion(0.1, betas=(0.8, 0.9)))[0]["values"]
        {'betas': [0.8, 0.9], 'weight_decay': 0.0}
    """
    return [
        {
            "class": type(part).__name__,
            "schedules": sorted(schedules(part)),
            "values": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in sorted(vars(part).items())
                if not name.startswith("_") and _is_plain(value)
            },
        }
        for part in single_optimizers(optimizer)
    ]


def used_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what each part ran with, and with a schedule its next learning rate.

    Example:
        >>> import mlx.optimizers as optim
        >>> used_settings(optim.Lion(0.1, betas=[0.8, 0.9]))
        [{'class': 'Lion', 'betas': [0.8, 0.9], 'weight_decay': 0.0, 'schedule': False}]
    """
    used = []
    for part, found in zip(
        single_optimizers(optimizer), settings(optimizer), strict=True
    ):
        schedule = schedules(part).get("learning_rate")
        row = {"class": found["class"], **found["values"]}
        if schedule is not None:
            # The state holds the rate of the last step, PyTorch that of the next.
            row["learning_rate"] = next_rate(part).item()
            row["constant"] = getattr(schedule, "is_constant", False)
        used.append(row | {"schedule": schedule is not None})
    return used


def next_rate(optimizer: Optimizer) -> mx.array:
    """Return the learning rate of the step that comes."""
    schedule = schedules(optimizer).get("learning_rate")
    return mx.array(schedule(optimizer.step)) if schedule else optimizer.learning_rate


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
