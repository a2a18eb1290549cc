"""``compile_step``: ``mx.compile`` for training steps that can fail or be skipped."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import mlx.core as mx

from .core.notices import SkipWatch, WarnOnce
from .core.trees import restore, snapshot


def compile_step(step: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Compile a training step that reads and replaces the arrays in ``state``.

    Like ``mx.compile(step, inputs=state, outputs=state)``, with two additions. If the
    step raises, ``state`` and the random state are restored; MLX would leave unusable
    placeholders in them. If ``state`` includes a scaler, the compiled step also warns
    about 50 consecutive skipped steps and about a very small loss scale. It reads only
    values that are at least 50 steps old, so normally nothing waits for the device.

    Args:
        step (Callable): The training step.
        state (Any): A list or dict of all state that the step changes, such as
            ``[model.state, optimizer.state, mx.random.state]``, and ``scaler.state``
            if the step calls a ``GradScaler`` itself.

    Returns:
        Callable: The compiled step.

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
    dicts = [tree for tree, _ in snapshot(state) if isinstance(tree, dict)]
    scaler_states = [tree for tree in dicts if "consecutive_skips" in tree]
    watched = [(tree, SkipWatch()) for tree in scaler_states]
    stages = [tree.stages for tree in scaler_states if hasattr(tree, "stages")]
    # Shared, so that several scalers that skip the same steps warn once.
    warn_once = WarnOnce()

    @wraps(step)
    def compiled_step(*args: Any, **kwargs: Any) -> Any:
        random_state: Any = mx.random.state
        saved, key = snapshot(state, *stages), random_state[0]
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            restore(saved)
            # Inside another trace, the key is a placeholder and cannot be read.
            with suppress(RuntimeError):
                first, second = key.tolist()
                mx.random.seed(first << 32 | second)
            raise
        for scaler_state, watch in watched:
            watch.look(scaler_state, warn_once)
        return result

    return compiled_step
