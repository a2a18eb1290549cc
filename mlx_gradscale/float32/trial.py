"""Run one batch without changing the model, and compare it with float32."""

import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..core.finite import all_finite
from ..core.forward import Casting, is_opaque
from ..core.gradients import loss_of
from ..core.masters import HALF
from ..core.scaler import GradScaler
from ..core.trees import flatten, is_floating, leaves, restore, snapshot
from ..files.text import list_some
from .report import FIRST_SCALE

# Exponents of the loss scales to try, from float16's smallest number, 2**-24, to the
# inverse of this number.
_POWERS = range(-24, 25)
# Rounding in both passes affects gradients, so they may differ more than the loss, but
# never by as much as gradients that are all zero, whose relative distance is 1.
_GRADIENT_TOLERANCE, _FARTHEST = 10, 0.9


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Disable ``mx.compile``. On exit, restore it, the model and the random state."""
    saved = snapshot(model)
    attributes = [(m, type(m), dict(vars(m))) for m in model.modules()]
    random_state: Any = mx.random.state
    high, low = random_state[0].tolist()
    compiles = _is_compile_enabled()
    try:
        # A layer's values cannot be read inside a compiled function.
        mx.disable_compile()
        yield
    finally:
        if compiles:
            mx.enable_compile()
        mx.random.seed(high << 32 | low)
        restore(saved)
        for module, cls, own in attributes:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()
            vars(module).update(own)


def _is_compile_enabled() -> bool:
    # MLX has no API for this, so check whether a second call runs the Python code.
    traces = iter(range(3))
    compiled = mx.compile(lambda x: x + next(traces))
    return [compiled(mx.array(0)).item() for _ in range(2)] == [0, 0]


class Check(NamedTuple):
    """How a batch in half precision compares with float32 at a loss scale."""

    scale: float
    loss: float
    is_loss_off: bool
    bad_gradients: list[str]  # the paths of those with NaN or inf
    distance: float  # of the gradients, relative to their norm
    is_good: bool


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

    @property
    def maximum(self) -> float:
        """The largest finite number of this dtype."""
        return float(mx.finfo(self.half or mx.float16).max)

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

    def verify(self, expected: float, tolerance: float) -> Check:
        """Check at the scale where a run starts, or else at the calibrated one."""
        found = self.check(expected, tolerance, FIRST_SCALE)
        if not (found.is_good or found.is_loss_off):
            # The gradients can double before they overflow.
            scale = (self.largest_scale() or 2.0) / 2
            found = self.check(expected, tolerance, scale)
        return found

    def check(self, expected: float, tolerance: float, scale: float) -> Check:
        """Compare with float32, where the loss is ``expected``."""
        with preserved(self.model):
            lazy_loss, gradients = self.differentiate(scale)
            loss = float(lazy_loss)
            # Negated, because every comparison with NaN is False.
            if not abs(loss - expected) <= tolerance * max(abs(expected), 1e-6):
                return Check(scale, loss, True, [], math.inf, False)
        with self.in_float32() as run:
            _, exact = run.differentiate()
            mx.eval(exact)
        bad, distance = find_bad(gradients), _distance(exact, gradients)
        is_near = distance <= min(_GRADIENT_TOLERANCE * tolerance, _FARTHEST)
        return Check(scale, loss, False, bad, distance, is_near and not bad)

    def find_bad_input(self) -> tuple[str, list[str]]:
        """Return a text and paths of parameters if batch or weights are non-finite."""
        given = {f"args[{i}]": x for i, x in enumerate(self.args)} | self.kwargs
        flat = tree_flatten(given, is_leaf=is_opaque)  # a model is no part of the batch
        batch = [(path, x) for path, x in flat if isinstance(x, mx.array)]
        # Ignore -inf, because additive masks contain it.
        if bad := [path for path, x in batch if not mx.all(x < mx.inf).item()]:
            text = f"The batch contains NaN or inf in {list_some(bad)}. Fix or skip it."
            return text, []
        if bad := find_bad(self.model.parameters()):
            text = f"The parameters contain NaN or inf in {list_some(bad)}. Restore an "
            text += "earlier checkpoint, or, if a cast to float16 made them inf, train "
            return text + "in bfloat16 or float32.", bad
        return "", []


def find_bad(tree: Any) -> list[str]:
    """Return the paths of floating-point leaves with NaN or inf."""
    found = [(path, x) for path, x in flatten(tree) if is_floating(x)]
    return [path for path, x in found if not mx.isfinite(x).all().item()]


def _distance(exact: Any, half: Any) -> float:
    """Return the relative distance of gradients from those in float32."""
    pairs = list(zip(leaves(exact), leaves(half), strict=True))
    off = sum(float(mx.square(y - x).sum()) for x, y in pairs)
    size = sum(float(mx.square(x).sum()) for x, _ in pairs)
    return (off / size) ** 0.5 if size else off
