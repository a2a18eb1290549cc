"""``everywhere()``: loss scaling in a trainer that creates its own optimizer and loss.

Inside the context, three parts of MLX are replaced, in all threads:

- Gradients (``nn.value_and_grad``, ``mx.value_and_grad``, ``mx.grad``) are computed
  from a scaled loss and returned unscaled, in float32. They update the scale
  immediately, so it adapts no matter what the trainer does with the gradients.
- Steps (``Optimizer.update``, ``apply_gradients``) go through a ``GuardedOptimizer``
  with master weights, alongside the trainer's optimizer, which does not change: its
  state, its pickles and its learning rate belong to the trainer.
- ``mx.compile`` also captures our state if a function computes gradients or steps.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from . import host

_Function = Callable[..., Any]


@dataclass(eq=False)
class Everywhere:
    """The scalers and guarded steps of one ``with everywhere()`` block."""

    make_scaler: Callable[[], GradScaler] | None
    compute_dtype: mx.Dtype | None
    float32_layers: Any
    arguments: dict[str, Any]
    #: The state that compiled functions have to capture.
    state: list[Any] = field(default_factory=list)
    _has_warned: bool = False
    _gradients: list[host.Gradients] = field(default_factory=list)
    _steps: list[host.Steps] = field(default_factory=list)

    @property
    def scalers(self) -> list[GradScaler]:
        """One scaler per model, and one for all parameter trees without a model."""
        return [each.scaler for each in self._gradients]

    def report(self) -> list[str]:
        """Return one line for each scaler and each optimizer in use."""
        counts = ((each.name, *each.n_steps()) for each in self._steps)
        lines = [f"{name}: {n} steps applied, {bad} skipped" for name, n, bad in counts]
        return [each.report() for each in self._gradients] + lines

    def warn_at_end(self) -> None:
        """Warn if an optimizer did not train, or if no step was guarded."""
        for each in self._steps:
            warn_if_untrained(each.name, *each.n_steps())
        if self._gradients and not self._steps:
            warn_user(
                "Gradients were computed, but no optimizer of mlx.optimizers took a "
                "step: whatever updates the weights is not guarded."
            )

    def has_work(self, tree: Any, is_model: bool = True) -> bool:
        """Return whether this runs in half precision; warn once if a model does not."""
        has_half = any(
            isinstance(x, mx.array) and x.dtype in HALF for x in leaves(tree)
        )
        if has_half or (is_model and self.compute_dtype is not None):
            return True
        if is_model and not self._has_warned:
            self._has_warned = True
            warn_user(
                "This model has no half-precision parameters, so there is nothing to "
                "scale. Cast it with model.set_dtype(mx.float16), or use compute_dtype."
            )
        return False

    def differentiate(
        self, model: Any, fn: _Function, scaled: _Function, args: Any, kwargs: Any
    ) -> Any:
        """Return the loss and unscaled gradients, and update the scale from them.

        ``scaled`` returns the ``value_and_grad`` of ``fn`` for a scaler and a dtype.
        Without a model, ``fn`` is differentiated with respect to its first argument.
        """
        owner = self if model is None else model
        found = next((x for x in self._gradients if x.owner() is owner), None)
        host.leave_trace_unless(found is not None, self)
        with host.busy():
            if found is None:
                scaler = self._new_scaler(model, partial(fn, **kwargs), args)
                found = host.Gradients(owner, scaler)
                self._gradients.append(found)
                self._list_state()
            compute = scaled(found.scaler, self.compute_dtype)
            value, gradients = compute(*args, **kwargs)
            found.count(gradients)
            self.after_call(found.state)
        return value, gradients

    def _new_scaler(self, model: Any, fn: _Function, batch: Any) -> GradScaler:
        from .. import find_float32_layers, float32_layers

        dtype, where = self.compute_dtype, self.float32_layers
        if where is not None and model is not None:
            if where == "auto":
                where = find_float32_layers(model, fn, [batch], compute_dtype=dtype)
            float32_layers(model, where)
        if self.make_scaler is not None:
            return self.make_scaler()
        scaler = GradScaler(2.0**10)
        if model is not None:
            find_first_scale(scaler, model, fn, *batch, compute_dtype=dtype)
        return scaler

    def step(self, optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
        """Return the new parameters, or the old ones if the step is skipped."""
        trained = tree_map(lambda _, parameter: parameter, gradients, parameters)
        steps = next((x for x in self._steps if x.owner() is optimizer), None)
        is_ready = steps is not None and steps.is_ready(trained)
        host.leave_trace_unless(is_ready, self)
        with host.busy():
            if steps is None:
                steps = host.Steps(optimizer, self.arguments)
                self._steps.append(steps)
            if not is_ready:
                steps.prepare(trained)
                self._list_state()
            result = steps.take(gradients, parameters)
            if not host.thread.traces:
                mx.async_eval(steps.state)
        return result

    def _list_state(self) -> None:
        parts: list[Any] = [*self._gradients, *self._steps]
        self.state[:] = [part.state for part in parts]

    def after_call(self, state: Any) -> None:
        """Outside a trace, evaluate our state and warn if every step is skipped."""
        if not host.thread.traces:
            # The trainer does not do this, and the graph of the counters would grow.
            mx.async_eval(state)
            for each in self._gradients:
                each.watch.look(each.scaler.state, warn_user)


def find_first_scale(
    scaler: GradScaler,
    model: nn.Module,
    loss_fn: _Function,
    *batch: Any,
    compute_dtype: mx.Dtype | None = None,
) -> None:
    """Find the scale on the first batch, so that a short run does not lose steps.

    Starting from 65536 and halving once per step, a run of 42 steps lost 13 of them. If
    no scale makes the loss finite, the scale stays; skipped steps are reported later.
    """
    from ..diagnostics import calibrate

    with suppress(ValueError):
        # A headroom of two powers, because later gradients may be four times as large.
        options: Any = {"compute_dtype": compute_dtype, "headroom": 2}
        scale = calibrate(scaler, model, loss_fn, *batch, **options)
        scaler.update(min(scale, 2.0**16))


def warn_if_untrained(name: str, applied: int, skipped: int) -> None:
    """Warn if every step of an optimizer was skipped."""
    if skipped and not applied:
        warn_user(
            f"Nothing was trained: all {skipped} steps of {name} were skipped, because "
            "their gradients were not finite. "
            "mlx_gradscale.diagnostics.explain_overflow says where it begins."
        )


_lock = threading.Lock()
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def everywhere(
    make_scaler: Callable[[], GradScaler] | None = None,
    *,
    compute_dtype: mx.Dtype | None = None,
    float32_layers: Any = None,
    **arguments: Any,
) -> Iterator[Everywhere]:
    """Add loss scaling to a trainer that creates its own optimizer and loss.

    Inside the context, gradients of half-precision models are computed from a scaled
    loss and returned unscaled in float32, and every ``mlx.optimizers`` optimizer keeps
    float32 master weights and skips non-finite steps. This applies to all threads, to
    existing optimizers, and to functions that the trainer compiles, whose first call
    runs uncompiled. On exit, MLX is restored, with a warning if nothing was trained.

    It does not affect a trainer that updates weights without an ``mlx.optimizers``
    optimizer, or that compiled its step or imported ``compile`` or ``value_and_grad``
    from ``mlx.core`` by name before entering the context.

    Args:
        make_scaler (Callable, optional): Returns the scaler for each model. Default: a
            ``GradScaler`` whose scale is found on the first batch.
        compute_dtype (Dtype, optional): Compute in this dtype for float32 models.
            Default: the model's own dtype.
        float32_layers (Any, optional): Layers that compute in float32, as for
            :func:`mlx_gradscale.float32_layers`, or ``"auto"`` to find them on the
            first batch. Default: ``None``.
        **arguments (Any): ``max_grad_norm`` and ``masters``, as for a
            :class:`LossScaleOptimizer`.

    Yields:
        Everywhere: ``scalers`` are the scalers in use; ``report()`` says how many
        gradients overflowed and how many steps were applied.

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
    # Raise here if an argument is invalid, not in the trainer's first step.
    GuardedOptimizer(SGD(0.0), **arguments)
    here = Everywhere(make_scaler, compute_dtype, float32_layers, arguments)
    with _lock:
        if not host.entered:
            _replace_functions()
        host.entered.append(here)
    try:
        yield here
    finally:
        with _lock:
            host.entered.remove(here)
            while _originals and not host.entered:
                setattr(*_originals.pop())
    here.warn_at_end()


def _replace_functions() -> None:
    for owner, name, make_replacement in (
        (mx, "compile", _compile),
        (mx, "grad", _grad),
        (mx, "value_and_grad", _tree_gradient),
        (nn, "value_and_grad", _model_gradient),
        (nn.utils, "value_and_grad", _model_gradient),
        (Optimizer, "update", _update),
        (Optimizer, "apply_gradients", _apply_gradients),
        (MultiOptimizer, "apply_gradients", _apply_gradients),
    ):
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, wraps(original)(make_replacement(original)))


def _is_core(namespace: dict[str, Any]) -> bool:
    """Return whether these globals belong to our own scalers and optimizers."""
    return str(namespace.get("__name__")).startswith("mlx_gradscale.core")


def _compile(original: _Function) -> _Function:
    def compile_fn(fun: _Function, *args: Any, **kwargs: Any) -> Any:
        if host.current() is None:
            return original(fun, *args, **kwargs)
        return host.Compiled(original, fun, *args, **kwargs)

    return compile_fn


def _model_gradient(original: _Function) -> _Function:
    def value_and_grad(model: nn.Module, fn: _Function) -> Any:
        def scaled(scaler: GradScaler, dtype: mx.Dtype | None) -> Any:
            return scaler.value_and_grad(model, fn, dtype)

        return _gradient(original(model, fn), model, fn, scaled)

    return value_and_grad


def _tree_gradient(original: _Function) -> _Function:
    def value_and_grad(fun: _Function, *options: Any, **named_options: Any) -> Any:
        def scaled(scaler: GradScaler, _: Any) -> Any:
            return original(scaler.scale_loss(fun))

        plain = original(fun, *options, **named_options)
        has_options = options or named_options
        return plain if has_options else _gradient(plain, None, fun, scaled)

    return value_and_grad


def _grad(original: _Function) -> _Function:
    def grad(fun: _Function, *options: Any, **named_options: Any) -> Any:
        if options or named_options:
            return original(fun, *options, **named_options)
        value_and_grad = mx.value_and_grad(fun)
        return wraps(fun)(lambda *args, **kwargs: value_and_grad(*args, **kwargs)[1])

    return grad


def _gradient(plain: _Function, model: Any, fn: _Function, scaled: _Function) -> Any:
    # A function from scale_loss() or value_and_grad() of a scaler is already scaled.
    is_scaled = _is_core(getattr(fn, "__globals__", {}))

    @wraps(fn)
    def gradient_fn(*args: Any, **kwargs: Any) -> Any:
        here, tree = host.current(), model
        if model is None:
            tree = args[0] if args and isinstance(args[0], CONTAINERS) else ()
        if here is None or is_scaled or not here.has_work(tree, model is not None):
            with host.busy():
                return plain(*args, **kwargs)
        return here.differentiate(model, fn, scaled, args, kwargs)

    return gradient_fn


def _apply_gradients(original: _Function) -> _Function:
    def apply_gradients(self: Optimizer, gradients: Any, parameters: Any) -> Any:
        here = host.current()
        # A LossScaleOptimizer in the trainer steps its own inner optimizer.
        is_guarded = _is_core(sys._getframe(1).f_globals)
        if here is None or is_guarded or not here.has_work(parameters):
            with host.busy():
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
