"""Refuse a gradient that would be scaled twice."""

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import mlx.core as mx


class _Loss:
    """One that is being computed: the frame that does it holds it."""


class _UnderWay(threading.local):
    """The losses whose gradient is to be scaled that are computed right now.

    Weakly, so that one goes with its frame, also where Ctrl-C comes so late that it is
    not taken out.
    """

    def __init__(self) -> None:
        self.losses: weakref.WeakSet[_Loss] = weakref.WeakSet()


_under_way = _UnderWay()


def watched(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loss_fn``, whose gradient is to be scaled, known to be while it runs."""

    @wraps(loss_fn)
    def watched_loss_fn(*args: Any, **kwargs: Any) -> Any:
        loss = _Loss()
        _under_way.losses.add(loss)
        try:
            return loss_fn(*args, **kwargs)
        finally:
            _under_way.losses.discard(loss)

    return watched_loss_fn


# What scale() returned last, by id, as long as it lives: an mx.array has no hash.
_scaled: "weakref.WeakValueDictionary[int, mx.array]" = weakref.WeakValueDictionary()


def is_scaled_now(x: mx.array) -> mx.array:
    """Return ``x``, a scaled loss, known to be one."""
    _scaled[id(x)] = x
    return x


def scaled_once(x: mx.array) -> mx.array:
    """Return what is about to be scaled; its gradient is refused if that is scaled too.

    A loss that scale() returned is refused at once.

    Inside of a watched loss something may be scaled all the same if its gradient is
    taken in there as well, for a gradient penalty, say: that is once. The gradient of
    the whole loss would be scaled twice.
    """
    if _scaled.get(id(x)) is x:
        raise RuntimeError(
            "This loss is scaled already: scale(scale(loss)) scales it twice. Call "
            "scale() once."
        )
    return cast(mx.array, _inside(x)) if _under_way.losses else x


@mx.custom_function
def _inside(x: mx.array) -> mx.array:
    return x


@_inside.vjp
def _inside_vjp(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
    if not _under_way.losses:
        raise RuntimeError(
            "The gradient is scaled twice: the loss function that value_and_grad() or "
            "scale_loss() was given calls scale(), or a function that scale_loss() "
            "returned. Use the plain loss in there."
        )
    return cotangent
