"""Send values from rank 0 to all ranks, and check that the ranks are in sync.

MLX collectives have no tags and no timeout. All ranks must call these functions in the
same order; if one does not, the others block until it makes another call or exits.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .core.finite import arrays
from .core.ranks import Group, check_group, gather, is_single, list_differences
from .core.trees import flatten
from .files.arrays import CODES, DTYPES, checksum
from .files.text import dtype_name
from .files.trees import decode, encode

__all__ = ["assert_in_sync", "broadcast", "from_rank_0"]

# Packages whose functions may run between the user's call and a gather.
_BETWEEN = ("mlx_gradscale.", "contextlib.")


def assert_in_sync(tree: Any, group: Group | None = None) -> None:
    """Raise, on every rank, unless ``tree`` is bit-identical on all ranks.

    This reads the whole tree from the device. Call it after loading a checkpoint or
    every thousand steps, not on every step.

    Args:
        tree (Any): A tree of arrays.
        group (Group, optional): The ranks to compare. Default: the global group.

    Raises:
        RuntimeError: If the ranks differ. The message lists up to eight leaves that
            differ, with each rank's value or checksum.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.distributed import assert_in_sync
        >>> assert_in_sync(nn.Linear(2, 2).parameters(), mx.distributed.init())
    """
    group = _group_or_all(group)
    arrays(tree)
    if is_single(group):
        return
    tables = _gather({path: _describe(x) for path, x in flatten(tree)}, group)
    if lines := list_differences(tables):
        lines.append("To copy these values from rank 0, use broadcast().")
        raise RuntimeError("\n".join(lines))


def broadcast(tree: Any, group: Group | None = None) -> Any:
    """Return rank 0's ``tree`` on every rank.

    Args:
        tree (Any): A tree of the types that :func:`from_rank_0` accepts. Only rank 0's
            tree is used.
        group (Group, optional): The ranks that take part. Default: the global group.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.distributed import broadcast
        >>> model = nn.Linear(2, 2)
        >>> model = model.update(broadcast(model.parameters(), mx.distributed.init()))
    """
    return from_rank_0(lambda: tree, group)


def from_rank_0(load: Callable[[], Any], group: Group | None = None) -> Any:
    """Call ``load`` on rank 0 and return its result on every rank.

    Only rank 0 needs access to any files it reads. If ``load`` raises, all ranks raise.

    Args:
        load (Callable): Returns a tree (dict, list, tuple) of arrays, Python numbers,
            strings and None. With several ranks, other types raise an error.
        group (Group, optional): The ranks that take part. Default: the global group.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.distributed import from_rank_0
        >>> group = mx.distributed.init()
        >>> scaler, saved = GradScaler(group=group), GradScaler(init_scale=512.0)
        >>> scaler.load_state_dict(from_rank_0(saved.state_dict, group))
        >>> scaler.get_scale()
        512.0
    """
    group = _group_or_all(group)
    if is_single(group):
        return load()
    found: dict[str, mx.array] = {}
    tree = None
    with raise_together(group):
        if group.rank() == 0:
            tree = encode(load(), found)
            # Evaluate here, so that an error while reading a file reaches all ranks.
            mx.eval(found)
    kinds = {name: [x.shape, CODES[x.dtype]] for name, x in found.items()}
    tree, kinds = _gather([tree, kinds], group)[0]
    for name, (shape, code) in kinds.items():
        x = found.get(name, mx.zeros(shape, DTYPES[code]))
        found[name] = _sum_of_bytes(x, group)
    return decode(tree, found)


@contextmanager
def raise_together(group: Group) -> Iterator[None]:
    """Raise on every rank if the ``with`` block raises on any rank."""
    if is_single(group):
        yield
        return
    error = None
    try:
        yield
    except Exception as problem:
        error = problem
    try:
        errors = _gather(error and f"{type(error).__name__}: {error}", group)
    except RuntimeError as mismatch:  # caused by the error, if there was one
        raise error or mismatch from None
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise RuntimeError(f"Rank {rank} failed with {text}")


def _group_or_all(group: Group | None) -> Group:
    check_group(group)
    return mx.distributed.init() if group is None else group


def _describe(x: mx.array) -> str:
    if x.size == 1:
        return f"{dtype_name(x)} {x.item()}"
    return f"{dtype_name(x)}{list(x.shape)} with checksum {checksum(x):08x}"


def _gather(value: Any, group: Group) -> list[Any]:
    """Gather a value from all ranks; errors name the function that the user called."""
    frame, call = sys._getframe(1), ""
    while f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN) and frame.f_back:
        name, frame = frame.f_code.co_name, frame.f_back
        call = call if name.startswith(("_", "<")) else name
    return gather(value, group, call)


def _sum_of_bytes(x: mx.array, group: Group) -> mx.array:
    # Exact for all dtypes, -0.0 and NaN, because all ranks except 0 add zeros.
    if not x.size:
        return x
    total = mx.distributed.all_sum(x.reshape(-1).view(mx.uint8), group=group)
    mx.eval(total)
    return total.view(x.dtype).reshape(x.shape)
