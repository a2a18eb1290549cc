"""Compile an optimizer's step in an eager loop, where it does the same compiled."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import Optimizer

from ..state_tree import flatten, leaves_of
from .mlx_optimizers import NOT_SETTINGS, is_mlx_own

# What each optimizer's settings were last, the function that was compiled for them if
# one was, and whether they stayed for a second step. Held by the optimizer's life
# alone: nothing here may keep it, or a model in its closures, alive.
_steppers: weakref.WeakKeyDictionary[
    Optimizer, tuple[Any, Callable[..., Any] | None, bool]
] = weakref.WeakKeyDictionary()


def autocompiled(
    run: Callable[..., Any], optimizer: Optimizer, parts: list[tuple[Optimizer, Any]]
) -> Callable[..., Any]:
    """Return ``run`` for this optimizer, compiled.

    From the first step on: a compiled step may round otherwise than a plain one, and a
    run that is resumed goes on as if it had not stopped. Only if settings change after
    a single step is it left plain until they stay: compiling takes longer than a step.

    Args:
        run (Callable): Takes the optimizer and arrays, and depends on nothing else than
            these and the settings that the optimizer has as Python values.
        optimizer (Optimizer): The optimizer; it is not kept alive.
        parts (list): Each single optimizer in it, with the tree that it steps.
    """
    mark = _fingerprint(parts)
    if mark is None:
        return partial(run, optimizer)
    last_mark, compiled, stayed = _steppers.get(optimizer, (None, None, True))
    stays = mark == last_mark
    if not stays:
        compiled = None
    if compiled is None and (stays or stayed):
        owner = weakref.ref(optimizer)
        compiled = mx.compile(lambda *inputs: run(owner(), *inputs))
    _steppers[optimizer] = (mark, compiled, stays)
    return compiled or partial(run, optimizer)


def _fingerprint(parts: list[tuple[Optimizer, Any]]) -> list[Any] | None:
    """Return what a trace of the optimizers depends on besides arrays, or None.

    None where that cannot be known. Only MLX's own classes read nothing but their
    attributes and their state: another may read a global or draw random numbers, and
    would be frozen in a function that its user did not compile.
    """
    marks = []
    for part, tree in parts:
        settings = [x for k, x in vars(part).items() if k not in NOT_SETTINGS]
        settings += [x for x in leaves_of(part.state) if not isinstance(x, mx.array)]
        if not is_mlx_own(part) or not _is_plain(settings):
            return None
        # By repr, because True, 1 and 1.0 are equal and 1e-8 is exact there.
        marks.append((type(part), repr(settings), [p for p, _ in flatten(tree)]))
    return marks


_PLAIN = (type(None), bool, int, float, str, mx.Dtype, np.generic)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
