"""Accumulate and clip the gradients of several losses, with every call spelled out.

``scaler.value_and_grad`` returns unscaled float32 gradients. Accumulate and clip these
as you would without a scaler, and call ``scaler.update`` once at the end of each step.

    python examples/own_loop.py
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_gradscale import GradScaler

ACCUMULATE = 4


class Net(nn.Module):
    """A trunk with two heads: one classifies, one reconstructs the input."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 64)
        self.classes = nn.Linear(64, 4)
        self.inputs = nn.Linear(64, 16)

    def __call__(self, x):
        h = nn.gelu(self.trunk(x))
        return self.classes(h).astype(mx.float32), self.inputs(h).astype(mx.float32)


def batch(size=32):
    y = mx.random.randint(0, 4, (size,))
    return CENTERS[y] + 0.5 * mx.random.normal((size, 16)), y


mx.random.seed(0)
CENTERS = mx.random.normal((4, 16))
model, optimizer, scaler = Net(), optim.AdamW(3e-3), GradScaler(init_scale=2.0**22)


def class_loss(x, y):
    return nn.losses.cross_entropy(model(x)[0], y, reduction="mean")


def input_loss(x):
    return nn.losses.mse_loss(model(x)[1], x.astype(mx.float32))


class_grad = scaler.value_and_grad(model, class_loss, mx.float16)
input_grad = scaler.value_and_grad(model, input_loss, mx.float16)

for i in range(1, 101):
    total = None
    for _ in range(ACCUMULATE):
        x, y = batch()
        loss, grads = class_grad(x, y)
        other_loss, other_grads = input_grad(x)
        both = tree_map(lambda g, o: (g + 0.5 * o) / ACCUMULATE, grads, other_grads)
        total = both if total is None else tree_map(mx.add, total, both)
        mx.eval(total)  # frees the memory of this micro-batch
    grads, norm = optim.clip_grad_norm(total, max_norm=1.0)
    applied = scaler.step(optimizer, model, grads)
    scaler.update()
    mx.eval(model.state, optimizer.state, scaler.state)
    if i % 20 == 0 or not applied:
        print(
            f"step {i}: class loss {loss.item():.3f}, input loss "
            f"{other_loss.item():.3f}, grad norm {norm.item():.3f}, scale "
            f"{scaler.get_scale():.0f}{'' if applied else ', skipped'}"
        )

x, y = batch(1000)
accuracy = (model(x)[0].argmax(axis=1) == y).astype(mx.float32).mean().item()
print(f"accuracy {accuracy:.1%}")
