"""What does loss scaling add to the optimizer phase of a step?

Each variant is one compiled step from gradients in memory to new parameters and
optimizer state: "scaled" with this package, and "bare" with MLX's optimizer alone. A
bare AdamW step in float32 reads four arrays and writes three. A scaler has to read each
gradient once more before anything is written, so the best possible ratio for this step
is 8/7 = 1.14. An eager step of MLX's optimizer runs one kernel per operation; ours
compiles the update. Where MLX pretends to have a GPU, the bytes that a step moves and
its kernel launches are counted instead, which should dominate the time there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer
from tools import as_on_gpu

from .harness import Rows, release_memory, take_turns

Shapes = list[tuple[int, ...]]
SCALE = 1024.0
MAX_GRAD_NORM = 1.0
SIZES = (8, 64, 256)  # millions of parameters
EAGER = ("AdamW, float32", "AdamW, float16, float32 master weights")


class Leaves(nn.Module):
    """A model with weights but no computation."""

    def __init__(self, shapes: Shapes, dtype: mx.Dtype = mx.float32):
        super().__init__()
        self.layers = [nn.Module() for _ in shapes]
        for layer, weight in zip(self.layers, random_arrays(shapes), strict=True):
            layer.weight = weight.astype(dtype)
        mx.eval(self.parameters())

    def loss(self, gradients: list[mx.array]) -> mx.array:
        """Return a loss whose gradients are the given arrays."""
        loss = mx.custom_function(lambda *weights: mx.zeros(()))
        loss.vjp(lambda primals, cotangent, output: tuple(gradients))
        return loss(*(layer.weight for layer in self.layers))


def random_arrays(shapes: Shapes, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """Return arrays of repeated random values; drawing 256 M would take 30 seconds."""
    drawn = mx.random.normal((10**6,))
    arrays = []
    for shape in shapes:
        size = math.prod(shape)
        values = mx.tile(drawn, -(-size // drawn.size))[:size]
        # Multiply to copy: leaves that share a buffer would stay in the cache.
        arrays.append((values * 0.01).reshape(shape).astype(dtype))
        mx.eval(arrays[-1])
    return arrays


@dataclass
class Step:
    """A step that updates ``state`` from gradients in memory."""

    function: Callable[[Any], object]
    state: list[Any]
    gradients: Any
    compiled: bool = True
    _call: Callable[[Any], object] = field(init=False)

    def __post_init__(self) -> None:
        self._call = self.function
        if self.compiled:
            self._call = mx.compile(
                self.function, inputs=self.state, outputs=self.state
            )
        mx.eval(self.state, self.gradients)

    def run(self) -> None:
        """Run one step."""
        self._call(self.gradients)
        mx.eval(self.state)


@dataclass(frozen=True)
class Case:
    """A training mode and the bare optimizer to compare it with."""

    optimizer: Callable[[], optim.Optimizer] = lambda: optim.AdamW(1e-4)
    dtype: mx.Dtype = mx.float32
    compute_dtype: mx.Dtype | None = None
    clip: bool = False
    state_bits: int = 32

    def gradients(self, shapes: Shapes) -> list[mx.array]:
        """Return gradients in the dtype of this case's backward pass."""
        return random_arrays(shapes, self.compute_dtype or self.dtype)

    def wrapped_optimizer(self) -> LossScaleOptimizer:
        """Return this case's optimizer with loss scaling."""
        return LossScaleOptimizer(
            self.optimizer(),
            GradScaler(SCALE),
            max_grad_norm=MAX_GRAD_NORM if self.clip else None,
            state_bits=self.state_bits,
        )


CASES = {
    "AdamW, float32": Case(),
    "AdamW, float32, max_grad_norm": Case(clip=True),
    "AdamW, float16, float32 master weights": Case(dtype=mx.float16),
    "AdamW, float16, state_bits=16": Case(dtype=mx.float16, state_bits=16),
    "AdamW, bfloat16, state_bits=8": Case(dtype=mx.bfloat16, state_bits=8),
    "AdamW, float32 computed in float16": Case(compute_dtype=mx.float16),
    "SGD with momentum, float32": Case(lambda: optim.SGD(1e-3, momentum=0.9)),
    "Lion, float32": Case(lambda: optim.Lion(1e-5)),
}


def bare_step(case: Case, gradients: list[mx.array], compiled: bool = True) -> Step:
    """Return a step of MLX's optimizer alone, in float32.

    For a float16 model, the step updates float32 copies and then casts them. If a
    float32 model computes in float16, the step starts from unscaled float32 gradients.
    """
    model = Leaves([g.shape for g in gradients], case.dtype)
    weights = model.trainable_parameters()
    half = case.dtype != mx.float32
    if half:
        weights = tree_map(lambda x: x.astype(mx.float32), weights)
    elif case.compute_dtype is not None:
        gradients = [g.astype(mx.float32) for g in gradients]
    optimizer = case.optimizer()
    optimizer.init(weights)
    loss_and_grad = nn.value_and_grad(model, model.loss)

    def step(gradients: list[mx.array]) -> None:
        _, grads = loss_and_grad(gradients)
        if half:
            grads = tree_map(lambda g: g.astype(mx.float32), grads)
        if case.clip:
            grads, _ = optim.clip_grad_norm(grads, MAX_GRAD_NORM)
        if not half:
            optimizer.update(model, grads)
            return
        weights.update(optimizer.apply_gradients(grads, weights))
        model.update(tree_map(lambda x: x.astype(case.dtype), weights))

    state = [model.state, optimizer.state, *([weights] if half else [])]
    return Step(step, state, gradients, compiled)


def scaled_step(case: Case, gradients: list[mx.array], compiled: bool = True) -> Step:
    """Return a step of ``LossScaleOptimizer.value_and_grad`` and ``update``."""
    model = Leaves([g.shape for g in gradients], case.dtype)
    optimizer = case.wrapped_optimizer()
    optimizer.init(model.trainable_parameters())
    loss_and_grad = optimizer.value_and_grad(model, model.loss, case.compute_dtype)

    def step(gradients: list[mx.array]) -> None:
        _, grads = loss_and_grad(gradients)
        optimizer.update(model, grads)

    return Step(step, [model.state, optimizer.state], gradients, compiled)


def arrays_of(state: Any) -> list[mx.array]:
    """Return all arrays of a tree."""
    return [x for _, x in tree_flatten(state) if isinstance(x, mx.array)]


def measure(quick: bool = False) -> Rows:
    """Measure every case at 8 M parameters; a full run adds 64 M and 256 M."""
    if as_on_gpu.is_active():
        return [_compare(name, 32) for name in CASES]
    # In 8 bits, a step of 8 M parameters takes 2 s on a CPU.
    timed = [name for name, case in CASES.items() if case.state_bits != 8]
    rows = []
    for millions in SIZES[:1] if quick else SIZES:
        rounds = 5 if quick else 12 if millions == 8 else 6
        rows += [_compare(name, millions, rounds) for name in timed]
    return rows + [_compare(name, 8, rounds, compiled=False) for name in EAGER]


def _compare(
    name: str, millions: int, rounds: int = 1, compiled: bool = True
) -> dict[str, Any]:
    release_memory()
    case = CASES[name]
    gradients = case.gradients([(500, 500 * millions // 8)] * 32)
    bare = bare_step(case, gradients, compiled)
    scaled = scaled_step(case, gradients, compiled)
    row = {"case": name if compiled else f"{name}, eager"}
    row["parameters"] = f"{millions} M"
    if as_on_gpu.is_active():
        (bare_bytes, bare_kernels), (moved, kernels) = map(_count, (bare, scaled))
        return row | {
            "bare B/parameter": round(bare_bytes / millions / 1e6, 1),
            "scaled B/parameter": round(moved / millions / 1e6, 1),
            "bare kernels": bare_kernels,
            "scaled kernels": kernels,
        }
    runs = {"bare": bare.run, "scaled": scaled.run}
    seconds = take_turns(runs, rounds, warm_up=2)
    return row | {
        "bare ms": round(1e3 * seconds["bare"], 1),
        "scaled ms": round(1e3 * seconds["scaled"], 1),
        "ratio": round(seconds["scaled"] / seconds["bare"], 2),
    }


def _count(step: Step) -> tuple[int, int]:
    """Return the bytes that one step reads and writes, and its kernel launches."""
    step.run()  # the first step initializes the optimizer
    with as_on_gpu.record() as launches:
        step.run()
    return sum(x.bytes for x in launches), sum(x.count for x in launches)
