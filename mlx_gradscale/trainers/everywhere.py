"""``everywhere()``: loss scaling in a trainer that creates its own optimizer and loss.

In all threads, gradients come from a scaled loss and update its scale immediately, so
that it adapts no matter what the trainer does with them. Steps go through a
``GuardedOptimizer`` alongside the trainer's own optimizer, whose state, pickles and
learning rate stay the trainer's. Functions that the trainer compiles capture our state.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import SGD, MultiOptimizer, Optimizer
from mlx.utils import tree_map

from ..compile_step import compile_step
from ..core.finite import all_finite
from ..core.masters import HALF
from ..core.notices import warn_user
from ..core.optimizer import GuardedOptimizer
from ..core.scale import count_step, next_scale
from ..core.scaler import GradScaler
from ..core.trees import CONTAINERS, flatten, leaves

_Fn = Callable[..., Any]


@contextmanager
def everywhere(
    make_scaler: Callable[[], GradScaler] | None = None,
    *,
    compute_dtype: mx.Dtype | None = None,
    float32_layers: Any = None,
    **arguments: Any,
) -> Iterator["Everywhere"]:
    """Add loss scaling to a trainer that creates its own optimizer and loss.

    Inside the context, gradients of half-precision models are computed from a scaled
    loss and returned unscaled in float32, and every ``mlx.optimizers`` optimizer keeps
    float32 master weights and skips non-finite steps. This applies to all threads, to
    existing optimizers and to functions that the trainer compiles, which run uncompiled
    until their first training step is done. On exit, MLX is restored, with a warning if
    all steps were skipped.

    It does not affect a trainer that updates weights without an ``mlx.optimizers``
    optimizer. Before entering the context, it must not have compiled its step, created
    its gradient function, or imported ``compile``, ``grad`` or ``value_and_grad`` by
    name. Gradients of a parameter tree are scaled if the tree is the first argument.

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
        if not _entered:
            _replace_functions()
        _entered.append(here)
    try:
        yield here
    finally:
        with _lock:
            _entered.remove(here)
            while _originals and not _entered:
                setattr(*_originals.pop())
    here.warn_at_end()


class _Part:
    """Our state for one model or one optimizer, with a count of its uses."""

    def __init__(self, owner: Any, scaler: GradScaler):
        self.owner = weakref.ref(owner)
        self.scaler = scaler
        self.count = {"count": mx.array(0)}

    @property
    def state(self) -> list[Any]:
        """The state that compiled functions have to capture."""
        return [self.count, self.scaler.state]

    def n_applied_and_skipped(self) -> tuple[int, int]:
        skipped: Any = self.scaler.skipped_steps.item()
        total: Any = self.count["count"].item()
        return total - skipped, skipped


class _Gradients(_Part):
    """The scaler of one model."""

    def update_scale(self, gradients: Any) -> None:
        # Check the scaled arrays, if known: the unscaled ones may never be computed.
        sources = [getattr(g, "source", None) or (g,) for g in leaves(gradients)]
        finite, state = all_finite([x for x, *_ in sources]), self.scaler.state
        state.update(count_step(state, finite) | next_scale(state, finite))
        self.count["count"] += 1

    def __str__(self) -> str:
        n, bad = self.n_applied_and_skipped()
        scale = f"loss scale {self.scaler.get_scale():g}"
        return f"{scale}, {bad} of {n + bad} gradients overflowed"


class _Steps(_Part):
    """The guard of one optimizer."""

    def __init__(self, optimizer: Optimizer, arguments: dict[str, Any]):
        # A twin that shares all attributes, so that we do not keep the trainer's alive.
        twin = object.__new__(type(optimizer))
        twin.__dict__ = vars(optimizer)
        self._guarded: Any = GuardedOptimizer(twin, **arguments)
        super().__init__(optimizer, self._guarded.scaler)
        self.name = type(optimizer).__name__
        self._paths: set[str] = set()

    @property
    def state(self) -> list[Any]:
        if self.owner() is None:
            self._guarded = None  # the counts stay for the report
        return [*super().state, self._guarded.state if self._guarded else {}]

    def take(self, gradients: Any, parameters: Any) -> Any:
        trained = tree_map(lambda _, parameter: parameter, gradients, parameters)
        paths = {path for path, _ in flatten(trained)}
        if not paths <= self._paths:
            self._guarded.init(trained)
            self._paths |= paths
        self.count["count"] += 1
        return self._guarded.apply_gradients(gradients, parameters)

    def __str__(self) -> str:
        n, bad = self.n_applied_and_skipped()
        return f"{self.name}: {n} steps applied, {bad} skipped"


@dataclass(eq=False)
class Everywhere:
    """The scalers and guarded steps of one ``with everywhere()`` block."""

    make_scaler: Callable[[], GradScaler] | None
    compute_dtype: mx.Dtype | None
    float32_layers: Any
    arguments: dict[str, Any]
    #: The state that compiled functions have to capture.
    state: list[Any] = field(default_factory=list)
    #: The number of gradients and steps that ran as Python code.
    n_calls: int = 0
    _parts: list[Any] = field(default_factory=list)
    _has_warned: bool = False

    @property
    def scalers(self) -> list[GradScaler]:
        """One scaler per model, and one for all parameter trees without a model."""
        return [each.scaler for each in self._parts if isinstance(each, _Gradients)]

    def report(self) -> list[str]:
        """Return one line for each scaler and each optimizer in use."""
        return [str(each) for each in self._parts]

    def warn_at_end(self) -> None:
        """Warn if an optimizer did not train, or if no step was guarded."""
        steps = [each for each in self._parts if isinstance(each, _Steps)]
        for each in steps:
            warn_if_untrained(each.name, *each.n_applied_and_skipped())
        if self._parts and not steps:
            warn_user(
                "Gradients were computed, but no mlx.optimizers.Optimizer took a step. "
                "Weights that are updated in another way are not protected against "
                "non-finite gradients."
            )
        if steps and not self.scalers:
            warn_user(
                "Steps were guarded, but no gradients came from a scaled loss, so "
                "small float16 gradients may have been lost. Import value_and_grad, "
                "and create the gradient function, inside everywhere()."
            )

    def has_work(self, tree: Any, is_model: bool = True) -> bool:
        """Return whether this runs in half precision; warn once if a model does not."""
        dtypes = {x.dtype for x in leaves(tree) if isinstance(x, mx.array)}
        if not dtypes.isdisjoint(HALF) or (is_model and self.compute_dtype is not None):
            return True
        if is_model and not self._has_warned:
            self._has_warned = True
            warn_user(
                "This model has no half-precision parameters, so there is nothing to "
                "scale. Call model.set_dtype(mx.float16), or pass compute_dtype=."
            )
        return False

    def part_of(self, owner: Any, make: Callable[[], _Part]) -> Any:
        """Return our state for a model or an optimizer, creating it if needed."""
        self.n_calls += 1
        found = next((each for each in self._parts if each.owner() is owner), None)
        if found is None:
            found = make()
            self._parts.append(found)
        return found

    def step(self, optimizer: Optimizer, gradients: Any, parameters: Any) -> Any:
        """Return the new parameters, or the old ones if the step is skipped."""
        with _busy():
            part = self.part_of(optimizer, lambda: _Steps(optimizer, self.arguments))
            new = part.take(gradients, parameters)
            self.evaluate_state()
        return new

    def evaluate_state(self) -> None:
        """List our state for compiled functions, and evaluate it.

        The trainer evaluates only its own arrays, so the graph of ours would grow.
        """
        # A trainer may have replaced the state of its optimizer.
        self.state[:] = [each.state for each in self._parts]
        with suppress(ValueError):  # MLX does not evaluate inside a trace
            mx.async_eval(self.state)

    def new_scaler(self, model: Any, loss_fn: _Fn, batch: Any) -> GradScaler:
        """Return a scaler; without a model, it is that of all parameter trees."""
        from .. import find_float32_layers, float32_layers

        dtype, where = self.compute_dtype, self.float32_layers
        if where == "auto" and model is not None:
            where = find_float32_layers(model, loss_fn, [batch], compute_dtype=dtype)
        if where is not None and model is not None:
            float32_layers(model, where)
        if self.make_scaler is not None:
            return self.make_scaler()
        scaler = GradScaler(2.0**10)
        if model is not None:
            find_first_scale(scaler, model, loss_fn, batch, dtype)
        return scaler


def find_first_scale(
    scaler: GradScaler, model: nn.Module, loss_fn: _Fn, batch: Any, dtype: Any = None
) -> None:
    """Find the scale on the first batch, so that a short run does not lose steps.

    Starting from 65536 and halving once per step, a run of 42 steps lost 13 of them. If
    no scale makes the loss finite, the scale does not change, and a warning about the
    skipped steps follows later.
    """
    from ..diagnostics import calibrate

    with suppress(ValueError):
        # A headroom of two powers, for gradients that are four times as large later.
        scale = calibrate(
            scaler, model, loss_fn, *batch, compute_dtype=dtype, headroom=2
        )
        scaler.update(min(scale, 2.0**16))


def warn_if_untrained(name: str, applied: int, skipped: int) -> None:
    """Warn if every step of an optimizer was skipped."""
    if skipped and not applied:
        warn_user(
            f"The model was not trained: all {skipped} steps of {name} were skipped "
            "because of non-finite gradients. To find the cause, call "
            "mlx_gradscale.diagnostics.explain_overflow()."
        )


# What is replaced. MLX's original is the first argument of each replacement.

# The folders of MLX and of this package.
_OWN_FOLDERS = tuple(
    f"{Path(file).parents[1]}{os.sep}" for file in (nn.__file__, __file__)
)
_lock = threading.Lock()
_originals: list[tuple[Any, str, Any]] = []
#: The contexts that were entered; the last one is active.
_entered: list[Everywhere] = []
#: Whether our own gradient or step is running, which needs MLX's own functions.
_is_busy = ContextVar("is_busy", default=False)


def _current() -> Everywhere | None:
    return _entered[-1] if _entered and not _is_busy.get() else None


@contextmanager
def _busy() -> Iterator[None]:
    token = _is_busy.set(True)
    try:
        yield
    finally:
        _is_busy.reset(token)


def _replace_functions() -> None:
    for owner, name, ours in (
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
        setattr(owner, name, _replacement(original, partial(ours, original)))


def _replacement(original: _Fn, ours: _Fn) -> _Fn:
    """Return a replacement for an MLX function that MLX and this package do not see."""

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        is_own = sys._getframe(1).f_code.co_filename.startswith(_OWN_FOLDERS)
        is_plain = is_own or _current() is None
        return (original if is_plain else ours)(*args, **kwargs)

    return replacement


def _model_gradient(original: _Fn, model: nn.Module, fn: _Fn) -> _Fn:
    def scaled(scaler: GradScaler, dtype: mx.Dtype | None) -> _Fn:
        return scaler.value_and_grad(model, fn, dtype)

    return _gradient(original(model, fn), fn, scaled, model)


def _tree_gradient(
    original: _Fn, fun: _Fn, argnums: Any = None, argnames: Any = ()
) -> _Fn:
    def scaled(scaler: GradScaler, _: Any) -> Any:
        return original(scaler.scale_loss(fun))

    plain = original(fun, argnums, argnames)
    is_first = argnums in (None, 0) and not argnames
    return _gradient(plain, fun, scaled, None) if is_first else plain


def _grad(_: _Fn, fun: _Fn, *args: Any, **kwargs: Any) -> _Fn:
    value_and_grad = _tree_gradient(mx.value_and_grad, fun, *args, **kwargs)
    return wraps(fun)(lambda *args, **kwargs: value_and_grad(*args, **kwargs)[1])


def _gradient(plain: _Fn, fn: _Fn, scaled: _Fn, model: Any) -> _Fn:
    @wraps(fn)
    def gradient_fn(*args: Any, **kwargs: Any) -> Any:
        here, tree = _current(), model
        if model is None:
            tree = args[0] if args and isinstance(args[0], CONTAINERS) else ()
        is_scaled = hasattr(fn, "has_scaled_gradient")  # comes from scale_loss()
        with _busy():
            if here is None or is_scaled or not here.has_work(tree, model is not None):
                return plain(*args, **kwargs)
            here.evaluate_state()
            owner, loss_fn = here if model is None else model, partial(fn, **kwargs)
            part = here.part_of(
                owner, lambda: _Gradients(owner, here.new_scaler(model, loss_fn, args))
            )
            compute = scaled(part.scaler, here.compute_dtype)
            value, gradients = compute(*args, **kwargs)
            part.update_scale(gradients)
            return value, gradients

    return gradient_fn


def _apply_gradients(original: _Fn, self: Any, gradients: Any, parameters: Any) -> Any:
    here = _entered[-1]
    step = here.step if here.has_work(parameters) else original
    return step(self, gradients, parameters)


def _update(original: _Fn, self: Any, model: nn.Module, gradients: Any) -> None:
    here = _entered[-1]
    if here.has_work(model):
        model.update(here.step(self, gradients, model))
    else:
        original(self, model, gradients)


def _compile(
    original: _Fn,
    fun: _Fn,
    inputs: Any = None,
    outputs: Any = None,
    shapeless: bool = False,
) -> _Fn:
    """Compile a function that trains over our state as well.

    It runs uncompiled until its first training step is done, because finding the first
    scale requires reading values, and only then do we know whether it needs our state.
    """
    plain = original(fun, inputs, outputs, shapeless)
    captured = {id(x): x for x in (inputs, outputs) if x is not None}
    trained: tuple[Everywhere, _Fn] | None = None

    @wraps(fun)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal trained
        here = _current()
        if here is None or shapeless:
            return plain(*args, **kwargs)
        if trained is None or trained[0] is not here:
            n_calls = here.n_calls
            result = fun(*args, **kwargs)
            if here.n_calls > n_calls:
                state = [*captured.values(), here.state]
                trained = here, compile_step(fun, state)
            return result
        here.evaluate_state()
        result = trained[1](*args, **kwargs)
        here.evaluate_state()
        return result

    return compiled
