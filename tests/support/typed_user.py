"""A user's script, which a strict type checker reads; see docs/test_typing.py."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from typing_extensions import assert_type

import mlx_gradscale
from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    MasterWeightOptimizer,
    all_finite,
    compile_step,
    find_float32_layers,
    float32_layers,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.diagnostics import nonfinite


def own_loop(model: nn.Module, x: mx.array, y: mx.array) -> None:
    def loss_fn(x: mx.array, y: mx.array) -> mx.array:
        return mx.mean(mx.square(x - y))

    scaler = GradScaler(2.0**15, growth_interval=100)
    optimizer = optim.Adam(1e-3)
    loss_and_grad = scaler.value_and_grad(model, loss_fn, compute_dtype=mx.float16)
    loss, grads = loss_and_grad(x, y)
    assert_type(loss, Any)
    assert_type(scaler.step(optimizer, model, grads), mx.array)
    scaler.update()
    assert_type(scaler.get_scale(), float)
    assert_type(scaler.last_step_applied, mx.array)
    assert_type(scaler.state_dict(), dict[str, Any])
    scaler.load_state_dict(scaler.state_dict())
    assert_type(all_finite(grads), mx.array)
    (leaf,) = nonfinite(grads)
    assert_type(leaf.path, str)


def drop_in(model: nn.Module, folder: Path) -> None:
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), max_grad_norm=1.0)
    assert_type(optimizer.scaler, GradScaler)
    save_checkpoint(folder, model, optimizer)
    restore_checkpoint(folder, model, optimizer)
    guarded = MasterWeightOptimizer(optim.SGD(0.1))
    guarded.update(model, model.parameters())
    assert_type(mlx_gradscale.__version__, str)

    step = compile_step(lambda x: x, [model.state, optimizer.state])
    assert_type(step(mx.array(1.0)), Any)


def layers(model: nn.Module, x: mx.array) -> None:
    def loss_fn(x: mx.array) -> mx.array:
        return mx.mean(x)

    found = find_float32_layers(model, loss_fn, [x])
    assert_type(float32_layers(model, found), list[str])
    float32_layers(model, ["layers.0", "norm"])
    float32_layers(model, lambda path, module: path == "norm")
    float32_layers(model, Path("layers.json"))


def wrong(model: nn.Module, folder: Path) -> None:
    """Each ignored line is an error, or else the ignoring is."""
    GradScaler("cuda")  # type: ignore[arg-type]
    LossScaleOptimizer(GradScaler())  # type: ignore[arg-type]
    LossScaleOptimizer(optim.SGD(0.1), init_scale=2.0)  # type: ignore[call-arg]
    save_checkpoint(folder, model)  # type: ignore[call-arg]
    GradScaler().scle  # type: ignore[attr-defined]  # noqa: B018
