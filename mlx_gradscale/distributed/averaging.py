"""The mean of gradients over ranks, in as few all-reduces as their size needs."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from ..files.text import natural_order
from ..finite import is_floating
from .consensus import Group, is_alone

# As large as the buckets of nn.average_gradients.
_BUCKET_BYTES = 32 * 2**20


def average_gradients(
    gradients: Any,
    group: Group | None = None,
    *,
    weight: float | mx.array | None = None,
    like: Any = None,
    only: Callable[[str, mx.array], bool] | None = None,
) -> Any:
    """Return the mean of the gradients over the ranks, in the dtype they have.

    The order is the caller's choice. A float16 sum of gradients that fit in float16
    on every rank may not fit: four ranks with 20000 each give inf, the step is
    skipped on all ranks and the scale backs off, by at most a factor of the number
    of ranks. In float32, after ``unscale_``, nothing of this can happen, for twice
    the bytes on the wire::

        grads = average_gradients(grads, group)                       # scaled
        grads = average_gradients(scaler.unscale_(opt, grads), group) # in float32

    Either way a gradient that is not finite on one rank is not finite in the mean,
    which has the same bits on every rank: all skip, or none.

    Unlike ``nn.average_gradients`` this keeps buckets where dtypes are mixed, does
    the all-reduces in one order on all ranks, and takes ranks that have more to
    say than others, or nothing.

    Args:
        gradients (Any): A tree with the same structure on every rank, or an empty
            one, which stands for zeros.
        group (Group, optional): Default: the global group.
        weight (float or array, optional): How much this rank counts, for example
            how many micro-batches its gradients are the mean of. Default: 1, or 0
            for an empty tree.
        like (Any, optional): Parameters, for the shapes of an empty tree.
        only (Callable, optional): Told path and gradient, whether to average this
            one. Default: all that are floating.

    Returns:
        Any: The sum of weight times gradients, over the sum of weights.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale.distributed import average_gradients
        >>> group = mx.distributed.init()
        >>> average_gradients({"w": mx.array([2.0, 4.0])}, group, weight=3)
        {'w': array([2, 4], dtype=float32)}
    """
    group = mx.distributed.init() if group is None else group
    if is_alone(group):
        return gradients
    if not tree_flatten(gradients):
        if like is None:
            raise ValueError(
                "This rank has no gradients, and the others' shapes are unknown: "
                "pass like=model.trainable_parameters()."
            )
        gradients = tree_map(mx.zeros_like, like)
        weight = 0.0 if weight is None else weight
    leaves = {
        path: x
        for path, x in tree_flatten(gradients)
        if is_floating(x) and (only is None or only(path, x))
    }
    if weight is not None:
        weight = mx.array(weight, mx.float32)
        leaves = {path: (x * weight).astype(x.dtype) for path, x in leaves.items()}
    # The weight travels with the gradients: no all-reduce of its own in float32,
    # and the same ones on every rank whether it was given or not.
    leaves[""] = mx.array(1.0) if weight is None else weight
    sums = _sums(leaves, group)
    total = sums.pop("")
    total = mx.where(total > 0, total, 1.0)
    return tree_map_with_path(
        lambda path, x: (sums[path] / total).astype(x.dtype) if path in sums else x,
        gradients,
    )


def _sums(leaves: dict[str, mx.array], group: Group) -> dict[str, mx.array]:
    sums: dict[str, mx.array] = {}
    last = None
    for paths in _buckets(leaves):
        values = [leaves[path] for path in paths]
        flat = mx.concatenate([x.reshape(-1) for x in values])
        if last is not None:
            # MLX orders a graph by its shape, and a rank without gradients has
            # another graph: only a dependency keeps the ranks in step.
            (flat,) = mx.depends([flat], [last])
        last = mx.distributed.all_sum(flat, group=group)
        ends = [0]
        for x in values:
            ends.append(ends[-1] + x.size)
        pieces = mx.split(last, ends[1:-1])
        for path, x, piece in zip(paths, values, pieces, strict=True):
            sums[path] = piece.reshape(x.shape)
    return sums


def _buckets(leaves: dict[str, mx.array]) -> Iterator[list[str]]:
    # Backwards, as the gradients of the last layers are there first, and by name,
    # so that no rank depends on the order in which its tree was built.
    open_buckets: dict[mx.Dtype, list[str]] = {}
    sizes: dict[mx.Dtype, int] = {}
    for path in sorted(leaves, key=natural_order, reverse=True):
        x = leaves[path]
        open_buckets.setdefault(x.dtype, []).append(path)
        sizes[x.dtype] = sizes.get(x.dtype, 0) + x.nbytes
        if sizes[x.dtype] >= _BUCKET_BYTES:
            yield open_buckets.pop(x.dtype)
            del sizes[x.dtype]
    yield from open_buckets.values()
