"""What can be counted, and so checked on any machine: kernels, traces, bytes."""

import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

# Primitives that only describe a buffer anew. Contiguous is one of them here:
# it copies only what is not contiguous, and a kernel's output always is.
VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "Contiguous",
    "Depends",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
    "View",
}
_NODE = re.compile(r'label ="([^"]*)", shape=rectangle')


def kernels(outputs: Any) -> Counter[str]:
    """Count the kernels that evaluating ``outputs`` would launch, by primitive.

    Args:
        outputs (Any): A tree of arrays that were not evaluated yet. Evaluate their
            inputs first, or the kernels that make those count as well.

    Example:
        >>> import mlx.core as mx
        >>> from benchmarks.counting import kernels
        >>> x = mx.ones(8)
        >>> mx.eval(x)
        >>> kernels([mx.sum(mx.exp(x).reshape(2, 4))])
        Counter({'Exp': 1, 'Sum': 1})
    """
    graph = io.StringIO()
    mx.export_to_dot(graph, [x for _, x in tree_flatten(outputs)])
    names = Counter(_NODE.findall(graph.getvalue()))
    # A name may carry an argument: "View uint32".
    return Counter({k: n for k, n in names.items() if k.split()[0] not in VIEWS})


def peak_bytes(run: Callable[[], None], repeats: int = 3) -> int:
    """Return the most bytes that were alive while ``run`` ran.

    The largest of some runs: the CPU backend frees a buffer when its thread is
    done with it, which may be earlier or later.
    """
    run()
    most = 0
    for _ in range(repeats):
        mx.synchronize()
        mx.reset_peak_memory()
        run()
        mx.synchronize()
        most = max(most, mx.get_peak_memory())
    return most
