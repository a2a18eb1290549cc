"""Names and layouts: where each PyTorch tensor is in the MLX model."""

from .choices import Choices
from .kinds import LAYOUTS, LayoutError
from .plan import Entry, Plan
from .planner import make_plan

__all__ = ["LAYOUTS", "Choices", "Entry", "LayoutError", "Plan", "make_plan"]
