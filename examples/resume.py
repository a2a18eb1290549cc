"""Kill a float16 run and resume it, with bit-identical losses.

``save_checkpoint`` saves the weights, the optimizer with its master weights, the
scaler, the random state and the step number; ``restore_checkpoint`` restores them. This
script trains once without interruption, and once in a process that is killed in the
middle of a step and restarted.

    python examples/resume.py
"""

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    compile_step,
    restore_checkpoint,
    save_checkpoint,
)

STEPS, SAVE_EVERY, KILLED_AT = 60, 10, 34


def make_run():
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    model.set_dtype(mx.float16)
    schedule = optim.cosine_decay(1e-2, STEPS)  # schedules are code and are not saved
    scaler = GradScaler(init_scale=2.0**20, growth_interval=20)
    return model, LossScaleOptimizer(optim.AdamW(schedule), scaler)


def train(folder: Path, killed_at: int | None = None) -> None:
    mx.random.seed(0)
    model, optimizer = make_run()
    start = 0
    if folder.exists():
        start = restore_checkpoint(folder, model, optimizer)["step"]
        print(f"resumed at step {start}")

    def loss_fn(x, y):
        return nn.losses.mse_loss(model(x).astype(mx.float32), y)

    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    state = [model.state, optimizer.state, mx.random.state]

    @partial(compile_step, state=state)
    def train_step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return loss

    for step in range(start, STEPS):
        x = mx.random.normal((64, 16), key=mx.random.key(step)).astype(mx.float16)
        loss = train_step(x, x.astype(mx.float32).sum(1, keepdims=True))
        mx.eval(loss, state)
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(f"{folder}.losses", "a") as file:
            print(step, loss.item().hex(), file=file)
        if (step + 1) % SAVE_EVERY == 0:
            save_checkpoint(folder, model, optimizer, step=step + 1, keep=2)


def losses(folder: Path) -> dict[str, str]:
    """Return the loss of each step; if a step ran twice, return its last loss."""
    lines = Path(f"{folder}.losses").read_text().splitlines()
    return dict(line.split() for line in lines)


def main(place: Path) -> None:
    train(place / "uninterrupted")
    command = [sys.executable, __file__, str(place / "killed")]
    first = subprocess.run([*command, str(KILLED_AT)])
    assert first.returncode == -signal.SIGKILL
    print(f"killed in step {KILLED_AT}")
    subprocess.run(command, check=True)
    expected, found = losses(place / "uninterrupted"), losses(place / "killed")
    same = sum(found.get(step) == loss for step, loss in expected.items())
    print(f"{same} of {len(expected)} losses are bit-identical")
    print(f"the last loss is {float.fromhex(found[str(STEPS - 1)]):.4f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
