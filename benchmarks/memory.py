"""Peak memory of whole runs: model, gradients and all that the optimizer keeps."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from mlx_gradscale import GradScaler, LossScaleOptimizer

from .counting import peak_bytes
from .rows import Figure

# Large layers and a small batch: what counts is bytes per parameter.
_WIDTH, _LAYERS, _BATCH = 512, 24, 2
_SCALE = 1024.0
# The name of a run, its model's dtype, its masters, and whether its gradients are true.
RUNS: dict[str, tuple[mx.Dtype, str | None, bool]] = {
    "float32, bare": (mx.float32, None, True),
    "float32": (mx.float32, "float32", True),
    "float16, float32 masters, scaled gradients": (mx.float16, "float32", False),
    "float16, float32 masters, true gradients": (mx.float16, "float32", True),
    "float16, remainders, scaled gradients": (mx.float16, "remainder", False),
    "float16, remainders, true gradients": (mx.float16, "remainder", True),
}
# What AdamW's two moments, the weights and their masters take by themselves.
STANDING = {
    (mx.float32, None): 12,
    (mx.float32, "float32"): 12,
    (mx.float16, "float32"): 14,
    (mx.float16, "remainder"): 12,
}


def measure() -> list[Figure]:
    """Return the bytes per parameter of every run, standing and at its peak."""
    figures = []
    for name, (dtype, masters, true) in RUNS.items():
        standing, peak = run_bytes(dtype, masters, true)
        if true:
            expected = STANDING[dtype, masters] + 0.1
            kept = name.removesuffix(", true gradients")
            figures.append(
                Figure(f"model and state, {kept}", standing, "B", expected, True)
            )
        figures.append(Figure(f"peak of a step, {name}", peak, "B"))
    return figures


def run_bytes(
    dtype: mx.Dtype, masters: str | None, true: bool, width: int = _WIDTH
) -> tuple[float, float]:
    """Return what a run keeps between its steps, and its peak, per parameter.

    Args:
        dtype (Dtype): Of the model.
        masters (str, optional): As for ``LossScaleOptimizer``. Default: the bare
            optimizer, without loss scaling.
        true (bool): Whether gradients leave the backward pass unscaled, in float32.
        width (int): Of each layer. Default: 512.
    """
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    run, state, parameters = _compiled_run(dtype, masters, true, width)
    peak = peak_bytes(run) - before
    # In the model's own memory, which is counted already.
    kept = {k: x for k, x in state[1].items() if k != "written"}
    standing = sum(x.nbytes for _, x in tree_flatten([state[0], kept]))
    return standing / parameters, peak / parameters


def _compiled_run(
    dtype: mx.Dtype, masters: str | None, true: bool, width: int
) -> tuple[Callable[[], None], list[Any], int]:
    mx.random.seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    model.set_dtype(dtype)
    parameters = sum(x.size for _, x in tree_flatten(model.parameters()))
    x = mx.random.normal((_BATCH, width)).astype(dtype)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.mean(mx.square(model(x).astype(mx.float32)))

    optimizer: optim.Optimizer = optim.AdamW(1e-4)
    if masters is not None:
        optimizer = LossScaleOptimizer(optimizer, GradScaler(_SCALE), masters=masters)
        loss_fn = optimizer.scale_loss(loss_fn, unscale=true)
    optimizer.init(model.trainable_parameters())
    loss_and_grad = nn.value_and_grad(model, loss_fn)
    state = [model.state, optimizer.state]

    def step(x: mx.array) -> mx.array:
        loss, gradients = loss_and_grad(model, x)
        optimizer.update(model, gradients)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)

    def run() -> None:
        mx.eval(compiled(x), state)

    mx.eval(state, x)
    return run, state, parameters
