"""What one rank does in checkpoint/test_shards.py, under ``mlx.launch``.

python checkpoint_shards.py FOLDER CHECKPOINT save|restore
python checkpoint_shards.py FOLDER CHECKPOINT kill RANK AT

Each kind of run takes three steps and is saved, or is restored into objects with other
weights. Then it takes three more steps, whose weights and states are reported.
"""

import json
import os
import signal
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from support.checkpoint_writers import FaultPoints
from support.distributed_parts import fingerprint, message


class Net(nn.Module):
    """The first layer is sharded; both have the same shapes on all ranks."""

    def __init__(self, group, wrap):
        super().__init__()
        self.same, self.shard = nn.Linear(8, 4), nn.Linear(8, 4)
        self.set_dtype(mx.float16)
        self.same.update(tree_map(mx.ones_like, self.same.parameters()))
        if wrap:
            self.shard = nn.fully_shard(self.shard, group=group)

    def __call__(self, x):
        return self.same(x) + self.shard(x)


def wrapper(group, **options):
    scaler = GradScaler(init_scale=256.0, growth_interval=2)
    return LossScaleOptimizer(
        optim.AdamW(1e-2), scaler, group=group, max_grad_norm=1.0, **options
    )


def is_shard(path, _):
    return path.startswith("shard.")


KINDS = {
    "sharded=True": lambda group: (Net(group, False), wrapper(group, sharded=True)),
    "8 bits": lambda group: (
        Net(group, False),
        wrapper(group, sharded=True, state_bits=8),
    ),
    "some shards": lambda group: (
        Net(group, False),
        wrapper(group, sharded=is_shard, average=True),
    ),
    "fully_shard": lambda group: (Net(group, True), optim.AdamW(1e-2)),
    "fully_shard, wrapped": lambda group: (
        Net(group, True),
        wrapper(group, sharded=is_shard, average=True),
    ),
}


def train(model, optimizer, rank, steps):
    """Take steps with made-up gradients, as fully_shard has no backward pass on ring.

    Those of shards differ between the ranks. One step overflows on rank 1.
    """

    @mx.compile
    def gradients(tree, key):
        return tree_map(lambda x: mx.random.normal(x.shape, x.dtype, key=key), tree)

    for step in steps:
        grads = gradients(model.trainable_parameters(), mx.random.key(step))
        grads["shard"] = tree_map(lambda x: x + rank, grads["shard"])
        if step == 4 and rank == 1 and isinstance(optimizer, LossScaleOptimizer):
            grads["shard"] = tree_map(lambda x: x * float("inf"), grads["shard"])
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
    mx.random.normal((2,))
    output = model(mx.ones((2, 8), mx.float16))
    random = list(mx.random.state)
    return fingerprint([output, model.parameters(), optimizer.state, random])


def run(kind, group, checkpoint, task):
    rank = group.rank()
    mx.random.seed(rank if task == "save" else 10 + rank)
    model, optimizer = KINDS[kind](group)
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.init(model.trainable_parameters())
    path = Path(checkpoint) / kind
    if task == "restore":
        report = {"extra": restore_checkpoint(path, model, optimizer)}
        return report | {"next": train(model, optimizer, rank, range(3, 6))}
    train(model, optimizer, rank, range(3))
    save_checkpoint(path, model, optimizer, step=3, rank=rank)
    report = {"next": train(model, optimizer, rank, range(3, 6))}
    if kind == "some shards":
        report |= failures(path, model, optimizer, rank)
    return report


def failures(path, model, optimizer, rank):
    """Return what every rank raises if one of them cannot save."""
    weight, found = model.shard.weight, {}
    if rank == 1:
        model.shard.weight = weight * float("nan")
    found["nan"] = message(lambda: save_checkpoint(path, model, optimizer))
    model.shard.weight = weight
    extra = {"it": {1}} if rank == 1 else {}
    found["a set"] = message(lambda: save_checkpoint(path, model, optimizer, **extra))
    model.same.weight = model.same.weight + rank
    found["a copy"] = message(lambda: save_checkpoint(path, model, optimizer))
    found["files"] = sorted(x.name for x in path.iterdir())
    return found


def kill(group, checkpoint, rank, at):
    """Save twice, and kill this rank at the n-th file operation of the second save."""
    model, optimizer = KINDS["some shards"](group)
    optimizer.init(model.trainable_parameters())
    points = FaultPoints()
    for step in range(2):
        model.shard.bias = mx.full(4, float(step), mx.float16)
        if step and group.rank() == rank:
            points.start(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        save_checkpoint(checkpoint, model, optimizer, step=step)


def main(folder, checkpoint, task, *points):
    group = mx.distributed.init(backend="ring")
    if task == "kill":
        kill(group, checkpoint, *map(int, points))
        return
    report = {kind: run(kind, group, checkpoint, task) for kind in KINDS}
    (Path(folder) / f"{group.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
