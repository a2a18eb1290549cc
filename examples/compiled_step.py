"""Compile a whole training step into one function.

The forward pass, backward pass, overflow check, weight update and scale update are one
compiled function that never waits for the device. Pass ``scaler.state`` to
``compile_step`` along with the state of the model and the optimizer.

    python examples/compiled_step.py
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, compile_step


def spirals(size):
    """Return points on three interleaved spirals, and the label of each point."""
    arm = mx.random.randint(0, 3, (size,))
    radius = mx.random.uniform(shape=(size,))
    angle = 5 * radius + 2.1 * arm + 0.1 * mx.random.normal((size,))
    points = mx.stack([radius * mx.cos(angle), radius * mx.sin(angle)], axis=1)
    return points, arm


mx.random.seed(0)
model = nn.Sequential(
    nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
)
optimizer = optim.AdamW(3e-3)
optimizer.init(model.trainable_parameters())
scaler = GradScaler()


def loss_fn(x, y):
    logits = model(x).astype(mx.float32)  # reduce the loss in float32
    return nn.losses.cross_entropy(logits, y, reduction="mean")


# Float32 parameters, float16 arithmetic, unscaled float32 gradients.
loss_and_grad = scaler.value_and_grad(model, loss_fn, compute_dtype=mx.float16)
state = [model.state, optimizer.state, scaler.state]


@partial(compile_step, state=state)
def step(x, y):
    loss, grads = loss_and_grad(x, y)
    scaler.minimize(optimizer, model, grads)
    return loss


for i in range(1, 401):
    loss = step(*spirals(128))
    mx.async_eval(state, loss)
    if i % 100 == 0:  # reading values waits for the device
        skipped = scaler.skipped_steps.item()
        print(
            f"step {i}: loss {loss.item():.3f}, scale {scaler.get_scale():.0f}, "
            f"skipped {skipped}"
        )

x, y = spirals(1000)
accuracy = (model(x).argmax(axis=1) == y).astype(mx.float32).mean().item()
print(f"accuracy {accuracy:.1%}")
