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
        weights (dict or None): MLX's flat weights; None where there is no model.
        optimizer (dict or None): ``tree_flatten(optimizer.state)`` as a dict, or None.
        scaler (dict or None): A ``GradScaler.state_dict``, or None.
        record (Record): All that only PyTorch knows, for the way back.
        notes (list): Sentences for the user.
        runs (dict): Where the checkpoint holds several models, a run for each; then
            only ``record`` and ``notes`` are there beside it.
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
        choices (Choices): Names and layouts.
        keys (dict): Section -> its place (see ``sections.find_sections``).
        optimizer (str or None): The PyTorch optimizer's class name.
        accept (tuple): Differences between the optimizers to convert in spite of.
        names (tuple or None): The parameters' PyTorch names in the optimizer's order.
        step (int or None): The step count, for optimizers that keep none.
        scaler_format (str or None): A key of :data:`mlx_gradscale.formats.FORMATS`.
    """

    choices: Choices = field(default_factory=Choices)
    keys: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accept: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    step: int | None = None
    scaler_format: str | None = None
