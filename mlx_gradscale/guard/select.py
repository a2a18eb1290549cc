"""Select, on the device, between what a step computed and what was there before."""

from typing import Any

import mlx.core as mx

from ..finite import is_floating
from ..masters import Joined
from ..masters.remainder import select_step
from ..state_tree import flatten


def select_state(old: mx.array, new: mx.array, apply: mx.array) -> mx.array:
    """Return a new array of an optimizer's state, or the old one.

    Args:
        old (array): Before the step.
        new (array): After it.
        apply (array): A bool array of this shape, or a 0-d one.
    """
    if new.ndim == 0 and not is_floating(new):
        # Counted and selected are two kernels that MLX has ready; fused they would be
        # one to build.
        new = mx.contiguous(new)
    return mx.where(apply, new, old)


def select_parameter(
    parameter: mx.array,
    kept: dict[str, mx.array],
    old: Joined,
    new: mx.array,
    apply: mx.array,
    gradient: mx.array,
    moments: list[mx.array],
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return a new parameter, or the old one, and what is to be kept of its master.

    Args:
        parameter (array): Before the step.
        kept (dict): What was kept of its master, empty without one.
        old (Joined): The master before the step.
        new (array): The master after it, in float32.
        apply (array): A bool array of the parameter's shape.
        gradient (array): The gradient, unscaled.
        moments (list): The parameter's own new state, in the order of its keys.
    """
    if "remainders" in kept:
        others = [*moments[::-1], gradient]
        weight, remainder = select_step(
            parameter, kept["remainders"], old, new, apply, others
        )
        return weight, {"remainders": remainder}
    if kept:
        # Also in a skipped step: a replaced weight is its own master.
        new = mx.where(apply, new, old.master)
        kept = {"masters": new}
    # In the parameter's own dtype: a cast there and back flushes bfloat16 subnormals on
    # Apple's GPUs, and changes the bits of a float16 NaN.
    same = _in_one_kernel_with(moments, parameter, apply)
    return mx.where(apply, new.astype(parameter.dtype), same), kept


def _in_one_kernel_with(
    moments: list[mx.array], parameter: mx.array, apply: mx.array
) -> mx.array:
    # Where the step is not applied, and only there, the parameter, bit for bit; but
    # computed from its new moments too. mx.compile fuses a node only into a kernel
    # that holds all its consumers; with this common root a parameter and its moments
    # become one kernel instead of five. The last moment comes outermost, hence first
    # in the fuser's walk: AdaDelta's u is computed from v, and 11 levels are all a
    # kernel may have.
    for moment in moments:
        if moment.shape == parameter.shape:
            moment = moment.astype(parameter.dtype)
            parameter = mx.where(apply, moment, parameter)
    return parameter


def arrays_by_owner(state: Any, without: set[int]) -> dict[str, list[mx.array]]:
    """Return the arrays of a state by the path of what they belong to.

    Args:
        state (Any): A tree.
        without (set): The ids of arrays to leave out.
    """
    owned: dict[str, list[mx.array]] = {}
    for path, value in flatten(state):
        if isinstance(value, mx.array) and id(value) not in without:
            owned.setdefault(path.rpartition(".")[0], []).append(value)
    return owned
