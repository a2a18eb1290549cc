"""Make ranks skip steps together, average their gradients and compare their settings.

MLX collectives have no tags and no timeout: if a rank omits a call, the other ranks
block until that rank makes another call or exits.
"""

import zlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from .finite import global_norm
from .masters import to_float32
from .trees import flatten, is_floating

Group = mx.distributed.Group
Sharded = Callable[[str, mx.array], bool] | bool
ByPath = dict[str, mx.array]

# Same bucket size as nn.average_gradients.
_BUCKET_BYTES = 32 * 2**20


def is_single(group: Group | None) -> bool:
    """Return whether there is no group, or only one rank in it."""
    return group is None or group.size() == 1


class Ranks:
    """A group of ranks, and whether gradients are averaged or sharded across it."""

    def __init__(
        self,
        group: Group | None = None,
        average: bool = False,
        sharded: Sharded | None = None,
        clips: bool = False,
    ):
        if not isinstance(average, bool):
            raise TypeError(f"average must be True or False, got {average!r}.")
        is_known = average or sharded is not None
        if group is None and is_known:
            raise ValueError(
                "average= and sharded= require a group. Pass "
                "group=mx.distributed.init()."
            )
        if group is not None and clips and not is_known:
            raise ValueError(
                "max_grad_norm= with a group requires average= or sharded=. Pass "
                "average=True to average the gradients, sharded=False if you average "
                "them yourself, or sharded=True if each rank has different parameters."
            )
        self.group = group
        self.average = average
        self.sharded = sharded
        self.is_single = is_single(group)
        # Averaged gradients are equal on all ranks, so all ranks decide alike.
        self._decides_alone = self.is_single or (average and not sharded)

    def is_shard(self, path: str, x: mx.array) -> bool:
        """Return whether the gradient or parameter at ``path`` is a shard."""
        return bool(self.sharded(path, x) if callable(self.sharded) else self.sharded)

    def averaged(self, gradients: Any) -> Any:
        """Average the gradients over the group in float32; return shards unchanged.

        Each bucket waits for the previous one. Otherwise, if only one rank reads a
        value such as the norm, that rank could send its buckets in a different order.
        """
        own = {
            path: to_float32(x)
            for path, x in flatten(gradients)
            if is_floating(x) and not self.is_shard(path, x)
        }
        # In reverse, because the gradients of the last layers are ready first, and
        # sorted, so that the order in which a rank built its tree does not matter.
        order = sorted(own, key=lambda path: (str(own[path].dtype), path), reverse=True)
        starts = accumulate((own[path].nbytes for path in order), initial=0)
        buckets: dict[Any, list[str]] = {}
        for path, start in zip(order, starts, strict=False):
            bucket = own[path].dtype, start // _BUCKET_BYTES
            buckets.setdefault(bucket, []).append(path)
        last: list[mx.array] = []
        for paths in buckets.values():
            values = [own[path] for path in paths]
            values = mx.depends(values, last) if last else values
            last = nn.average_gradients(values, self.group, all_reduce_size=2**62)
            own.update(zip(paths, last, strict=True))
        return tree_map_with_path(lambda path, x: own.get(path, x), gradients)

    def agree(self, finite: mx.array, is_averaged: bool = True) -> mx.array:
        """Return, on every rank, whether ``finite`` is true on all ranks.

        ``is_averaged`` is false if the flag is of gradients before they are averaged.

        A single four-byte all-reduce sums the flags. A maximum of the gradients could
        lose a NaN, depending on the order of the ranks.
        """
        if self.is_single or (self._decides_alone and is_averaged):
            return finite
        n_bad = mx.logical_not(finite).astype(mx.int32)
        return mx.distributed.all_sum(n_bad, group=self.group) == 0

    def norm(
        self, scaled: ByPath, inverse: mx.array | None, others: ByPath
    ) -> mx.array:
        """Return the norm of the unscaled gradients, including shards on other ranks.

        A single four-byte all-reduce also carries the finite flag: squares cannot
        cancel, so inf or NaN on one rank makes the sum inf or NaN.
        """
        if self._decides_alone or self.group is None:
            return global_norm(list(scaled.values()), inverse, list(others.values()))
        square = mx.array(0.0)
        for is_shard, n_copies in ((True, 1), (False, self.group.size())):
            norm = global_norm(
                [x for p, x in scaled.items() if self.is_shard(p, x) is is_shard],
                inverse,
                [x for p, x in others.items() if self.is_shard(p, x) is is_shard],
            )
            square += mx.square(norm) / n_copies
        return mx.sqrt(mx.distributed.all_sum(square, group=self.group))

    def compare(self, parameters: Any, settings: str) -> None:
        """Raise, on every rank, if parameters or settings differ between ranks."""
        # Shards differ between ranks, and their names may differ too.
        found = {p: x for p, x in flatten(parameters) if not self.is_shard(p, x)}
        shapes = sorted(f"{path} {x.dtype} {x.shape}" for path, x in found.items())
        # Without averaging, the ranks may have different values.
        paths = sorted(path for path in found if found[path].size and self.average)
        values = [_checksum(found[path]).item() for path in paths]
        parts = {
            "the names, shapes or dtypes of parameters": shapes,
            "the settings of the optimizer or the scaler": settings,
            "the values of parameters": values,
        }
        checksums = {k: zlib.crc32(str(x).encode()) >> 1 for k, x in parts.items()}
        own = mx.array(list(checksums.values()), mx.int32)
        everyone = np.array(mx.distributed.all_gather(own[None], group=self.group))
        for what, column in zip(checksums, everyone.T, strict=True):
            if (column != column[0]).any():
                raise ValueError(
                    f"The ranks differ in {what} (checksums {column.tolist()}). Create "
                    "the same model, optimizer and scaler on every rank. To copy rank "
                    "0's weights, use mlx_gradscale.distributed.broadcast()."
                )


def _checksum(x: mx.array) -> mx.array:
    bits = x.reshape(-1).view(mx.uint8).astype(mx.uint32)
    places = mx.arange(bits.size, dtype=mx.uint32) * 2654435761 + 1
    return (bits * places).sum()
