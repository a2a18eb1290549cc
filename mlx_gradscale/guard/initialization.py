"""Make an optimizer ready to be guarded: a float32 state, there before the step."""

from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer, Optimizer
from mlx.utils import tree_map

from ..finite import is_floating
from ..masters import HALF, to_float32
from ..state_tree import dotted, slots
from .mlx_optimizers import is_emptied, is_initialized, is_mlx_own, parts, schedules
from .other_optimizers import prepare


def check_supported(optimizer: Optimizer) -> None:
    """Raise if an optimizer does something in a step that would not be called."""
    name = type(optimizer).__name__
    if type(optimizer).update is not Optimizer.update:
        raise TypeError(
            f"{name} overrides update(), which a scaler does not call: move what it "
            "does to apply_gradients()."
        )
    if isinstance(optimizer, MultiOptimizer):
        if type(optimizer).apply_gradients is not MultiOptimizer.apply_gradients:
            raise TypeError(
                f"{name} overrides MultiOptimizer's apply_gradients(), whose parts are "
                "stepped one by one: override it in a part."
            )
        for part in optimizer.optimizers:
            check_supported(part)


def initialize(optimizer: Optimizer, parameters: Any, again: bool = False) -> None:
    """Make sure that the optimizer has a float32 state for every parameter.

    With ``again`` also for those that came after its first initialisation.

    MLX itself initialises from the gradients, in their dtype: Adam's second
    moment in float16 is zero for every gradient below 2.4e-4.
    """
    for part, tree in parts(optimizer, parameters):
        if again or not is_initialized(part) or is_emptied(part):
            floating = tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree)
            part.init(floating)
        for name in schedules(part):
            # What a schedule of Python numbers left there.
            part.state[name] = mx.array(part.state[name])
        if not is_mlx_own(part):
            floating = tree_map(lambda p: to_float32(p) if is_floating(p) else {}, tree)
            prepare(part, floating)
    for path, box, key in slots(optimizer.state):
        if isinstance(box, tuple):
            raise TypeError(
                f"{type(optimizer).__name__} keeps {dotted(path)} in a tuple, which "
                "cannot be written to: use a list or a dict in its state."
            )
        if box[key].dtype in HALF:
            box[key] = box[key].astype(mx.float32)
