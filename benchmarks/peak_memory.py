"""How much memory does a whole training step take?

A compiled AdamW step with its forward and backward pass, for layers that are large
relative to the batch: the bytes per parameter kept between steps (model and optimizer
state), and the additional bytes at the peak of a step.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from mlx_gradscale import GradScaler, LossScaleOptimizer

from .harness import Rows, release_memory
from .steps import arrays_of

# 8 M parameters. With more layers, MLX's CPU backend pauses to wait for its thread, and
# the bare optimizer needs 9 bytes instead of 12.
LAYERS, WIDTH = 24, 576
# dtype, compute_dtype and LossScaleOptimizer options; None is MLX's AdamW alone.
RUNS: dict[str, tuple[mx.Dtype, mx.Dtype | None, dict[str, Any] | None]] = {
    "float32, MLX's AdamW": (mx.float32, None, None),
    "float32": (mx.float32, None, {}),
    "float32, max_grad_norm": (mx.float32, None, {"max_grad_norm": 1.0}),
    "float32 computed in float16": (mx.float32, mx.float16, {}),
    "float16, float32 master weights": (mx.float16, None, {}),
    "float16, remainders": (mx.float16, None, {"masters": "remainder"}),
}


def measure(quick: bool = False) -> Rows:
    """Measure every run at 8 M parameters."""
    rows = []
    for name in RUNS:
        kept, peak = bytes_per_parameter(name)
        rows.append(
            {
                "run": name,
                "kept B/parameter": round(kept, 1),
                "beyond that at the peak": round(peak - kept, 1),
            }
        )
    return rows


def bytes_per_parameter(name: str, width: int = WIDTH) -> tuple[float, float]:
    """Return the bytes that a run keeps between steps and uses at its peak."""
    release_memory()
    before = mx.get_active_memory()
    run, state, model = _compiled_run(*RUNS[name], width)
    parameters = sum(x.size for x in arrays_of(model.parameters()))
    peak = 0
    for _ in range(4):
        run()
        mx.synchronize()
        # Measure the memory in use between steps, because the first one may allocate.
        kept = mx.get_active_memory() - before
        mx.reset_peak_memory()
        run()
        mx.synchronize()
        peak = max(peak, mx.get_peak_memory() - before)
    del state
    return kept / parameters, peak / parameters


def _compiled_run(
    dtype: mx.Dtype,
    compute_dtype: mx.Dtype | None,
    options: dict[str, Any] | None,
    width: int,
) -> tuple[Callable[[], None], list[Any], nn.Module]:
    mx.random.seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    model.set_dtype(dtype)
    x = mx.random.normal((2, width)).astype(compute_dtype or dtype)

    def loss_fn(x: mx.array) -> mx.array:
        return mx.mean(mx.square(model(x).astype(mx.float32)))

    optimizer: Any = optim.AdamW(1e-4)
    loss_and_grad = nn.value_and_grad(model, loss_fn)
    if options is not None:
        optimizer = LossScaleOptimizer(optimizer, GradScaler(1024.0), **options)
        loss_and_grad = optimizer.value_and_grad(model, loss_fn, compute_dtype)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step(x: mx.array) -> mx.array:
        loss, grads = loss_and_grad(x)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    mx.eval([value for _, value in tree_flatten(state)], x)
    return lambda: mx.eval(compiled(x), state), state, model
