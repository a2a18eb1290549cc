"""Send values from rank 0 to all ranks, and check that the ranks are in sync.

MLX collectives have no tags and no timeout. All ranks must call these functions in the
same order; if one does not, the others block until it makes another call or exits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .core.finite import arrays
from .core.ranks import Group, check_group, gather, is_single, list_differences
from .core.trees import flatten
from .files.arrays import checksum, decode, encode
from .files.text import dtype_name

__all__ = ["assert_in_sync", "broadcast", "from_rank_0"]


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
    compare(tree, _group_or_all(group), "assert_in_sync")


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
    return share(lambda: tree, _group_or_all(group), "broadcast")


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
    return share(load, _group_or_all(group), "from_rank_0")


# ``call`` is the name of the public function that the user called, for errors.
def compare(tree: Any, group: Group, call: str) -> None:
    """Raise, on every rank, unless ``tree`` is bit-identical on all ranks."""
    arrays(tree)
    if is_single(group):
        return
    table = {path: _describe(x) for path, x in flatten(tree)}
    if lines := list_differences(gather(table, group, call)):
        lines.append("To copy these values from rank 0, use broadcast().")
        raise RuntimeError("\n".join(lines))


def share(load: Callable[[], Any], group: Group, call: str) -> Any:
    """Call ``load`` on rank 0 and return its result on every rank."""
    if is_single(group):
        return load()
    found: dict[str, mx.array] = {}
    tree = None
    with raise_together(group, call):
        if group.rank() == 0:
            tree = encode(load(), found)
            # Evaluate here, so that an error while reading a file reaches all ranks.
            mx.eval(found)
    kinds = {name: [x.shape, dtype_name(x)] for name, x in found.items()}
    tree, kinds = gather([tree, kinds], group, call)[0]
    for name, (shape, dtype) in kinds.items():
        kind = mx.bool_ if dtype == "bool" else getattr(mx, dtype)
        x = found.get(name, mx.zeros(shape, kind))
        if x.size:
            # Exact for all dtypes, -0.0 and NaN, because other ranks add zeros.
            data = mx.distributed.all_sum(x.reshape(-1).view(mx.uint8), group=group)
            x = data.view(x.dtype).reshape(x.shape)
            mx.eval(x)
        found[name] = x
    return decode(tree, found)


@contextmanager
def raise_together(group: Group, call: str) -> Iterator[None]:
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
        errors = gather(error and f"{type(error).__name__}: {error}", group, call)
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
