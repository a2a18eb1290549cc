"""The ways to do one optimizer step, each with its state held as a user holds it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer, precision
from mlx_gradscale.loss_scale import SCALED_GRADIENTS, TRUE_GRADIENTS

from . import trees

SCALE = 65536.0

# Every one of mlx.optimizers, which a test compares with.
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "AdamW": lambda: optim.AdamW(1e-4),
    "Adam": lambda: optim.Adam(1e-4),
    "Adamax": lambda: optim.Adamax(1e-4),
    "AdaDelta": lambda: optim.AdaDelta(1e-4),
    "Adagrad": lambda: optim.Adagrad(1e-4),
    "RMSprop": lambda: optim.RMSprop(1e-4),
    "Lion": lambda: optim.Lion(1e-5),
    "SGD": lambda: optim.SGD(1e-3),
    "SGD, momentum": lambda: optim.SGD(1e-3, momentum=0.9),
    "Adafactor": lambda: optim.Adafactor(1e-4),
    "Muon": lambda: optim.Muon(1e-4),
    "MultiOptimizer": lambda: optim.MultiOptimizer(
        [optim.AdamW(1e-4), optim.Lion(1e-5)],
        [lambda path, _: int(path.partition(".")[0][5:]) % 2 == 0],
    ),
}
# Their update is elementwise: it can be one kernel per parameter.
ELEMENTWISE = (
    "AdamW",
    "Adam",
    "Adamax",
    "AdaDelta",
    "Adagrad",
    "RMSprop",
    "Lion",
    "SGD",
    "SGD, momentum",
)


class Phase:
    """One optimizer step, compiled or not, over state that it updates in place.

    Args:
        step (Callable): Takes gradients, writes to the containers in ``state``.
        state (list): The containers: what ``mx.compile`` captures.
        gradients (Any): The gradients of every step, already evaluated.
        compiled (bool): Whether to compile the step.
    """

    def __init__(
        self,
        step: Callable[[Any], None],
        state: list[Any],
        gradients: Any,
        compiled: bool,
    ):
        self.state, self.gradients, self.traces = state, gradients, 0

        def counted(gradients: Any) -> None:
            self.traces += 1
            step(gradients)

        self._step = (
            mx.compile(counted, inputs=state, outputs=state) if compiled else counted
        )
        mx.eval(state)

    def start(self) -> Any:
        """Begin a step and return its outputs, not evaluated."""
        self._step(self.gradients)
        return self.state

    def run(self) -> None:
        """Do one step."""
        mx.eval(self.start())


def bare(make: Callable, shapes, dtype=mx.float32, compiled=True) -> Phase:
    """The optimizer alone."""
    parameters, optimizer = trees.make(shapes), make()
    optimizer.init(parameters)

    def step(gradients):
        parameters.update(optimizer.apply_gradients(gradients, parameters))

    gradients = trees.make(shapes, dtype, 0.01)
    return Phase(step, [parameters, optimizer.state], gradients, compiled)


def scaler(make: Callable, shapes, dtype=mx.float32, compiled=True) -> Phase:
    """This package's GradScaler: unscale, check, guarded update, next scale."""
    parameters, optimizer = trees.make(shapes), make()
    optimizer.init(parameters)
    grad_scaler = GradScaler(init_scale=SCALE)
    grad_scaler.scale(mx.array(1.0))

    def step(gradients):
        new = grad_scaler.apply_gradients(optimizer, gradients, parameters)
        grad_scaler.update()
        parameters.update(new)

    state = [parameters, optimizer.state, grad_scaler.state]
    return Phase(step, state, _scaled(shapes, dtype), compiled)


def by_hand(make: Callable, shapes, dtype=mx.float32) -> Phase:
    """What people write: unscale with tree_map, ``.item()`` per leaf, ``if``."""
    parameters, optimizer = trees.make(shapes), make()
    optimizer.init(parameters)
    scale = {"scale": SCALE, "good": 0}

    def step(gradients):
        gradients = tree_map(lambda g: g * (1 / scale["scale"]), gradients)
        leaves = [g for _, g in tree_flatten(gradients)]
        if all(mx.all(mx.isfinite(g)).item() for g in leaves):
            parameters.update(optimizer.apply_gradients(gradients, parameters))
            scale["good"] += 1
        else:
            scale.update(scale=scale["scale"] * 0.5, good=0)

    state = [parameters, optimizer.state]
    return Phase(step, state, _scaled(shapes, dtype), compiled=False)


def plain_where(make: Callable, shapes, dtype=mx.float32) -> Phase:
    """Compiled, isfinite per leaf, and a where on every output of the optimizer."""
    parameters, optimizer = trees.make(shapes), make()
    optimizer.init(parameters)
    scale = {"scale": mx.array(SCALE)}

    def step(gradients):
        inverse = 1 / scale["scale"]
        gradients = tree_map(lambda g: g.astype(mx.float32) * inverse, gradients)
        finite = [mx.all(mx.isfinite(g)) for _, g in tree_flatten(gradients)]
        ok = mx.all(mx.stack(finite))
        before = tree_map(lambda x: x, optimizer.state)
        new = optimizer.apply_gradients(gradients, parameters)
        select = lambda new, old: mx.where(ok, new, old)  # noqa: E731
        parameters.update(tree_map(select, new, parameters))
        optimizer.state.update(tree_map(select, optimizer.state, before))
        scale["scale"] = mx.where(ok, scale["scale"], scale["scale"] * 0.5)

    state = [parameters, optimizer.state, scale]
    return Phase(step, state, _scaled(shapes, dtype), compiled=True)


def bare_clipped(make: Callable, shapes, dtype=mx.float32, compiled=True) -> Phase:
    """The optimizer behind MLX's own clip_grad_norm."""
    parameters, optimizer = trees.make(shapes), make()
    optimizer.init(parameters)

    def step(gradients):
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        parameters.update(optimizer.apply_gradients(gradients, parameters))

    gradients = trees.make(shapes, dtype, 0.01)
    return Phase(step, [parameters, optimizer.state], gradients, compiled)


def bare_masters(make: Callable, shapes, clip=False, cast=True) -> Phase:
    """The optimizer on float32 masters of a float16 model, then a cast.

    With ``cast`` its float16 gradients become float32 first; without, MLX multiplies
    them in float16.
    """
    masters, optimizer = trees.make(shapes), make()
    optimizer.init(masters)
    parameters = tree_map(lambda x: x.astype(mx.float16), masters)

    def step(gradients):
        if cast:
            gradients = tree_map(lambda g: g.astype(mx.float32), gradients)
        if clip:
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        masters.update(optimizer.apply_gradients(gradients, masters))
        parameters.update(tree_map(lambda x: x.astype(mx.float16), masters))

    gradients = trees.make(shapes, mx.float16, 0.01)
    state = [parameters, masters, optimizer.state]
    return Phase(step, state, gradients, compiled=True)


def loss_scale_optimizer(
    make: Callable,
    shapes,
    dtype=mx.float32,
    compiled=True,
    clip: bool = False,
    model_dtype: mx.Dtype = mx.float32,
    true: bool = False,
    options: dict[str, Any] | None = None,
) -> Phase:
    """This package's optimizer, with masters where ``model_dtype`` is float16.

    With ``true`` the gradients are made true first, as the backward pass does it:
    what that costs more than scaled ones. ``options`` go to LossScaleOptimizer.
    """
    parameters = trees.make(shapes, model_dtype)
    clipping = {"max_grad_norm": 1.0} if clip else {}
    optimizer = LossScaleOptimizer(make(), **clipping, **(options or {}))
    optimizer.scaler.take_way(TRUE_GRADIENTS if true else SCALED_GRADIENTS)
    optimizer.init(parameters)

    def step(gradients):
        if true:
            inverse = optimizer.scaler.inverse()
            gradients = precision.true_gradients(gradients, inverse)
        parameters.update(optimizer.apply_gradients(gradients, parameters))

    state = [parameters, optimizer.state]
    return Phase(step, state, _scaled(shapes, dtype), compiled)


def _scaled(shapes: trees.Shapes, dtype: mx.Dtype) -> Any:
    return trees.make(shapes, dtype, 0.01 * SCALE)
