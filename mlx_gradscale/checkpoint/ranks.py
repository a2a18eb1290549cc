"""A single checkpoint for all ranks, written and read by rank 0."""

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


def random_keys(group: Group) -> list[list[int]]:
    """Return each rank's ``mx.random`` key."""
    key = cast(list[mx.array], mx.random.state)[0][None]
    return cast(list[list[int]], mx.distributed.all_gather(key, group=group).tolist())


def seed_of(keys: Any, group: Group) -> int:
    """Return the seed that restores this rank's saved key.

    A rank beyond the saved ones gets the key they shared, or a new key.
    """
    if not keys or any(type(x) is not int or x >> 32 for key in keys for x in key):
        raise ValueError("the saved random state is damaged.")
    rank = group.rank()
    high, low = keys[rank] if rank < len(keys) else keys[0]
    if rank >= len(keys) and any(key != keys[0] for key in keys):
        own = mx.random.split(mx.array([high, low], mx.uint32), rank + 1)[rank]
        high, low = cast(list[int], own.tolist())
    return int(high << 32 | low)
