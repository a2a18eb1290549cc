"""Train in float16 on several machines, or in several processes on one machine.

Start this script with MLX's launcher:

    mlx.launch -n 2 -- python examples/distributed.py

On two machines, use ``--hosts 10.0.0.1,10.0.0.2`` instead of ``-n 2``. With
``--checkpoint run``, the script saves to the folder ``run`` every 20 steps and resumes
from the last save, on any number of ranks.

Every rank trains on its own shard of the data. The optimizer averages the gradients
over all ranks. If the gradients of one rank overflow, all ranks skip the step. The
check does not wait for the device.
"""

import argparse
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
from mlx_gradscale.distributed import assert_in_sync, from_rank_0


def main() -> None:
    args = parse_arguments()
    group = mx.distributed.init()
    # All ranks must start from the same parameters.
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    model.set_dtype(mx.float16)
    optimizer = LossScaleOptimizer(
        optim.AdamW(3e-3),
        GradScaler(growth_interval=100),
        max_grad_norm=1.0,
        group=group,
        average=True,
    )
    optimizer.init(model.trainable_parameters())
    start, path = 0, args.checkpoint
    if from_rank_0(lambda: path is not None and path.exists(), group):
        start = restore_checkpoint(path, model, optimizer)["step"]

    def loss_fn(x, y):
        return nn.losses.mse_loss(model(x).astype(mx.float32), y)

    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        optimizer.update(model, grads)
        return mx.distributed.all_sum(loss, group=group) / group.size()

    compiled = compile_step(step, state)
    for i in range(start, start + args.steps):
        loss = compiled(*my_batch(i, group))
        mx.eval(loss, state)
        if (i + 1) % 20 == 0:
            if group.rank() == 0:
                scale = optimizer.scaler.get_scale()
                skipped = optimizer.scaler.skipped_steps.item()
                print(f"step {i + 1} loss {loss.item():.4f} {scale=} {skipped=}")
            if path is not None:
                save_checkpoint(path, model, optimizer, step=i + 1)  # on all ranks

    assert_in_sync({"model": model.parameters(), "optimizer": optimizer.state}, group)
    if group.rank() == 0:
        print(f"{group.size()} ranks, in sync after {start + args.steps} steps")


def my_batch(step: int, group: mx.distributed.Group) -> tuple[mx.array, mx.array]:
    """Return this rank's shard of 64 samples. Rank 0's shard overflows at step 30."""
    x = mx.random.normal((64, 16), key=mx.random.key(step))
    y = mx.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3]
    if step == 30:
        x[0] = x[0] * 30000
    n = 64 // group.size()
    mine = slice(group.rank() * n, (group.rank() + 1) * n)
    return x[mine].astype(mx.float16), y[mine]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
