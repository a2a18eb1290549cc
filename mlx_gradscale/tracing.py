"""What can be told and done while MLX traces a function, without waiting."""

import io
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

# Far more than most models have leaves: a few hundred are merged in no time.
_USES = 512


class _Runs(threading.local):
    count = 0


_runs = _Runs()


@mx.compile
def _probe(x: mx.array) -> mx.array:
    _runs.count += 1
    return x


def _runs_python(x: mx.array) -> bool:
    # MLX runs a compiled function in Python once for each shape and dtype, and again
    # only with arrays that are being traced; or always, with compiling switched off.
    _probe(x)
    before = _runs.count
    _probe(x)
    return _runs.count > before


def is_traced(x: mx.array) -> bool:
    """Tell whether ``x`` is part of a function that is being compiled.

    Outside of ``mx.grad``: inside, all that it is given is being traced too.
    """
    # An empty slice, or each new shape would be compiled once.
    empty = x.reshape(-1)[:0]
    return _runs_python(empty) and not _runs_python(mx.zeros(0, x.dtype))


def broadcasts(scalar: mx.array) -> Callable[[tuple[int, ...]], mx.array]:
    """Return a function that broadcasts ``scalar`` to a shape.

    For what every leaf of a tree is combined with. See :func:`renewed`.
    """
    made: dict[tuple[int, ...], mx.array] = {}
    scalars, last = renewed(scalar), scalar

    def broadcast(shape: tuple[int, ...]) -> mx.array:
        nonlocal last
        current = next(scalars)
        if current is not last:
            last = current
            made.clear()
        if shape not in made:
            made[shape] = mx.broadcast_to(current, shape)
        return made[shape]

    return broadcast


def renewed(array: mx.array) -> Iterator[mx.array]:
    """Yield an array for one leaf of a tree after the other.

    The work of ``mx.compile`` grows with the square of how often an array is used, so
    that it is the same one for only so many leaves, and then another in the same
    memory.
    """
    while True:
        yield from repeat(array, _USES)
        array = mx.depends(array, array)


def have_values(*arrays: mx.array) -> bool:
    """Tell whether arrays can be evaluated, and start it; call outside of any trace.

    False for what a compiled function left behind that did not list it as its output.
    """
    try:
        mx.async_eval(*arrays)
    except (RuntimeError, ValueError):
        return False
    return True


def evaluate_unless_traced(*trees: Any) -> bool:
    """Evaluate all arrays; return False, with nothing done, while MLX traces them.

    Inside of ``mx.compile``, that is, where they have no values yet. Inside of
    ``mx.grad`` they have.
    """
    try:
        mx.eval(*trees)
    except (ValueError, RuntimeError) as error:
        # An error of its own for what is traced, and one for what depends on that. Any
        # other is of the computation, a file that is gone, say.
        if not str(error).startswith("[eval] Attempting to eval an array"):
            raise
        return False
    return True


def not_constant(arrays: dict[str, mx.array], tree: Any) -> dict[str, mx.array]:
    """Return arrays that ``mx.compile`` takes for results of what is in ``tree``.

    A constant of one element is printed into the kernel: before MLX 0.32 not with all
    its digits, and there one that is an output too ends in ``_Map_base::at``.
    """
    leaves = [x for _, x in tree_flatten(tree)]
    if not arrays or not leaves:
        return arrays
    values = mx.depends(list(arrays.values()), leaves[:1])
    return dict(zip(arrays, values, strict=True))


def refuse_shapeless() -> None:
    """Raise inside ``mx.compile(shapeless=True)``.

    MLX cannot infer the shape of what a function with a gradient of its own returns,
    and says so in words that help nobody. Without loss scaling a step is not right in
    there either: with another batch size it corrupts memory (0.32.4).
    """
    # Only there does MLX broadcast what has the shape already. There is nothing to ask.
    one, graph = mx.array([0.0]), io.StringIO()
    mx.export_to_dot(graph, mx.broadcast_arrays(one, one))
    if "Broadcast" in graph.getvalue():
        raise ValueError(
            "A step with loss scaling cannot be in mx.compile(shapeless=True): leave "
            "out shapeless. Pad batches to few shapes, each of which is compiled once."
        )
