"""``mx.compile`` for a training step, with everything put back if its trace raises."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from .state_tree import copies, restore


def compile_step(step: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Compile a training step over the state that it reads and writes.

    It is ``mx.compile(step, inputs=state, outputs=state)``, except that an exception or
    Ctrl-C while the step is traced leaves model, optimizer and scaler as they were:
    MLX leaves placeholders in them, with which nothing works any more. So a notebook
    cell can be mended and run again.

    Args:
        step (Callable): The step.
        state (Any): A list or dict of all that it changes: ``[model.state,
            optimizer.state, mx.random.state]``, with ``scaler.state`` for a
            ``GradScaler``.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_gradscale import compile_step
        >>> state = {"n": mx.array(1)}
        >>> def step(k):
        ...     state["n"] = state["n"] + k
        ...     return state["n"] * 10
        >>> compile_step(step, state)(mx.array(2))
        array(30, dtype=int32)
    """
    compiled = mx.compile(step, inputs=state, outputs=state)

    @wraps(step)
    def compiled_step(*args: Any, **kwargs: Any) -> Any:
        before = list(copies(state))
        try:
            return compiled(*args, **kwargs)
        except BaseException:
            restore(before)
            raise

    return compiled_step
