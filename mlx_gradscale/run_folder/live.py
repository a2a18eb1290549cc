"""What of a live run goes into its folder: weights, optimizer and scaler."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from ..guard import is_initialized
from ..optimizer import LossScaleOptimizer
from ..scaler import GradScaler
from .contents import Contents
from .rounding import Rounded, unrounded
from .settings import used_settings

# In training.json: what used_settings gives.
USED = "used"


def live_contents(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    rounded: Rounded | None = None,
) -> Contents:
    """Return a live run as it is to be written, evaluated.

    Args:
        folder (Path): A run that is there may hold weights in their full precision.
        model (nn.Module): Its parameters are saved.
        optimizer (Optimizer, optional): Of a ``LossScaleOptimizer`` the inner one's
            state, and its masters instead of the weights.
        scaler (GradScaler, optional): Default: the optimizer's.
        rounded (Rounded, optional): What is known of weights that were rounded.
    """
    weights = dict(tree_flatten(model.parameters()))
    contents = Contents(weights)
    if isinstance(optimizer, LossScaleOptimizer):
        if not is_initialized(optimizer):
            # It may hold a state that was set and waits for the parameters.
            optimizer.init(model.trainable_parameters())
        masters = _masters(optimizer, weights)
        contents.weights = unrounded(weights, masters, folder, rounded) | masters
        scaler = optimizer.scaler if scaler is None else scaler
        optimizer = optimizer.optimizer
    if optimizer is not None:
        contents.optimizer = {
            # A schedule of Python numbers leaves one in the state.
            name: x if isinstance(x, mx.array) else mx.array(x)
            for name, x in tree_flatten(optimizer.state)
            if isinstance(x, (mx.array, int, float))
        }
        contents.training[USED] = used_settings(optimizer)
    if scaler is not None and scaler.is_enabled():
        contents.scaler = scaler.state_dict()
    mx.eval(contents.weights, contents.optimizer or {})
    return contents


def _masters(
    optimizer: LossScaleOptimizer, weights: dict[str, Any]
) -> dict[str, mx.array]:
    """Return the masters; where the user has put another weight since, that one."""
    kept = optimizer.kept_masters
    masters = {}
    for name in kept:
        if name in weights:
            master = kept.untouched(name, weights[name])
            # Computed only where it has to be: that is a copy.
            masters[name] = (
                kept.master_of(name, weights[name]) if master is None else master
            )
    return masters
