"""Coordinate ranks that share one checkpoint, which rank 0 reads and writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

Group = mx.distributed.Group


def group_of(*owners: Any) -> Group:
    """Return the group of the optimizer or the scaler, or the global group."""
    groups = (getattr(owner, "group", None) for owner in owners)
    return next(filter(None, groups), None) or mx.distributed.init()


@contextmanager
def together(group: Group, caller: str) -> Iterator[None]:
    """Raise on every rank if the block raises on any rank."""
    error = None
    try:
        yield
    except Exception as problem:
        error = problem
    own = mx.array([error is not None], mx.int32)
    failed = cast(list[int], mx.distributed.all_gather(own, group=group).tolist())
    if error is not None:
        raise error
    if any(failed):
        rank = failed.index(1)
        raise RuntimeError(f"{caller}() failed on rank {rank}. See its error.")


def seed_of(keys: mx.array, group: Group) -> int:
    """Return the seed that restores this rank's ``mx.random`` key.

    A rank that was not saved gets the same key if all saved ones are equal, and a new
    key otherwise.
    """
    rank, count = group.rank(), len(keys)
    if keys.dtype != mx.uint32 or keys.shape != (count, 2):
        raise ValueError("the saved random state is damaged.")
    key = keys[rank % count]
    if rank >= count and mx.any(keys != keys[0]).item():
        key = mx.random.split(key, rank + 1)[rank]
    high, low = cast(list[int], key.tolist())
    return high << 32 | low
