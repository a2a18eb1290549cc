"""``all_finite`` against reading the same bytes once."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_gradscale import all_finite

from . import trees
from .comparison import say
from .rows import Figure, Row, Section, rows_of
from .timing import interleave, joined

# Where in memory the arrays happen to lie makes a third of the time: try several.
_PLACES = 7
_BITS = {mx.float32: (mx.int32, np.int32), mx.float16: (mx.int16, np.int16)}


def measure(rounds: int, shapes: trees.Shapes | None = None) -> Section:
    """Time all_finite and three plain reads, for float32 and float16."""
    shapes = shapes or trees.shapes_of(trees.MAIN)
    rows: list[Row] = []
    figures: list[Figure] = []
    for dtype, label in ((mx.float32, "float32"), (mx.float16, "float16")):
        say(f"all_finite, {label}")
        # All at once, or the next would get the memory of the last.
        places = [trees.make(shapes, dtype) for _ in range(_PLACES)]
        found = [interleave(_reads(tree, dtype), rounds) for tree in places]
        timings = {name: joined([one[name] for one in found]) for name in found[0]}
        ours = timings["all_finite"]
        plain = {k: t for k, t in timings.items() if k != "all_finite"}
        fastest = min(plain, key=lambda k: plain[k].median)
        pairs = zip(ours.seconds, plain[fastest].seconds, strict=True)
        ratio = sorted(a / b for a, b in pairs)[len(ours.seconds) // 2]
        gigabytes = trees.size(shapes) * dtype.size / 1e9
        bandwidth = gigabytes / plain[fastest].best
        case = f"all_finite, {label}, {gigabytes * 1e3:.0f} MB"
        rows += rows_of(case, timings)
        figures.append(
            Figure(
                f"all_finite / best plain read, {label}",
                ratio,
                bar=1.3,
                note=f"best is {fastest}, {bandwidth:.1f} GB/s",
            )
        )
    return Section(rows, figures)


def _reads(tree: Any, dtype: mx.Dtype) -> dict[str, Any]:
    leaves = [x for _, x in tree_flatten(tree)]
    bits, numpy_bits = _BITS[dtype]
    in_numpy = [np.array(x, copy=False).view(numpy_bits) for x in leaves]
    view_max = mx.compile(lambda xs: [mx.max(x.view(bits)) for x in xs])
    view_sum = mx.compile(lambda xs: [mx.sum(x) for x in xs])
    return {
        "all_finite": lambda: mx.eval(all_finite(tree)),
        "mx.max of the bits": lambda: mx.eval(view_max(leaves)),
        "mx.sum": lambda: mx.eval(view_sum(leaves)),
        "numpy max of the bits": lambda: [x.max() for x in in_numpy],
    }
