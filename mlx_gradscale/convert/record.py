"""All that only PyTorch knows of a run, and how ``training.json`` holds it."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from ..run_folder.live import USED
from ..run_folder.rounding import Rounded
from .layouts import Entry, Plan
from .optimizers.record import OptimizerRecord
from .schema import check_training


@dataclass
class ModelRecord:
    """How a PyTorch model's state dict looked.

    Attributes:
        order (list): Its names.
        entries (dict): Of its plan.
        tied (dict): Of its plan.
        unplaced (dict): What MLX has no place for, with its values.
        ordered (bool): Whether it was an ``OrderedDict``.
        metadata (Any): What ``torch.nn.Module.state_dict`` hangs on it, the versions of
            its modules.
    """

    order: list[str]
    entries: dict[str, Entry]
    tied: dict[str, str]
    unplaced: dict[str, Any]
    ordered: bool
    metadata: Any

    @classmethod
    def of(cls, tensors: Mapping[str, mx.array], plan: Plan) -> "ModelRecord":
        """Return the record of a state dict."""
        return cls(
            list(tensors),
            plan.entries,
            plan.tied,
            {name: tensors[name] for name in plan.unplaced},
            isinstance(tensors, OrderedDict),
            getattr(tensors, "_metadata", None),
        )

    @property
    def plan(self) -> Plan:
        """Where its tensors are in MLX."""
        return Plan(self.entries, self.tied, tuple(self.unplaced))

    def state_dict(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the state dict of MLX weights, as it looked."""
        found = {**self.plan.to_torch(weights), **self.unplaced}
        out = OrderedDict((name, found[name]) for name in self.order)
        if not self.ordered:
            return dict(out)
        if self.metadata is not None:
            out.__dict__["_metadata"] = self.metadata
        return out


@dataclass
class Record:
    """All that only PyTorch knows of a run, for the way back.

    Attributes:
        checkpoint (Any): The checkpoint with a mark in the place of each section; None
            for a run that was born in MLX. Epoch and so on are in it.
        model (ModelRecord or None): How its state dict looked, if there is one.
        optimizer (OptimizerRecord or None): How its state looked, if there is one.
        scaler_format (str or None): A key of :data:`mlx_gradscale.formats.FORMATS`, if
            there is one.
        used (list or None): The settings that the MLX optimizers ran with, if that is
            known.
        is_folder (bool): Whether the checkpoint was a folder.
        carried (dict): File -> its bytes, of a folder's files that are not sections.
        shards (dict): Index -> what was in which file of a model.
        rounded (Rounded or None): Of a live run only.
        is_pattern (bool): Whether it is that of another run (``--like``).
        moved (tuple): Entries of the checkpoint that were brought to the run's own
            step.
    """

    checkpoint: Any = None
    model: ModelRecord | None = None
    optimizer: OptimizerRecord | None = None
    scaler_format: str | None = None
    used: list[dict[str, Any]] | None = None
    is_folder: bool = False
    carried: dict[str, mx.array] = field(default_factory=dict)
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounded: Rounded | None = None
    is_pattern: bool = False
    moved: tuple[str, ...] = ()

    def to_training(self) -> dict[str, Any]:
        """Return what ``training.json`` holds of it.

        Example:
            >>> Record({"epoch": 3}, scaler_format="torch").to_training()
            {'checkpoint': {'epoch': 3}, 'scaler': {'format': 'torch'}}
        """
        model = self.model and vars(self.model) | {
            "entries": {
                name: {"mlx": list(entry.mlx), "layout": entry.layout}
                for name, entry in self.model.entries.items()
            }
        }
        out = {
            "checkpoint": self.checkpoint,
            "model": model,
            "optimizer": self.optimizer and dict(vars(self.optimizer)),
            "scaler": self.scaler_format and {"format": self.scaler_format},
            USED: self.used,
            "folder": self.is_folder or None,
            "carried": self.carried or None,
            "shards": self.shards or None,
        }
        return {key: value for key, value in out.items() if value is not None}

    @classmethod
    def of_training(cls, training: Mapping[str, Any], runs: int = 0) -> "Record":
        """Return the record in ``training.json``, checked.

        Args:
            training (dict): As decoded; what else is there belongs to others.
            runs (int): How many the folder holds, if several.

        Raises:
            RunError: It could not be used.

        Example:
            >>> Record.of_training({"checkpoint": {"epoch": 3}}).checkpoint
            {'epoch': 3}
        """
        check_training(training, runs)
        model, optimizer = training.get("model"), training.get("optimizer")
        if model is not None:
            entries = {
                name: Entry(name, tuple(entry["mlx"]), entry["layout"])
                for name, entry in model["entries"].items()
            }
            model = ModelRecord(**_known(ModelRecord, model) | {"entries": entries})
        if optimizer is not None:
            optimizer = OptimizerRecord(**_known(OptimizerRecord, optimizer))
        return cls(
            training.get("checkpoint"),
            model,
            optimizer,
            training["scaler"]["format"] if "scaler" in training else None,
            training.get(USED),
            training.get("folder", False),
            training.get("carried", {}),
            training.get("shards", {}),
        )


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}
