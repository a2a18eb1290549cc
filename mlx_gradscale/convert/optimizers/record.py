"""What of a PyTorch optimizer's state only PyTorch knows, for the way back."""

from dataclasses import dataclass, field
from typing import Any

Index = int | str


@dataclass
class OptimizerRecord:
    """How a PyTorch optimizer's state looked.

    Attributes:
        name (str): A key of :data:`ROWS`.
        joined (bool): Whether all groups became one MLX optimizer.
        groups (list): PyTorch's own.
        indices (list): Of the converted parameters, for each group.
        names (list): Of the same, in PyTorch.
        unplaced (dict): Index -> state of the parameters that MLX has no place for.
        steps (list): The count of each group.
        step_like (str): How PyTorch wrote its counts.
        fresh (dict): Parameters that had no state yet, and what they had.
        extra (dict): What its dict held besides.
        flat (bool): Whether torch.distributed had flattened it.
    """

    name: str
    joined: bool
    groups: list[dict[str, Any]]
    indices: list[list[Index]]
    names: list[list[str]]
    unplaced: dict[Index, dict[str, Any]]
    steps: list[int]
    step_like: str
    fresh: dict[str, dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    flat: bool = False

    def prefix(self, group: int) -> str:
        """Return how the MLX state of a group begins."""
        return "" if self.joined else f"states.{group}."
