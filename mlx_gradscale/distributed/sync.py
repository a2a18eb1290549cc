"""Are all ranks in the same state; bring them there from rank 0."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..files.text import dtype_name, dtype_named
from ..finite import arrays
from .consensus import Group, is_alone
from .exchange import check_equal, gather

_ADVICE = "Load the last checkpoint on all ranks, with from_rank_0()."


def assert_in_sync(tree: Any, group: Group | None = None) -> None:
    """Raise, on every rank, if a leaf of ``tree`` is not the same on all ranks.

    Every rank of the group must call this. It reads the whole tree from the device:
    call it after loading a checkpoint or every thousand steps, not on every step.

    Args:
        tree (Any): A tree of arrays that should be equal everywhere, bit for bit.
        group (Group, optional): Default: the global group.

    Raises:
        RuntimeError: Says which rank differs from most others, and in what.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from mlx_gradscale.distributed import assert_in_sync
        >>> assert_in_sync(nn.Linear(2, 2).parameters(), mx.distributed.init())
    """
    group = mx.distributed.init() if group is None else group
    arrays(tree)
    if is_alone(group):
        return
    table = {path: _digest(x) for path, x in tree_flatten(tree)}
    check_equal("assert_in_sync()", table, group, _text, _ADVICE)


def from_rank_0(load: Callable[[], Any], group: Group | None = None) -> Any:
    """Call ``load`` on rank 0 and return what it returned, on every rank.

    Every rank of the group must call this; only rank 0 needs the file. If ``load``
    raises on rank 0, every rank raises.

    Args:
        load (Callable): Returns a tree (dict, list, tuple) of arrays and of Python
            numbers, strings and None.
        group (Group, optional): Default: the global group.

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
    group = mx.distributed.init() if group is None else group
    if is_alone(group):
        return load()
    found: list[mx.array] = []
    error, plan = None, None
    if group.rank() == 0:
        try:
            plan = _describe(load(), found)
            # Here, because a file that cannot be read fails only when evaluated.
            mx.eval(found)
        except Exception as e:
            error = e
    failure = error and f"{type(error).__name__}: {error}"
    plan, failure = gather("from_rank_0()", [plan, failure], group)[0]
    if error is not None:
        raise error
    if failure is not None:
        raise RuntimeError(f"Rank 0 could not load: {failure}")
    sent = iter(found)
    return _rebuild(plan, (_broadcast(x, sent, group) for x in _shapes(plan)))


def _bytes(x: mx.array) -> mx.array:
    return x.reshape(-1).view(mx.uint8)


def _digest(x: mx.array) -> list[Any]:
    data = np.array(_bytes(x)).tobytes() if x.size else b""
    value = str(x.item()) if x.size == 1 else None
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return [list(x.shape), dtype_name(x), value, digest]


def _text(entry: list[Any] | None) -> str:
    if entry is None:
        return "no such leaf"
    shape, dtype, value, digest = entry
    if value is not None:
        return str(value)
    return f"{dtype}{shape} with checksum {digest[:8]}"


def _describe(tree: Any, found: list[mx.array]) -> Any:
    if isinstance(tree, mx.array):
        found.append(tree)
        return {"array": [list(tree.shape), dtype_name(tree)]}
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str):
                raise TypeError(f"Expected strings as keys of a dict, got {key!r}.")
        return {"dict": {key: _describe(x, found) for key, x in tree.items()}}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_describe(x, found) for x in tree]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(f"Expected a tree of arrays, numbers and strings, got {tree!r}.")


def _shapes(plan: Any) -> Iterator[tuple[list[int], mx.Dtype]]:
    [(kind, content)] = plan.items()
    if kind == "array":
        yield content[0], dtype_named(content[1])
    elif kind != "value":
        for child in content.values() if kind == "dict" else content:
            yield from _shapes(child)


def _rebuild(plan: Any, received: Iterator[mx.array]) -> Any:
    [(kind, content)] = plan.items()
    if kind == "array":
        return next(received)
    if kind == "dict":
        return {key: _rebuild(child, received) for key, child in content.items()}
    if kind == "value":
        return content
    children = [_rebuild(child, received) for child in content]
    return children if kind == "list" else tuple(children)


def _broadcast(
    like: tuple[list[int], mx.Dtype], found: Iterator[mx.array], group: Group
) -> mx.array:
    shape, dtype = like
    mine = next(found, None)
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
        return mx.zeros(shape, dtype)
    # Summed as bytes with zeros elsewhere: exact for every dtype, -0.0 and NaN.
    sent = mx.zeros(size * dtype.size, mx.uint8) if mine is None else _bytes(mine)
    total = mx.distributed.all_sum(sent, group=group)
    mx.eval(total)
    return total.view(dtype).reshape(shape)
