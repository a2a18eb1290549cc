"""Tell whether arrays belong to a function that is being traced, without waiting."""

import threading

import mlx.core as mx


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


def have_values(*arrays: mx.array) -> bool:
    """Tell whether arrays can be evaluated, and start it; call outside of any trace.

    False for what a compiled function left behind that did not list it as its output.
    """
    try:
        mx.async_eval(*arrays)
    except (RuntimeError, ValueError):
        return False
    return True
