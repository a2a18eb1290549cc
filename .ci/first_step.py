"""A step of training, and every module, with MLX and NumPy as the only others."""

import importlib
import pkgutil
from importlib.metadata import distributions
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

import mlx_gradscale

# Imported by `mlx_gradscale lora` once it has found mlx-lm.
NEEDS_MLX_LM = "mlx_gradscale.trainers.lora_training"
ALLOWED = {"mlx", "mlx-cpu", "mlx-gradscale", "numpy", "pip", "setuptools"}


def main():
    installed = {d.metadata["Name"].lower().replace("_", "-") for d in distributions()}
    assert installed <= ALLOWED, installed - ALLOWED
    assert "site-packages" in Path(mlx_gradscale.__file__).parts

    for module in pkgutil.walk_packages(mlx_gradscale.__path__, "mlx_gradscale."):
        if not module.name.endswith("__main__") and module.name != NEEDS_MLX_LM:
            importlib.import_module(module.name)

    model = nn.Linear(3, 1)
    model.set_dtype(mx.float16)
    scaler = mlx_gradscale.GradScaler(1024.0)
    optimizer = mlx_gradscale.LossScaleOptimizer(optim.Adam(1e-2), scaler)
    before = mx.array(model.weight)
    inputs = mx.ones((2, 3), dtype=mx.float16)

    def loss_fn(x):
        return model(x).astype(mx.float32).square().mean()

    _, grads = optimizer.value_and_grad(model, loss_fn)(inputs)
    optimizer.update(model, grads)
    mx.eval(model, optimizer.state)
    assert scaler.last_step_applied.item()
    assert not mx.array_equal(model.weight, before)
    print(f"mlx_gradscale {mlx_gradscale.__version__} with MLX {mx.__version__}")


if __name__ == "__main__":
    main()
