"""A training run in MLX's terms, and what the user says about its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .layouts import Choices
from .record import Record


@dataclass
class Run:
    """A training run in MLX's terms.

    Attributes:
        weights: MLX's flat weights; None where there is no model.
        optimizer: ``tree_flatten(optimizer.state)`` as a dict, or None.
        scaler: a ``GradScaler.state_dict``, or None.
        record: all that only PyTorch knows, for the way back.
        notes: sentences for the user.
        runs: where the checkpoint holds several models, a run for each; then only
            ``record`` and ``notes`` are there beside it.
    """

    weights: dict[str, mx.array] | None = None
    optimizer: dict[str, mx.array] | None = None
    scaler: dict[str, Any] | None = None
    record: Record = field(default_factory=Record)
    notes: list[str] = field(default_factory=list)
    runs: dict[str, "Run"] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What the user says about a checkpoint.

    Attributes:
        choices: names and layouts.
        keys: section -> its place (see ``sections.find_sections``).
        optimizer: the PyTorch optimizer's class name.
        accept: differences between the optimizers to convert in spite of.
        names: the parameters' PyTorch names in the optimizer's order.
        step: the step count, for optimizers that keep none.
        scaler_format: a key of :data:`mlx_gradscale.formats.FORMATS`.
    """

    choices: Choices = field(default_factory=Choices)
    keys: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accept: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    step: int | None = None
    scaler_format: str | None = None
