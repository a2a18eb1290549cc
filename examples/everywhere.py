"""Add loss scaling to a trainer that creates its own optimizer and loss.

The trainer does not change. For a trainer that is a script, run
``mlx_gradscale run TRAINER.py`` instead.

    python examples/everywhere.py
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import everywhere


def train(model: nn.Module, steps: int = 60) -> float:
    """Train like a third-party trainer that does not accept an optimizer."""
    optimizer = optim.AdamW(1e-2)

    def loss_fn(x: mx.array, y: mx.array) -> mx.array:
        return nn.losses.mse_loss(model(x).astype(mx.float32), y)

    loss_and_grad = nn.value_and_grad(model, loss_fn)
    for _ in range(steps):
        x = mx.random.normal((32, 8)).astype(mx.float16)
        y = x.astype(mx.float32).sum(axis=1, keepdims=True)
        loss, grads = loss_and_grad(x, y)
        grads, _ = optim.clip_grad_norm(grads, max_norm=1.0)
        optimizer.update(model, grads)
        mx.eval(loss, model.state, optimizer.state)
    return loss.item()


def make_model() -> nn.Module:
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model.set_dtype(mx.float16)
    return model


def main() -> tuple[float, float]:
    plain = train(make_model())
    with everywhere() as here:
        scaled = train(make_model())
    print(f"float16: loss {plain:.4f}")
    print(f"float16 inside everywhere(): loss {scaled:.4f}")
    print(*here.report(), sep="\n")
    return plain, scaled


if __name__ == "__main__":
    main()
