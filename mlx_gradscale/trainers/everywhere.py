"""``everywhere()``: loss scaling in a trainer that makes its own optimizer and loss.

Inside, three things of MLX are replaced, in all threads:

- A gradient (``nn.value_and_grad``, ``mx.value_and_grad``, ``mx.grad``) is computed
  from a scaled loss and returned unscaled, in float32. It moves the scale there and
  then, so the scale adapts whatever the trainer does with the gradient.
- A step (``Optimizer.update``, ``apply_gradients``) goes through a ``GuardedOptimizer``
  with master weights, beside the trainer's optimizer. That one stays as it is: its
  state, its pickles and its learning rate are the trainer's.
- ``mx.compile`` also lists our state where a function computes gradients or steps.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import SGD, MultiOptimizer, Optimizer
from mlx.utils import tree_map

from ..core.masters import HALF
from ..core.notices import warn_user
from ..core.optimizer import GuardedOptimizer
from ..core.scaler import GradScaler
from ..core.trees import CONTAINERS, leaves
from .host_compile import HostCompiled, busy, leave_trace_unless, thread
from .host_state import Gradients, Steps

_Function = Callable[..., Any]


class Everywhere:
    """What happens inside one ``with everywhere()``."""

    def __init__(
        self,
        make_scaler: Callable[[], GradScaler] | None,
        compute_dtype: mx.Dtype | None,
        float32_layers: Any,
        arguments: dict[str, Any],
    ):
        self.compute_dtype = compute_dtype
        self.state: list[Any] = []
        self._make_scaler = make_scaler
        self._float32_layers = float32_layers
        self._arguments = arguments
        self._has_warned = False
        self._gradients: list[Gradients] = []
        self._steps: list[Steps] = []
        # Raises here if an argument is wrong, not in the trainer's first step.
        GuardedOptimizer(SGD(0.0), **arguments)

    @property
    def scalers(self) -> list[GradScaler]:
        """One for each model, and one for all parameter trees that are no model."""
        return [each.scaler for each in self._gradients]

    def report(self) -> list[str]:
        """Return a line for each scaler and each optimizer that was used."""
        counts = ((each.name, *each.n_steps()) for each in self._steps)
        lines = [f"{name}: {n} steps applied, {bad} skipped" for name, n, bad in counts]
        return [each.report() for each in self._gradients] + lines

    def problems(self) -> list[str]:
        """Return a sentence for whatever was not trained, or not guarded."""
        counts = ((each.name, *each.n_steps()) for each in self._steps)
        found = [
            f"Nothing was trained: all {skipped} steps of {name} were skipped, because "
            "their gradients were not finite. "
            "mlx_gradscale.diagnostics.explain_overflow says where it begins."
            for name, applied, skipped in counts
            if not applied
        ]
        if self._gradients and not self._steps:
            found.append(
                "Gradients were computed, but no optimizer of mlx.optimizers took a "
                "step: whatever updates the weights is not guarded."
            )
        return found

    def has_work(self, model: Any) -> bool:
        """Return whether a model computes in half precision, and warn once if not."""
        if self.compute_dtype is not None or _has_half(model):
            return True
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                "This model has no half-precision parameters, so there is nothing to "
                "scale. Cast it with model.set_dtype(mx.float16), or use compute_dtype."
            )
        return False

    def differentiate(
        self, model: Any, fn: _Function, compute: _Function, args: Any, kwargs: Any
    ) -> Any:
        """Return ``compute(scaler, *args)``, and move the scale by its gradients."""
        owner = self if model is None else model
        found = next((x for x in self._gradients if x.owner() is owner), None)
        leave_trace_unless(found is not None, self)
        with busy():
            if found is None:
                found = Gradients(owner, self._new_scaler(model, fn, args, kwargs))
                self._gradients.append(found)
                self._list_state()
            value, gradients = compute(found.scaler, *args, **kwargs)
            if not thread.is_rehearsing:
                found.count(gradients)
                self.after_call(found.state)
        return value, gradients

    def _new_scaler(
        self, model: Any, fn: _Function, args: Any, kwargs: Any
    ) -> GradScaler:
        from .. import find_float32_layers, float32_layers
        from .first_scale import find_first_scale

        fn, dtype = partial(fn, **kwargs), self.compute_dtype
        where = self._float32_layers if model is not None else None
        if where == "auto":
            where = find_float32_layers(model, fn, [args], compute_dtype=dtype)
        if where is not None:
            float32_layers(model, where)
        if self._make_scaler is not None:
            return self._make_scaler()
        scaler = GradScaler(2.0**10)
        if model is not None:
            find_first_scale(scaler, model, fn, *args, compute_dtype=dtype)
        return scaler

    def step(self, optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
        """Return the new parameters, or the old ones; in a rehearsal, the old ones."""
        trained = tree_map(lambda _, parameter: parameter, gradients, parameters)
        steps = next((x for x in self._steps if x.owner() is optimizer), None)
        is_ready = steps is not None and steps.is_ready(trained)
        leave_trace_unless(is_ready, self)
        with busy():
            if steps is None:
                steps = Steps(optimizer, self._arguments)
                self._steps.append(steps)
            if not is_ready:
                steps.prepare(trained)
                self._list_state()
            if thread.is_rehearsing:
                return trained
            result = steps.take(gradients, parameters)
            if not thread.traces:
                mx.async_eval(steps.counters)
        return result

    def _list_state(self) -> None:
        parts: list[Any] = [*self._gradients, *self._steps]
        self.state[:] = [part.state for part in parts]

    def after_call(self, state: Any) -> None:
        """Outside of a trace, evaluate our state; warn about a run that is stuck."""
        if not thread.traces:
            # The trainer does not, and unread counters would become a long graph.
            mx.async_eval(state)
            for each in self._gradients:
                each.watch.look(each.scaler.state, warn_user)


def _has_half(tree: Any) -> bool:
    return any(isinstance(x, mx.array) and x.dtype in HALF for x in leaves(tree))


_lock = threading.Lock()
_open: list[Everywhere] = []
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def everywhere(
    make_scaler: Callable[[], GradScaler] | None = None,
    *,
    compute_dtype: mx.Dtype | None = None,
    float32_layers: Any = None,
    **arguments: Any,
) -> Iterator[Everywhere]:
    """Train with loss scaling in a trainer that makes its own optimizer and loss.

    Inside, gradients of half-precision models come from a scaled loss, unscaled and in
    float32, and every optimizer of ``mlx.optimizers`` keeps float32 master weights and
    skips steps that are not finite. This holds in all threads, for optimizers that were
    made earlier, and in functions that the trainer compiles. Afterwards everything is
    as before. It warns at the end if nothing was trained.

    It does not reach a trainer that updates weights without an optimizer of
    ``mlx.optimizers``, compiled its step before, or imported ``compile`` or
    ``value_and_grad`` from ``mlx.core`` by name before.

    Args:
        make_scaler (Callable, optional): Returns the scaler for each model. Default: a
            ``GradScaler`` whose scale is found on the first batch.
        compute_dtype (Dtype, optional): Compute in this dtype with models in float32.
            Default: the model's own dtype.
        float32_layers (Any, optional): Layers that compute in float32, as for
            :func:`mlx_gradscale.float32_layers`, or ``"auto"`` to find them on the
            first batch. Default: ``None``.
        **arguments (Any): ``max_grad_norm`` and ``masters``, as for a
            :class:`LossScaleOptimizer`.

    Yields:
        Everywhere: Its ``scalers`` are the scalers in use, its ``report()`` says how
        many gradients overflowed and how many steps were taken.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from mlx_gradscale import everywhere
        >>> def train(model):
        ...     optimizer = optim.AdamW(1e-3)
        ...     loss_fn = lambda x: model(x).astype(mx.float32).mean()
        ...     loss, grads = nn.value_and_grad(model, loss_fn)(mx.ones((2, 4)))
        ...     optimizer.update(model, grads)
        >>> with everywhere(compute_dtype=mx.float16) as here:
        ...     train(nn.Linear(4, 1))
        >>> here.report()[-1]
        'AdamW: 1 steps applied, 0 skipped'
    """
    here = Everywhere(make_scaler, compute_dtype, float32_layers, arguments)
    with _lock:
        if not _open:
            _replace_functions()
        _open.append(here)
    try:
        yield here
    finally:
        with _lock:
            _open.remove(here)
            while _originals and not _open:
                setattr(*_originals.pop())
    for sentence in here.problems():
        warn_user(sentence)


def _replace_functions() -> None:
    tree_gradient = partial(_tree_gradient, mx.value_and_grad)
    for owner, name, make_replacement in (
        (mx, "compile", _compile),
        (mx, "grad", partial(tree_gradient, False)),
        (mx, "value_and_grad", partial(tree_gradient, True)),
        (nn, "value_and_grad", _model_gradient),
        (nn.utils, "value_and_grad", _model_gradient),
        (Optimizer, "update", _update),
        (Optimizer, "apply_gradients", _apply_gradients),
        (MultiOptimizer, "apply_gradients", _apply_gradients),
    ):
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, wraps(original)(make_replacement(original)))


def _current() -> Everywhere | None:
    return _open[-1] if _open and not thread.is_busy else None


def _compile(original: _Function) -> _Function:
    def compile_fn(fun: _Function, *args: Any, **kwargs: Any) -> Any:
        if _current() is None:
            return original(fun, *args, **kwargs)
        return HostCompiled(original, _current, fun, *args, **kwargs)

    return compile_fn


def _is_scaled(fn: Any) -> bool:
    """Return whether this comes from ``scale_loss()`` or ``value_and_grad()``."""
    module = getattr(fn, "__globals__", {}).get("__name__", "")
    return str(module).startswith("mlx_gradscale.core")


def _model_gradient(original: _Function) -> _Function:
    def value_and_grad(model: nn.Module, fn: _Function) -> _Function:
        plain = original(model, fn)

        def compute(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            dtype = _open[-1].compute_dtype
            return scaler.value_and_grad(model, fn, dtype)(*args, **kwargs)

        @wraps(fn)
        def value_and_grad_fn(*args: Any, **kwargs: Any) -> Any:
            here = _current()
            if here is None or _is_scaled(fn) or not here.has_work(model):
                with busy():
                    return plain(*args, **kwargs)
            return here.differentiate(model, fn, compute, args, kwargs)

        return value_and_grad_fn

    return value_and_grad


def _tree_gradient(
    value_and_grad: _Function, has_value: bool, original: _Function
) -> _Function:
    def transform(fun: _Function, *options: Any, **named_options: Any) -> _Function:
        plain = original(fun, *options, **named_options)
        is_plain = bool(options or named_options) or _is_scaled(fun)

        def compute(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            return value_and_grad(scaler.scale_loss(fun))(*args, **kwargs)

        @wraps(fun)
        def gradient_fn(*args: Any, **kwargs: Any) -> Any:
            here = _current()
            tree = args[0] if args and isinstance(args[0], CONTAINERS) else ()
            if here is None or is_plain or not _has_half(tree):
                return plain(*args, **kwargs)
            value, gradients = here.differentiate(None, fun, compute, args, kwargs)
            return (value, gradients) if has_value else gradients

        return gradient_fn

    return transform


def _apply_gradients(original: _Function) -> _Function:
    def apply_gradients(self: Optimizer, gradients: Any, parameters: Any) -> Any:
        here, caller = _current(), str(sys._getframe(1).f_globals.get("__name__"))
        # A LossScaleOptimizer that the trainer uses steps its inner optimizer.
        is_guarded = caller.startswith("mlx_gradscale.core")
        if here is None or is_guarded or not here.has_work(parameters):
            with busy():
                return original(self, gradients, parameters)
        return here.step(self, gradients, parameters)

    return apply_gradients


def _update(original: _Function) -> _Function:
    def apply(self: Optimizer, gradients: Any, model: nn.Module) -> Any:
        return original(self, model, gradients)

    def update(self: Optimizer, model: nn.Module, gradients: Any) -> None:
        new = _apply_gradients(apply)(self, gradients, model)
        if new is not None:
            model.update(new)

    return update
