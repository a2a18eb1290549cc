"""What of a PyTorch optimizer's state only PyTorch knows, for the way back."""

from dataclasses import dataclass, field
from typing import Any

Index = int | str


@dataclass
class OptimizerRecord:
    """How a PyTorch optimizer's state looked.

    Attributes:
        name: a key of :data:`ROWS`.
        joined: whether all groups became one MLX optimizer.
        groups: PyTorch's own.
        indices: of the converted parameters, for each group.
        names: of the same, in PyTorch.
        unplaced: index -> state of the parameters that MLX has no place for.
        steps: the count of each group.
        step_like: how PyTorch wrote its counts.
        fresh: parameters that had no state yet, and what they had.
        extra: what its dict held besides.
        flat: whether torch.distributed had flattened it.
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
        """How the MLX state of a group begins."""
        return "" if self.joined else f"states.{group}."
