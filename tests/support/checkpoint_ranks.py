"""What one rank does in checkpoint/test_ranks.py: train, save, restore, and report.

python checkpoint_ranks.py FOLDER CHECKPOINT save|restore|alone
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.distributed import assert_in_sync
from support.checkpoint_runs import Net, Run
from support.distributed_parts import fingerprint, message


def main(folder, checkpoint, task):
    group = mx.distributed.init(backend="ring") if task != "alone" else None
    rank = group.rank() if group else 0
    # Only a rank that restores may start from other weights than the others.
    mx.random.seed(3 if task == "save" else 3 + rank)
    scaler = GradScaler(init_scale=256.0, growth_interval=3)
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2), scaler, group=group, average=group is not None
    )
    # Dropout and BatchNorm's statistics are each rank's own.
    run = Run(optimizer, dtype=mx.float16, model=Net(mx.float16))
    mx.random.seed(rank)
    report = {}
    if task == "save":
        run.train(100 * rank, 100 * rank + 3)
        report["statistics"] = run.model.norm.running_mean.tolist()
        save_checkpoint(checkpoint, *run.parts, step=3)
        report["next"] = run.train(100 * rank + 3, 100 * rank + 6)[0]
        report |= failures(run, checkpoint, rank)
    report["extra"] = restore_checkpoint(checkpoint, *run.parts)
    report["random"] = mx.random.state[0].tolist()
    report["restored"] = fingerprint([run.model.parameters(), optimizer.state])
    report["restored statistics"] = run.model.norm.running_mean.tolist()
    assert_in_sync([run.model.parameters(), optimizer.state], group)
    report["again"] = run.train(100 * rank + 3, 100 * rank + 6)[0]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


def failures(run, checkpoint, rank):
    """Return what every rank says when one of them cannot save or restore."""
    found = {}
    file = Path(checkpoint).parent / "file"
    if rank == 0:
        file.write_bytes(b"mine")
    found["file"] = message(lambda: save_checkpoint(file, *run.parts))
    found["missing"] = message(
        lambda: restore_checkpoint(file.parent / "no", *run.parts)
    )
    extra = {"it": {1}}
    found["a set"] = message(lambda: save_checkpoint(checkpoint, *run.parts, **extra))
    weight = run.model.layers[0].weight
    run.model.layers[0].weight = weight + rank
    found["other weights"] = message(lambda: save_checkpoint(checkpoint, *run.parts))
    run.model.layers[0].weight = weight
    if rank == 1:
        run.model.more = nn.Linear(1, 1)
    before = run.fingerprint()
    found["other model"] = message(lambda: restore_checkpoint(checkpoint, *run.parts))
    found["unchanged"] = run.fingerprint() == before
    if rank == 1:
        del run.model["more"]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
