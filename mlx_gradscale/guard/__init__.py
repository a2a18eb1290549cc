"""Apply any ``mlx.optimizers`` optimizer to a tree, or leave everything as it was."""

from .fitting import fitting_parameters
from .initialization import initialize
from .mlx_optimizers import is_emptied, is_initialized, schedules, single_optimizers
from .step import PlannedStep, guarded_apply, planned_step, unscale

__all__ = [
    "PlannedStep",
    "fitting_parameters",
    "guarded_apply",
    "initialize",
    "is_emptied",
    "is_initialized",
    "planned_step",
    "schedules",
    "single_optimizers",
    "unscale",
]
