"""One checkpoint for all ranks, which rank 0 writes and reads."""

from typing import Any, cast

import mlx.core as mx
from mlx.optimizers import Optimizer

from ..core.trees import flatten
from ..distributed import assert_in_sync

# Tells a rank in this function from one whose next collective is another.
_MAGIC = 0x6C05CA1E


def group_of(
    group: mx.distributed.Group | None, optimizer: Optimizer, scaler: Any
) -> mx.distributed.Group:
    """Return the given group, or that of the optimizer or scaler, or the global one."""
    for known in (group, *(getattr(x, "group", None) for x in (optimizer, scaler))):
        if known is not None:
            return cast(mx.distributed.Group, known)
    return mx.distributed.init()


def agree(
    error: BaseException | None, group: mx.distributed.Group, caller: str
) -> None:
    """Raise on every rank if any rank has an error."""
    if group.size() > 1:
        own = mx.array([[_MAGIC, error is not None]], mx.uint32)
        every = mx.distributed.all_gather(own, group=group)
        reports = cast(list[list[int]], every.tolist())
        if any(magic != _MAGIC for magic, _ in reports):
            raise RuntimeError(
                f"Not every rank called {caller}(). Call it on all ranks; only rank 0 "
                "writes."
            )
        failed = [rank for rank, (_, has_failed) in enumerate(reports) if has_failed]
        if failed and error is None:
            raise RuntimeError(f"{caller}() failed on rank {failed[0]}, see its error.")
    if error is not None:
        raise error


def check_copies(tree: Any, group: mx.distributed.Group) -> None:
    """Raise on every rank if an array differs between ranks."""
    arrays = {path: x for path, x in flatten(tree) if isinstance(x, mx.array)}
    try:
        assert_in_sync(arrays, group)
    except RuntimeError as error:
        raise RuntimeError(
            "The ranks do not hold the same values, and one checkpoint is written for "
            "all: gather a sharded model first, or synchronise ranks that drifted "
            f"apart.\n{error}"
        ) from None


def random_keys(group: mx.distributed.Group) -> list[list[int]]:
    """Return the key of ``mx.random`` of each rank."""
    key = cast(list[mx.array], mx.random.state)[0][None]
    if group.size() > 1:
        key = mx.distributed.all_gather(key, group=group)
    return cast(list[list[int]], key.tolist())


def seed_of(keys: Any, group: mx.distributed.Group) -> int:
    """Return the seed that gives this rank its saved key.

    A rank beyond those that saved gets the key they shared, or a key of its own.
    """
    numbers = [x for high, low in keys for x in (high, low)]
    if not keys or any(type(x) is not int or not 0 <= x < 2**32 for x in numbers):
        raise ValueError("its random state is damaged.")
    rank = group.rank()
    if rank < len(keys):
        high, low = keys[rank]
    elif all(key == keys[0] for key in keys):
        high, low = keys[0]
    else:
        own = mx.random.split(mx.array(keys[0], mx.uint32), rank + 1)[rank]
        high, low = cast(list[int], own.tolist())
    return int(high << 32 | low)
