"""How much memory does a training step take, in bytes per parameter?

AdamW trains linear layers of 332,000 parameters with a batch of two rows, which needs
next to no activations. "Kept" is what is in memory between steps, and "peak" the most
during a compiled step. "In order" is the peak if MLX waits for each operation, because
the memory limit is zero; otherwise, a CPU allocates the memory of the next ten. MLX
alone trains the same float32 or bfloat16 model, and clips with clip_grad_norm. The
limit of a step that checks all gradients before it updates a parameter is what is kept,
plus all gradients, plus the new state of one layer.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from tools import as_on_gpu

from . import steps
from .harness import Rows, release_memory
from .steps import MAX_GRAD_NORM, Case, arrays_of

LAYERS, WIDTH = (12, 48), 576
RUNS = {
    "float32": Case(),
    "bfloat16, 32 bits": Case(dtype=mx.bfloat16),
    "bfloat16, 16 bits": Case(dtype=mx.bfloat16, state_bits=16),
    "bfloat16, 8 bits": Case(dtype=mx.bfloat16, state_bits=8),
}
RUNS |= {f"{name}, clipped": replace(case, clip=True) for name, case in RUNS.items()}


def measure(quick: bool = False) -> Rows:
    """Measure every run with MLX alone and with this package, at two sizes."""
    rows = []
    for name, case in RUNS.items():
        gradient = 4 if case.dtype == mx.float32 else 2
        for n_layers in LAYERS[:1] if quick else LAYERS:
            mlx_kept, mlx_peak, mlx_in_order = whole_step(name, n_layers, is_bare=True)
            kept, peak, in_order = whole_step(name, n_layers)
            rows.append(
                {
                    "run": name,
                    "layers": n_layers,
                    "MLX kept": mlx_kept,
                    "peak": mlx_peak,
                    "in order": mlx_in_order,
                    "ours kept": kept,
                    "limit": round(kept + gradient + (kept + gradient) / n_layers, 1),
                    "our peak": peak,
                    "ours in order": in_order,
                }
            )
    return rows


def whole_step(
    name: str, n_layers: int, width: int = WIDTH, is_bare: bool = False
) -> tuple[float, float, float]:
    """Return the bytes per parameter between steps, at the peak, and in order."""
    release_memory()
    before = mx.get_active_memory()
    run = _training(RUNS[name], n_layers, width, is_bare)
    kept, added = _peak_of(run)
    limit = mx.set_memory_limit(0)
    try:
        _, added_in_order = _peak_of(run)
    finally:
        mx.set_memory_limit(limit)
    found = kept - before, kept - before + added, kept - before + added_in_order
    a, b, c = (round(x / (n_layers * width**2), 1) for x in found)
    return a, b, c


def update(name: str, leaf: tuple[int, int] = (500, 500)) -> float:
    """Return the extra bytes per parameter at the peak of an update of 32 leaves."""
    release_memory()
    step = steps.scaled_step(RUNS[name], RUNS[name].gradients([leaf] * 32))
    return _peak_of(step.run)[1] / (32 * math.prod(leaf))


def _peak_of(run: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes in use between runs, and the most that a run adds to them."""
    kept = peak = 0
    with as_on_gpu.compiled_kernels():
        for _ in range(3):
            run()
            mx.synchronize()
            kept = mx.get_active_memory()
            mx.reset_peak_memory()
            run()
            mx.synchronize()
            peak = max(peak, mx.get_peak_memory() - kept)
    return kept, peak


def _training(
    case: Case, n_layers: int, width: int, is_bare: bool
) -> Callable[[], None]:
    mx.random.seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(n_layers)]
    model = nn.Sequential(*layers)
    model.set_dtype(case.dtype)
    x = mx.random.normal((2, width)).astype(case.dtype)

    def loss_fn(x: mx.array) -> mx.array:
        return mx.mean(mx.square(model(x).astype(mx.float32)))

    optimizer: optim.Optimizer = case.optimizer()
    loss_and_grad = nn.value_and_grad(model, loss_fn)
    if not is_bare:
        optimizer = case.wrapped_optimizer()
        loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x: mx.array) -> mx.array:
        loss, grads = loss_and_grad(x)
        if is_bare and case.clip:
            grads, _ = optim.clip_grad_norm(grads, MAX_GRAD_NORM)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    mx.eval(arrays_of(state), x)
    return lambda: mx.eval(compiled(x), state)
