"""One checkpoint for all ranks: rank 0 writes and reads, all know whether it could."""

from typing import Any, cast

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from ..distributed import assert_in_sync
from ..distributed.consensus import Group, is_alone
from ..scaler import GradScaler
from .checksum import checksum

# What a rank says first. Another that is not here, but in its next step, says
# something else, or is waited for.
_WORD = 0x6C05CA1E


def group_of(
    group: Group | None, optimizer: Optimizer, scaler: GradScaler | None
) -> Group:
    """Return the ranks that train together: as given, or as the parts know it."""
    for known in (group, *(getattr(x, "_group", None) for x in (optimizer, scaler))):
        if known is not None:
            return cast(Group, known)
    return mx.distributed.init()


def agree(error: BaseException | None, group: Group, what: str) -> None:
    """Raise on every rank, if there is an error on any."""
    if not is_alone(group):
        mine = mx.array([[_WORD, error is not None]], mx.uint32)
        every = mx.distributed.all_gather(mine, group=group)
        told = cast(list[list[int]], every.tolist())
        if any(word != _WORD for word, _ in told):
            raise RuntimeError(
                f"Not every rank came to {what}(): all must call it, not only rank 0, "
                "which is the one that writes."
            )
        failed = [rank for rank, (_, failed) in enumerate(told) if failed]
        if failed and error is None:
            raise RuntimeError(f"{what}() failed on rank {failed[0]}, which says why.")
    if error is not None:
        raise error


def check_copies(tree: Any, group: Group) -> None:
    """Raise on every rank, if some array of a tree is not the same on all."""
    if is_alone(group):
        return
    # A read of the memory, where assert_in_sync on all of it would take long.
    sums = {
        path: mx.array([*bytes.fromhex(checksum(x))])
        for path, x in tree_flatten(tree)
        if isinstance(x, mx.array)
    }
    try:
        assert_in_sync(sums, group)
    except RuntimeError as error:
        raise RuntimeError(
            "save_checkpoint() writes one copy for all ranks, and they do not have the "
            "same: a model in shards must be gathered first, ranks that drifted apart "
            f"brought together.\n{error}"
        ) from None


def random_keys(group: Group) -> list[list[int]]:
    """Return where ``mx.random`` stands, on each rank."""
    state = cast(list[mx.array], mx.random.state)
    key = state[0][None]
    if not is_alone(group):
        key = mx.distributed.all_gather(key, group=group)
    return cast(list[list[int]], key.tolist())


def seed_of(keys: Any, group: Group) -> int:
    """Return what ``mx.random.seed`` takes to go on from this rank's key.

    A rank that was not there gets the key that all had, or one of its own.

    Raises:
        ValueError: These are not keys.
    """
    if (
        not isinstance(keys, list)
        or not keys
        or any(not isinstance(key, list) or len(key) != 2 for key in keys)
        or any(type(x) is not int or not 0 <= x < 2**32 for key in keys for x in key)
    ):
        raise ValueError("The random state in it is damaged.")
    rank = group.rank()
    if rank < len(keys):
        high, low = keys[rank]
    elif all(key == keys[0] for key in keys):
        high, low = keys[0]
    else:
        start = mx.array(keys[0], mx.uint32)
        own = mx.random.split(start, rank + 1)[rank]
        high, low = cast(list[int], own.tolist())
    return int(high << 32 | low)
