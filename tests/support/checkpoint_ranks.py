"""What one rank does in test_checkpoint_ranks.py: train, save, restore, and report.

python checkpoint_ranks.py FOLDER CHECKPOINT save|restore
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from support.checkpoint_runs import Run
from distributed_parts import fingerprint

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.distributed import assert_in_sync


class Net(nn.Module):
    """Without BatchNorm, whose statistics every rank has its own of."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.Linear(16, 1)]
        self.dropout = nn.Dropout(0.2)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        return self.layers[1](self.dropout(nn.relu(self.layers[0](x))))


def said(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder, checkpoint, task):
    group = mx.distributed.init(backend="ring") if task != "alone" else None
    rank = group.rank() if group else 0
    mx.disable_compile()
    mx.random.seed(3)
    scaler = GradScaler(init_scale=256.0, growth_interval=3)
    average = "float32" if group else None
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2), scaler, group=group, average=average
    )
    run = Run(optimizer, dtype=mx.float16, model=Net())
    mx.random.seed(rank)  # each rank drops out for itself
    report = {}
    if task == "save":
        run.train(100 * rank, 100 * rank + 3)
        save_checkpoint(checkpoint, *run.parts, step=3)
        report["next"] = run.train(100 * rank + 3, 100 * rank + 6)
        report |= failures(run, checkpoint, rank)
    report["extra"] = restore_checkpoint(checkpoint, *run.parts)
    report["restored"] = fingerprint([run.model.parameters(), optimizer.state])
    assert_in_sync([run.model.parameters(), optimizer.state], group)
    report["again"] = run.train(100 * rank + 3, 100 * rank + 6)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


def statistics(folder, rank):
    """BatchNorm's, which are of each rank's own data."""
    norm, optimizer = nn.BatchNorm(2), optim.SGD(0.1)
    norm.running_mean = mx.full(2, float(rank + 5))
    save_checkpoint(folder, norm, optimizer)
    restore_checkpoint(folder, norm, optimizer)
    return norm.running_mean.tolist()


def failures(run, checkpoint, rank):
    """What every rank says when one of them cannot."""
    found = {"statistics": statistics(Path(checkpoint).parent / "norm", rank)}
    foreign = Path(checkpoint).parent / "foreign"
    if rank == 0:
        foreign.mkdir()
        (foreign / "model.safetensors").write_bytes(b"mine")
    found["foreign"] = said(save_checkpoint, foreign, *run.parts)
    found["missing"] = said(restore_checkpoint, foreign.parent / "no", *run.parts)
    # In the background rank 0 fails when all have gone on.
    late = foreign.parent / "run.earlier-1"
    if rank == 0:
        late.mkdir()
    options = {"keep": 2, "background": True}
    found["begun"] = said(save_checkpoint, checkpoint, *run.parts, **options)
    found["late"] = said(save_checkpoint, checkpoint, *run.parts)
    weight = run.model.layers[0].weight
    run.model.layers[0].weight = weight + rank
    found["shards"] = said(save_checkpoint, checkpoint, *run.parts)
    run.model.layers[0].weight = weight
    if rank == 1:
        run.model.more = nn.Linear(1, 1)
    before = run.fingerprint()
    found["other model"] = said(restore_checkpoint, checkpoint, *run.parts)
    found["unchanged"] = run.fingerprint() == before
    if rank == 1:
        del run.model["more"]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
