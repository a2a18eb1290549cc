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


def agreed(
    finite: mx.array, loss_finite: mx.array, group: Group | None
) -> tuple[mx.array, mx.array]:
    """Return, on every rank, whether all gradients and all losses are finite.

    One all-reduce of four bytes. Flags are counted, because the maximum of NaN and
    a number is either, by the order of the ranks; losses from the 16th bit on.

    Args:
        finite (array): Whether this rank's gradients are finite.
        loss_finite (array): Whether this rank's losses were.
        group (Group, optional): The ranks that decide together.
    """
    if not is_alone(group):
        bad = mx.logical_not(finite).astype(mx.int32)
        bad_loss = mx.logical_not(loss_finite).astype(mx.int32)
        total = mx.distributed.all_sum(bad + bad_loss * 2**16, group=group)
        finite, loss_finite = total % 2**16 == 0, total < 2**16
    return finite, loss_finite


def norm_over_ranks(
    gradients: Any,
    factor: mx.array,
    loss_finite: mx.array,
    group: Group | None,
    sharded: Sharded | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the norm of ``gradients * factor`` over all shards on all ranks.

    One all-reduce of eight bytes, which carries the finite flag too: squares have
    no sign to cancel with, so inf or NaN on one rank is inf or NaN in the sum. With
    it comes whether every rank's loss was finite.

    Args:
        gradients (Any): This rank's gradients.
        factor (array): What to multiply them with.
        loss_finite (array): Whether this rank's losses were finite.
        group (Group, optional): The ranks to sum over.
        sharded (Callable, optional): Told path and gradient, whether this is a
            shard. Others are equal on all ranks and count once. Default: all are.
    """
    if group is None or is_alone(group):
        return global_norm(gradients, factor), loss_finite
    shards: list[mx.array] = []
    copies: list[mx.array] = []
    for path, x in tree_flatten(gradients):
        is_shard = sharded is None or not is_floating(x) or sharded(path, x)
        (shards if is_shard else copies).append(x)
    square = mx.square(global_norm(shards, factor))
    if copies:
        square = square + mx.square(global_norm(copies, factor)) / group.size()
    bad_loss = mx.logical_not(loss_finite).astype(mx.float32)
    sums = mx.distributed.all_sum(mx.stack([square, bad_loss]), group=group)
    return mx.sqrt(sums[0]), sums[1] == 0
