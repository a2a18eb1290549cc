"""Run one batch through a model without changing either."""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..core.backward import loss_of
from ..core.finite import all_finite
from ..core.forward import Casting, is_opaque
from ..core.masters import HALF
from ..core.scaler import GradScaler
from ..core.trees import flatten, leaves, restore, snapshot
from .where import ordered_modules

# Exponents of the loss scales to try, from float16's smallest number, 2**-24, to the
# inverse of this number.
_POWERS = range(-24, 25)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Disable ``mx.compile``. On exit, restore it, the model and the random state."""
    saved = snapshot(model)
    attributes = [(m, type(m), dict(vars(m))) for _, m in ordered_modules(model)]
    random_key = read_random_key()
    compiles = _is_compile_enabled()
    try:
        # A layer's values cannot be read inside a compiled function.
        mx.disable_compile()
        yield
    finally:
        if compiles:
            mx.enable_compile()
        mx.random.seed(random_key)
        restore(saved)
        for module, cls, own in attributes:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update(own)


def read_random_key() -> int:
    """Return the seed that sets the random state to what it is now."""
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    return int(high << 32 | low)


def _is_compile_enabled() -> bool:
    # MLX has no API for this, so check whether a second call runs the Python code.
    traces = iter(range(3))
    compiled = mx.compile(lambda x: x + next(traces))
    return [compiled(mx.array(0)).item() for _ in range(2)] == [0, 0]


@dataclass(frozen=True)
class Trial:
    """A model, a loss and one batch, with the casts of ``value_and_grad``.

    ``name`` identifies the batch in messages.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    casting: Casting = field(default_factory=Casting)
    name: str = "The batch"

    @property
    def half(self) -> mx.Dtype | None:
        """The half-precision dtype of the pass; float16 if there are two."""
        own = {x.dtype for x in leaves(self.model.parameters())}
        dtypes = {self.casting.compute_dtype} if self.casting.compute_dtype else own
        return next((dtype for dtype in HALF if dtype in dtypes), None)

    def differentiate(self, scale: float = 1.0) -> tuple[mx.array, Any]:
        """Lazily compute the loss and its unscaled gradients; suppress warnings."""
        if not flatten(self.model.trainable_parameters()):
            raise ValueError("The model has no trainable parameters. Unfreeze some.")
        loss_and_grad = GradScaler(init_scale=scale, dynamic=False).value_and_grad(
            self.model, self.loss_fn, **self.casting._asdict()
        )
        with warnings.catch_warnings():
            # Warnings from trial runs would repeat what the reports say.
            warnings.simplefilter("ignore")
            outputs, grads = loss_and_grad(*self.args, **self.kwargs)
        return loss_of(outputs), grads

    @contextmanager
    def in_float32(self) -> Iterator["Trial"]:
        """Cast the model to float32 within a ``with`` block, and yield such a trial."""
        with preserved(self.model):
            self.model.set_dtype(mx.float32)
            given: Any = self.args, self.kwargs
            cast = Casting(mx.float32).cast
            args, kwargs = tree_map(cast, given, is_leaf=is_opaque)
            yield replace(self, args=args, kwargs=kwargs, casting=Casting())

    def largest_scale(self) -> float | None:
        """Find the largest loss scale at which the gradients fit, in about six runs.

        None if the gradients are non-finite at every scale.
        """

        def overflows(power: int) -> bool:
            with preserved(self.model):
                _, gradients = self.differentiate(2.0**power)
                return not all_finite(gradients).item()

        # A batch that overflows at one scale overflows at every larger one.
        fitting = bisect_left(_POWERS, True, key=overflows)
        return 2.0 ** _POWERS[fitting - 1] if fitting else None
