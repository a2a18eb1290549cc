"""What one rank does in checkpoint/test_ranks.py: train, save, restore, and report.

python checkpoint_ranks.py FOLDER CHECKPOINT save|restore|copies
python checkpoint_ranks.py FOLDER CHECKPOINT kill RANK AT

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
from support.checkpoint_writers import FaultPoints, names
from support.distributed_parts import fingerprint, message


class Net(nn.Module):
    """The second layer may be sharded; dropout and statistics are each rank's own."""

    def __init__(self, group, wrap=False):
        super().__init__()
        self.same, self.shard = nn.Linear(8, 4), nn.Linear(8, 4)
        self.norm, self.dropout = nn.BatchNorm(4), nn.Dropout(0.2)
        self.set_dtype(mx.float16)
        self.same.update(tree_map(mx.ones_like, self.same.parameters()))
        if wrap:
            self.shard = nn.fully_shard(self.shard, group=group)

    def __call__(self, x):
        return self.dropout(self.norm(self.same(x) + self.shard(x)))


def wrapper(group, **options):
    scaler = GradScaler(init_scale=256.0, growth_interval=2)
    return LossScaleOptimizer(
        optim.AdamW(1e-2), scaler, group=group, max_grad_norm=1.0, **options
    )


def is_shard(path, _):
    return path.startswith("shard.")


SOME = {"sharded": is_shard, "average": True}
KINDS = {
    "copies": lambda group: (Net(group), wrapper(group, average=True)),
    "sharded=True": lambda group: (Net(group), wrapper(group, sharded=True)),
    "8 bits": lambda g: (Net(g), wrapper(g, sharded=True, state_bits=8)),
    "some shards": lambda group: (Net(group), wrapper(group, **SOME)),
    "fully_shard": lambda group: (Net(group, True), optim.AdamW(1e-2)),
    "fully_shard, wrapped": lambda group: (Net(group, True), wrapper(group, **SOME)),
}


def state(model, optimizer):
    return fingerprint([model.trainable_parameters(), optimizer.state])


def train(model, optimizer, rank, steps):
    """Take steps with made-up gradients, as fully_shard has no backward pass on ring.

    Those of shards differ between the ranks. One step overflows on rank 1.
    """
    for step in steps:
        grads = tree_map(
            lambda x: mx.random.normal(x.shape, x.dtype, key=mx.random.key(step)),  # noqa: B023
            model.trainable_parameters(),
        )
        grads["shard"] = tree_map(lambda x: x + rank, grads["shard"])
        if step == 4 and rank == 1 and isinstance(optimizer, LossScaleOptimizer):
            grads["shard"] = tree_map(lambda x: x * float("inf"), grads["shard"])
        optimizer.update(model, grads)
        output = model(mx.random.normal((8, 8), key=mx.random.key(rank)))
        mx.eval(model.parameters(), optimizer.state, output)
    return state(model, optimizer), fingerprint([output, *mx.random.state])


def run(kind, group, checkpoint, task):
    rank, path = group.rank(), Path(checkpoint) / kind
    # Only ranks that restore, or have shards, may start from different weights.
    mx.random.seed(0 if task == "save" and kind == "copies" else 10 + rank)
    model, optimizer = KINDS[kind](group)
    mx.random.seed(rank)
    report = {}
    if task == "save":
        train(model, optimizer, rank, range(3))
        save_checkpoint(path, model, optimizer, step=3, rank=rank)
        report["statistics"] = model.norm.running_mean.tolist()
        report["next"] = train(model, optimizer, rank, range(3, 6))
    report["extra"] = restore_checkpoint(path, model, optimizer)
    report["random"] = mx.random.state[0].tolist()
    report["state"] = state(model, optimizer)
    report["restored statistics"] = model.norm.running_mean.tolist()
    report["again"] = train(model, optimizer, rank, range(3, 6))
    if task == "save" and kind in ("copies", "some shards"):
        report |= failures(path, model, optimizer, rank)
    return report


def failures(path, model, optimizer, rank):
    """Return what every rank raises if one of them cannot save or restore."""
    weight, found = model.shard.weight, {}
    file, none = path.parent / "file", path.parent / "none"
    if rank == 0:
        file.write_bytes(b"mine")
    found["file"] = message(lambda: save_checkpoint(file, model, optimizer))
    found["missing"] = message(lambda: restore_checkpoint(none, model, optimizer))
    if rank == 1:
        model.shard.weight = weight * float("nan")
    found["nan"] = message(lambda: save_checkpoint(path, model, optimizer))
    model.shard.weight = weight
    extra = {"it": {1}} if rank == 1 else {}
    found["a set"] = message(lambda: save_checkpoint(path, model, optimizer, **extra))
    weight = model.same.weight
    model.same.weight = weight + rank
    found["a copy"] = message(lambda: save_checkpoint(path, model, optimizer))
    model.same.weight = weight
    if rank == 1:
        model.more = nn.Linear(1, 1)
    before = state(model, optimizer), mx.random.state[0].tolist()
    found["other model"] = message(lambda: restore_checkpoint(path, model, optimizer))
    after = state(model, optimizer), mx.random.state[0].tolist()
    return found | {"unchanged": before == after, "files": names(path)}


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
    kinds = ["copies"] if task == "copies" else KINDS
    report = {kind: run(kind, group, checkpoint, task) for kind in kinds}
    (Path(folder) / f"{group.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
