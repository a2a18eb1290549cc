"""One rank of the restart test in test_distributed.py: train and save.

python distributed_restart.py FOLDER CHECKPOINT STOP [RANK_THAT_DIES STEP]
"""

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.distributed import broadcast
from support.distributed_parts import compiled_step, fingerprint
from support.helpers import Mlp, batch, mse

OVERFLOWS = (2, 7, 11)


def share(step, group):
    """Return this rank's part of eight samples, of which one may overflow."""
    x, y = batch(step, 8, mx.float16)
    if step in OVERFLOWS:
        x[5] = x[5] * 30000
    return tuple(mx.split(a, group.size())[group.rank()] for a in (x, y))


def main(folder, checkpoint, stop, dies=-1, dies_at=-1):
    group = mx.distributed.init(backend="ring")
    rank = group.rank()
    mx.random.seed(rank)  # a rank that did not restore would start elsewhere
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2),
        GradScaler(init_scale=256.0, growth_interval=3, max_scale=1024.0),
        group=group,
        average=True,
    )
    start = 0
    if Path(checkpoint).exists():
        start = restore_checkpoint(checkpoint, model, optimizer)["step"]
    else:
        model.update(broadcast(model.parameters(), group))
    report = {"start": start, "loaded": hash_of(model, optimizer)}
    step = compiled_step(model, optimizer)
    try:
        for i in range(start, stop):
            if rank == dies and i == dies_at:
                # The other ranks wait for its gradients.
                loss_and_grad = optimizer.value_and_grad(model, mse(model))
                mx.eval(loss_and_grad(*share(i, group)))
                os._exit(9)
            step(*share(i, group))
            report["saved"] = hash_of(model, optimizer)
            save_checkpoint(checkpoint, model, optimizer, step=i + 1)
    except RuntimeError as error:
        report["error"] = str(error)
    else:
        report["scaler"] = optimizer.scaler.state_dict()
        masters = tree_flatten(optimizer.masters(model.trainable_parameters()))
        report["parameters"] = {path: x.tolist() for path, x in masters}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


def hash_of(model, optimizer):
    return fingerprint([model.parameters(), optimizer.state])


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
