"""One decision for a whole group: the finite flag and the norm over all ranks."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..finite import global_norm, is_floating

Group = mx.distributed.Group
Sharded = Callable[[str, mx.array], bool]


def is_alone(group: Group | None) -> bool:
    """Tell whether there is nobody to talk to."""
    return group is None or group.size() == 1


def agreed(finite: mx.array, group: Group | None) -> mx.array:
    """Return, on every rank, whether ``finite`` is true on all of them.

    One all-reduce of four bytes. Flags are counted, because the maximum of NaN and
    a number is either, by the order of the ranks.
    """
    if is_alone(group):
        return finite
    bad = mx.logical_not(finite).astype(mx.int32)
    return mx.distributed.all_sum(bad, group=group) == 0


def norm_over_ranks(
    gradients: Any,
    factor: mx.array,
    group: Group | None,
    sharded: Sharded | None = None,
) -> mx.array:
    """Return the norm of ``gradients * factor`` over all shards on all ranks.

    One all-reduce of four bytes, which carries the finite flag too: squares have
    no sign to cancel with, so inf or NaN on one rank is inf or NaN in the sum.

    Args:
        gradients (Any): This rank's gradients.
        factor (array): What to multiply them with.
        group (Group, optional): The ranks to sum over.
        sharded (Callable, optional): Told path and gradient, whether this is a
            shard. Others are equal on all ranks and count once. Default: all are.
    """
    if is_alone(group):
        return global_norm(gradients, factor)
    shards, copies = [], []
    for path, x in tree_flatten(gradients):
        is_shard = sharded is None or not is_floating(x) or sharded(path, x)
        (shards if is_shard else copies).append(x)
    square = mx.square(global_norm(shards, factor))
    if copies:
        square = square + mx.square(global_norm(copies, factor)) / group.size()
    return mx.sqrt(mx.distributed.all_sum(square, group=group))
