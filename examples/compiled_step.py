"""The whole training step as one compiled function.

Use this when you write your own loop and want it fast: forward pass, backward pass,
overflow check, update and the next loss scale are one compiled function that never
waits for the device. List ``scaler.state`` beside the model's and the optimizer's;
a figure is read only where the loop asks for one.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler


def spirals(size):
    """Points on three interleaved spirals, and which spiral each is on."""
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


# Float32 parameters, float16 arithmetic; the gradients come back scaled.
loss_and_grad = scaler.value_and_grad(model, loss_fn, compute_dtype=mx.float16)
state = [model.state, optimizer.state, scaler.state]


@partial(mx.compile, inputs=state, outputs=state)
def step(x, y):
    loss, grads = loss_and_grad(x, y)
    scaler.minimize(optimizer, model, grads)
    return loss


for i in range(1, 401):
    loss = step(*spirals(128))
    mx.async_eval(state, loss)
    if i % 100 == 0:  # reading waits for the device, so not at every step
        skipped = scaler.skipped_steps.item()
        print(
            f"step {i}: loss {loss.item():.3f}, scale {scaler.get_scale():.0f}, "
            f"skipped {skipped}"
        )

x, y = spirals(1000)
accuracy = (model(x).argmax(axis=1) == y).astype(mx.float32).mean().item()
print(f"accuracy {accuracy:.1%}")
