"""Apply any ``mlx.optimizers`` optimizer to a tree, or leave everything as it was."""

from .mlx_optimizers import is_emptied, is_initialized, schedules, single_optimizers
from .step import (
    fitting_parameters,
    guarded_apply,
    in_place_of,
    initialize,
    parameter_places,
    planned_step,
    unscale,
)

__all__ = [
    "fitting_parameters",
    "guarded_apply",
    "in_place_of",
    "initialize",
    "is_emptied",
    "is_initialized",
    "parameter_places",
    "planned_step",
    "schedules",
    "single_optimizers",
    "unscale",
]
