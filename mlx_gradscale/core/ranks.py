"""Make ranks skip steps together, average their gradients and compare their settings.

MLX collectives have no tags and no timeout: if a rank omits a call, the other ranks
block until that rank makes another call or exits.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer

from .finite import global_norm
from .masters import to_float32
from .optimizers import single_optimizers
from .trees import dtype_name, flatten, is_floating

Group = mx.distributed.Group
Sharded = Callable[[str, mx.array], bool] | bool
ByPath = dict[str, mx.array]

# Same bucket size as nn.average_gradients.
_BUCKET_BYTES = 32 * 2**20
# gather() sends these bytes first. As a float32 they are NaN, and as an int32 positive,
# so a rank that receives them in place of gradients or a flag skips its step.
_MAGIC = b"gs\xff\x7f"
_SAME_SETTINGS = "Create the same optimizer and scaler on every rank."
_SAME_WEIGHTS = (
    "Create the same model on every rank, and freeze the same layers. To copy rank 0's "
    "weights, use mlx_gradscale.distributed.broadcast()."
)
_LISTED = 8


def check_group(group: Any) -> None:
    """Raise if ``group`` is neither None nor a group of ranks."""
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            "group must be an mx.distributed.Group, such as mx.distributed.init(), or "
            f"None; got {group!r}."
        )


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
        check_group(group)
        if not isinstance(average, bool):
            raise TypeError(f"average must be True or False, got {average!r}.")
        is_known = average or sharded is not None
        if group is None and is_known:
            raise ValueError(
                "average= and sharded= require a group. Pass "
                "group=mx.distributed.init()."
            )
        # A norm over all ranks must count copies once, and shards on every rank.
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
        # Averaged gradients are equal on all ranks, so the ranks need not agree.
        self.decide_alike = self.is_single or (average and not sharded)
        # The shapes of the parameters that the ranks have compared, without shards.
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def is_shard(self, path: str, x: mx.array) -> bool:
        """Return whether the gradient or parameter at ``path`` is a shard."""
        return bool(self.sharded(path, x) if callable(self.sharded) else self.sharded)

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return copy(self)  # a copy communicates with the same ranks

    def averaged(self, gradients: ByPath) -> ByPath:
        """Average the gradients over the group in float32; return shards unchanged.

        Each bucket waits for the previous one. Otherwise, if only one rank reads a
        value such as the norm, that rank could send its buckets in a different order.
        """
        copies = self._without_shards(gradients)
        self._check_shapes(copies)
        own = {path: to_float32(x) for path, x in copies.items() if is_floating(x)}
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
        return gradients | own

    def agree(self, finite: mx.array) -> mx.array:
        """Return, on every rank, whether ``finite`` is true on all ranks.

        A single four-byte all-reduce sums the flags. A maximum of the gradients could
        lose a NaN, depending on the order of the ranks.
        """
        if self.is_single:
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
        if self.decide_alike or self.group is None:
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

    def compare(
        self, parameters: Any, optimizer: Optimizer, settings: dict[str, Any]
    ) -> None:
        """Raise, on every rank, if parameters or settings differ between ranks."""
        sharded = "a function" if callable(self.sharded) else self.sharded
        settings = settings | {"average": self.average, "sharded": sharded}
        for i, part in enumerate(single_optimizers(optimizer)):
            rate = part.state.get("learning_rate")
            own = {"class": type(part).__name__, "learning_rate": rate} | vars(part)
            place = f"optimizers.{i}." if part is not optimizer else ""
            settings |= {f"{place}{k}": x for k, x in own.items() if k[0] != "_"}
        plain = {name: text for name, x in settings.items() if (text := _as_text(x))}
        copies = self._without_shards(dict(flatten(parameters)))
        # Without averaging, the ranks may have different values.
        kinds = {path: _describe(x, self.average) for path, x in copies.items()}
        tables = gather([plain, kinds], self.group, "init")  # type: ignore[arg-type]
        for i, remedy in enumerate((_SAME_SETTINGS, _SAME_WEIGHTS)):
            if lines := list_differences([table[i] for table in tables]):
                raise ValueError("\n".join([*lines, remedy]))
        self._shapes = {path: x.shape for path, x in copies.items()}

    def _without_shards(self, arrays: ByPath) -> ByPath:
        """Return the arrays of which every rank has a copy."""
        return {p: x for p, x in arrays.items() if not self.is_shard(p, x)}

    def _check_shapes(self, gradients: ByPath) -> None:
        """Raise if gradients do not match the parameters that the ranks have compared.

        If another rank sends more or fewer bytes than expected, MLX raises no error,
        and weights become infinite. Only the rank whose gradients differ can detect
        this before it sends them.
        """
        found = {path: x.shape for path, x in gradients.items()}
        if self._shapes is None:
            return
        for path in sorted(self._shapes.keys() | found.keys()):
            wanted, got = (
                f"a gradient of shape {shapes[path]}" if path in shapes else "none"
                for shapes in (self._shapes, found)
            )
            if wanted != got:
                raise ValueError(
                    "The gradients differ from the parameters passed to init(): for "
                    f"{path!r}, expected {wanted}, got {got}. After freezing, "
                    "unfreezing or adding layers, call "
                    "optimizer.init(model.trainable_parameters()) on every rank."
                )


def gather(value: Any, group: Group, call: str) -> list[Any]:
    """Gather a JSON-serializable value from all ranks.

    ``call`` is the name of the function that the user has called on this rank. The
    ranks raise if they have not all called the same one.
    """

    def all_gather(row: bytes) -> list[bytes]:
        own = mx.array(np.frombuffer(row, np.uint8)[None])
        rows = np.array(mx.distributed.all_gather(own, group=group))
        return [row.tobytes() for row in rows]

    def check(calls: Iterable[str]) -> None:
        for rank, other in enumerate(calls):
            if other != call:
                raise RuntimeError(
                    f"This rank called {call}(), but rank {rank} called {other}(). All "
                    "ranks must make the same calls in the same order. For example, "
                    "do not call this function only 'if rank == 0'."
                )

    stranger = "another function that communicates, such as update"
    check([call if row == _MAGIC else stranger for row in all_gather(_MAGIC)])
    text = json.dumps(value).encode()
    headers = all_gather(f"{len(text)} {call}".encode().ljust(64))
    sizes, calls = zip(*(row.decode().split() for row in headers), strict=True)
    check(calls)
    rows = all_gather(text.ljust(max(map(int, sizes))))
    return [json.loads(row[: int(n)]) for row, n in zip(rows, sizes, strict=True)]


def list_differences(tables: list[Mapping[str, str]]) -> list[str]:
    """Return a line for each entry that differs between ranks, up to eight."""
    lines = []
    for name in dict.fromkeys(name for table in tables for name in table):
        found = [table.get(name, "nothing") for table in tables]
        if len(set(found)) > 1:
            each = (f"rank {rank} has {x}" for rank, x in enumerate(found))
            lines.append(f"The ranks differ in {name!r}: {', '.join(each)}.")
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"... and {len(lines) - _LISTED} more."]
    return lines


def _as_text(value: Any) -> str:
    """Return a setting as text, or "" for objects, whose text is not comparable."""
    if isinstance(value, mx.array):
        return str(np.array(to_float32(value)))
    try:
        json.dumps(value)
    except TypeError:
        return ""
    return repr(value)


def _describe(x: mx.array, has_checksum: bool) -> str:
    text = f"{dtype_name(x)} {x.shape}"
    if not has_checksum:
        return text
    # Computed on the device: the sum of all words, each weighted by its position.
    word = {1: mx.uint8, 2: mx.uint16}.get(x.dtype.size, mx.uint32)
    words = x.reshape(-1).view(word).astype(mx.uint32)
    weights = mx.arange(words.size, dtype=mx.uint32) * 2654435761 + 1
    return f"{text} with checksum {(words * weights).sum().item():08x}"
