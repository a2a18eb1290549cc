"""How much memory does a training step take, in bytes per parameter?

The table shows AdamW between steps (model and optimizer state), at the peak of a
compiled step with 24 and with 192 layers, and at the peak of the update alone. The step
includes the forward and backward pass of layers that are large relative to the batch.
The update starts from gradients that are in memory and are not counted.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from tools import as_on_gpu

from . import steps
from .harness import Rows, release_memory
from .steps import CASES, Case, arrays_of

# 8 M parameters. With many layers, MLX's CPU backend pauses to wait for its thread, and
# the peaks are lower.
LAYERS, WIDTH = 24, 576
MANY_LAYERS, NARROW = 192, 204
BARE = "AdamW, float32, MLX alone"
RUNS = {BARE: Case()} | {k: x for k, x in CASES.items() if k.startswith("AdamW")}
RUNS["AdamW, float32, state_bits=16"] = Case(state_bits=16)


def measure(quick: bool = False) -> Rows:
    """Measure every variant of AdamW with 8 M parameters."""
    rows = []
    for name in RUNS:
        kept, whole = whole_step(name)
        _, many = whole_step(name, NARROW, MANY_LAYERS)
        rows.append(
            {
                "run": name,
                "between steps": round(kept, 1),
                "peak of a step": round(kept + whole, 1),
                "192 layers": round(kept + many, 1),
                "peak of the update": round(kept + update(name), 1),
            }
        )
    return rows


def whole_step(
    name: str, width: int = WIDTH, n_layers: int = LAYERS
) -> tuple[float, float]:
    """Return the bytes per parameter between steps, and the extra bytes at the peak."""
    release_memory()
    before = mx.get_active_memory()
    run, model = _training(name, width, n_layers)
    n_parameters = sum(x.size for x in arrays_of(model.parameters()))
    kept, peak = _peak_of(run)
    return (kept - before) / n_parameters, peak / n_parameters


def update(name: str, leaf: tuple[int, int] = (500, 500)) -> float:
    """Return the extra bytes per parameter at the peak of an update of 32 leaves."""
    release_memory()
    shapes = [leaf] * 32
    gradients = RUNS[name].gradients(shapes)
    make = steps.bare_step if name == BARE else steps.scaled_step
    _, peak = _peak_of(make(RUNS[name], gradients).run)
    return peak / steps.parameter_count(shapes)


def _peak_of(run: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes in use between runs, and the most that a run adds to them."""
    kept = peak = 0
    with as_on_gpu.compiled_kernels():
        for _ in range(4):
            run()
            mx.synchronize()
            kept = mx.get_active_memory()
            mx.reset_peak_memory()
            run()
            mx.synchronize()
            peak = max(peak, mx.get_peak_memory() - kept)
    return kept, peak


def _training(
    name: str, width: int, n_layers: int
) -> tuple[Callable[[], None], nn.Module]:
    mx.random.seed(0)
    case = RUNS[name]
    layers = [nn.Linear(width, width, bias=False) for _ in range(n_layers)]
    model = nn.Sequential(*layers)
    model.set_dtype(case.dtype)
    x = mx.random.normal((2, width)).astype(case.compute_dtype or case.dtype)

    def loss_fn(x: mx.array) -> mx.array:
        return mx.mean(mx.square(model(x).astype(mx.float32)))

    optimizer: optim.Optimizer = case.optimizer()
    loss_and_grad = nn.value_and_grad(model, loss_fn)
    if name != BARE:
        optimizer = case.wrapped_optimizer()
        loss_and_grad = optimizer.value_and_grad(model, loss_fn, case.compute_dtype)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x: mx.array) -> mx.array:
        loss, grads = loss_and_grad(x)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    mx.eval(arrays_of(state), x)
    return lambda: mx.eval(compiled(x), state), model
