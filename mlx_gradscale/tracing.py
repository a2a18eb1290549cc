"""Evaluate arrays where MLX lets one."""

from typing import Any

import mlx.core as mx


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
