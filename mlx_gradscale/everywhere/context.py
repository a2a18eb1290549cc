"""``with everywhere():`` and what is different inside it."""

import copyreg
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..optimizer import LossScaleOptimizer
from ..scaler import GradScaler
from ..scoped import Scoped
from ..wrapping import forget_wrapper, has_wrapper

# A thread that is started inside has a context of its own, in which this is None.
_active: "Scoped[Everywhere | None]" = Scoped("everywhere", None)
# Set while an optimizer is made, which may make others that are parts of it.
_making = Scoped("making", False)
_STEPS = ("update", "apply_gradients")
_PLAIN = "without_everywhere"
_lock = threading.Lock()
_inside: "dict[int, Everywhere]" = {}
_plain_value_and_grad = nn.value_and_grad


class Everywhere:
    """What was made inside a ``with everywhere()``.

    Args:
        make_scaler (Callable): Returns the scaler of each optimizer.
        compute_dtype (Dtype or None): What models are differentiated in.
        arguments (dict): The others of each ``LossScaleOptimizer``.
        outer (Everywhere, optional): The one around.
    """

    def __init__(
        self,
        make_scaler: Callable[[], GradScaler],
        compute_dtype: mx.Dtype | None,
        arguments: dict[str, Any],
        outer: "Everywhere | None",
    ):
        self.compute_dtype = compute_dtype
        self._make_scaler = make_scaler
        self._arguments = arguments
        self._outer = outer
        self._made: list[weakref.ref[LossScaleOptimizer]] = []
        # Which optimizer the gradients of a model went to.
        self._pairs: list[
            tuple[weakref.ref[nn.Module], weakref.ref[LossScaleOptimizer]]
        ] = []

    @property
    def optimizers(self) -> list[LossScaleOptimizer]:
        """Those that were made inside and are still there, in their order."""
        alive = (made() for made in self._made)
        return [optimizer for optimizer in alive if optimizer is not None]

    def wrap(self, optimizer: Optimizer) -> LossScaleOptimizer:
        """Return a new optimizer in a ``LossScaleOptimizer``."""
        scaler = self._make_scaler()
        wrapper = LossScaleOptimizer(optimizer, scaler, **self._arguments)
        self._made.append(weakref.ref(wrapper))
        return wrapper

    def optimizer_of(self, model: nn.Module) -> LossScaleOptimizer | None:
        """Return the optimizer that steps this model, or None if none was made yet.

        The one that did last, else the newest that has no model yet, else the newest.
        Where that is another, its ``update`` raises.
        """
        for whose, optimizer in self._pairs:
            if whose() is model and optimizer() is not None:
                return optimizer()
        made = self.optimizers
        if not made:
            return self._outer.optimizer_of(model) if self._outer else None
        taken = [optimizer() for _, optimizer in self._pairs]
        free = [each for each in made if not any(each is other for other in taken)]
        chosen = (free or made)[-1]
        self._pairs.append((weakref.ref(model), weakref.ref(chosen)))
        return chosen


@contextmanager
def everywhere(
    make_scaler: Callable[[], GradScaler] = GradScaler,
    *,
    compute_dtype: mx.Dtype | None = None,
    **arguments: Any,
) -> Iterator[Everywhere]:
    """Train with loss scaling in a trainer that makes its own optimizer and loss.

    Inside, ``nn.value_and_grad`` gives true gradients of a scaled loss, in float32,
    and every optimizer that is made is a ``LossScaleOptimizer``: it keeps float32
    masters of half-precision weights, and skips steps that are not finite. An optimizer
    that was made before is refused, because its weights would become float32.

    Only this thread is concerned. Afterwards everything is as before, and what was
    made inside goes on as it was. A trainer that differentiates by ``mx.grad`` or
    ``mx.value_and_grad``, or that has imported ``value_and_grad`` from ``mlx.nn`` by
    name before, is not reached; its first step says so.

    Args:
        make_scaler (Callable): Returns a scaler for each optimizer. Default: a new
            ``GradScaler()``.
        compute_dtype (Dtype, optional): Compute in this dtype with a model in float32.
            For a trainer that changes weights itself, by less than half precision can
            hold: one that decays them by hand, say. Default: the model's own.
        **arguments (Any): ``max_grad_norm`` and the others of a
            :class:`LossScaleOptimizer`.

    Yields:
        Everywhere: Its ``optimizers`` are those that were made.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import everywhere
        >>> def train(model):
        ...     optimizer = optim.AdamW(1e-3)
        ...     loss_and_grad = nn.value_and_grad(model, lambda x: model(x).mean())
        ...     loss, grads = loss_and_grad(mx.ones((2, 4)))
        ...     optimizer.update(model, grads)
        ...     return optimizer
        >>> with everywhere():
        ...     optimizer = train(nn.Linear(4, 1))
        >>> optimizer.scaler.get_scale(), optimizer.scaler.last_step_applied
        (65536.0, array(True, dtype=bool))
    """
    here = Everywhere(make_scaler, compute_dtype, arguments, _active.get())
    try:
        _enter(here)
        with _active.set_to(here):
            yield here
    finally:
        _leave(here)


# What Ctrl-C leaves undone in these two does nothing outside of everywhere(), and the
# next one does the rest.
def _enter(here: Everywhere) -> None:
    global _plain_value_and_grad
    with _lock:
        _inside[id(here)] = here
        if Optimizer.__new__ is object.__new__:
            # For good: Python refuses arguments to a class whose __new__ was deleted.
            Optimizer.__new__ = _new  # type: ignore[method-assign, assignment]
        if nn.value_and_grad is not value_and_grad:
            _plain_value_and_grad = nn.value_and_grad
            nn.value_and_grad = nn.utils.value_and_grad = value_and_grad
        for name in _STEPS:
            step = getattr(Optimizer, name)
            if not hasattr(step, _PLAIN):
                setattr(Optimizer, name, _refusing(step))


def _leave(here: Everywhere) -> None:
    with _lock:
        _inside.pop(id(here), None)
        if not _inside:
            nn.value_and_grad = nn.utils.value_and_grad = _plain_value_and_grad
            for name in _STEPS:
                step = getattr(Optimizer, name)
                setattr(Optimizer, name, getattr(step, _PLAIN, step))


def _new(cls: type[Optimizer], *args: Any, **kwargs: Any) -> Optimizer:
    here = _active.get()
    optimizer = object.__new__(cls)
    if here is None or _making.get() or issubclass(cls, LossScaleOptimizer):
        return optimizer
    if not _is_construction(cls, args, kwargs):
        return optimizer
    with _making.set_to(True):
        # One of several, as in a MultiOptimizer, is a part.
        args, kwargs = _unwrapped(args, here), _unwrapped(kwargs, here)
        optimizer.__init__(*args, **kwargs)  # type: ignore[misc]
        # No instance of cls, so that Python does not initialise it again.
        return here.wrap(optimizer)


def _is_construction(cls: type[Optimizer], args: Any, kwargs: Any) -> bool:
    """Tell whether this is a call of the class, not a copy of what is made already."""
    if sys._getframe(2).f_code is copyreg.__newobj__.__code__:  # type: ignore[attr-defined]
        return False
    try:
        # pickle gives no arguments, nor does a __new__ of the class's own.
        inspect.signature(cls.__init__).bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def _unwrapped(given: Any, here: Everywhere) -> Any:
    if type(given) in (list, tuple):
        return type(given)(_unwrapped(each, here) for each in given)
    if type(given) is dict:
        return {key: _unwrapped(each, here) for key, each in given.items()}
    if any(given is made for made in here.optimizers):
        here._made = [made for made in here._made if made() is not given]
        forget_wrapper(given.optimizer)  # to be in another
        return given.optimizer
    return given


def value_and_grad(model: nn.Module, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Take the place of ``nn.value_and_grad``."""
    plain: Callable[..., Any] = _plain_value_and_grad(model, fn)
    here = _active.get()
    if here is None or hasattr(fn, "has_scaled_gradient"):
        return plain
    scaled: list[tuple[weakref.ref[Any], Callable[..., Any]]] = []

    # Which optimizer it is for is known when it is called: it may be made later.
    @wraps(fn)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
        optimizer = here.optimizer_of(model)
        if optimizer is None:
            return plain(*args, **kwargs)
        if not scaled or scaled[0][0]() is not optimizer:
            true = optimizer.value_and_grad(model, fn, here.compute_dtype)
            scaled[:] = [(weakref.ref(optimizer), true)]
        return scaled[0][1](*args, **kwargs)

    return value_and_grad_fn


def _refusing(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def refusing_step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _active.get() is not None and not has_wrapper(self):
            raise RuntimeError(
                f"This {type(self).__name__} was made before everywhere() began, or by "
                "a __new__ of its own, and would step without a guard: make it inside, "
                "or wrap it in a LossScaleOptimizer yourself."
            )
        return step(self, *args, **kwargs)

    setattr(refusing_step, _PLAIN, step)
    return refusing_step
