"""One rank of the restart test in test_distributed.py: train and save.

python distributed_restart.py FOLDER CHECKPOINT STOP [RANK_THAT_DIES STEP]
"""

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.distributed import assert_in_sync, from_rank_0
from support.distributed_parts import compiled_step, fingerprint
from support.helpers import Mlp, batch, mse

OVERFLOWS = (2, 7, 11)


def share(step, group):
    """Return this rank's part of eight samples, of which one may overflow."""
    x, y = batch(step, 8, mx.float16)
    if step in OVERFLOWS:
        x[5] = x[5] * 30000
    return tuple(mx.split(a, group.size())[group.rank()] for a in (x, y))


def save(path, tree):
    """Write to another file and rename it, so that the last file stays whole."""
    beside = path.with_name(f"beside-{path.name}")
    mx.save_safetensors(str(beside), dict(tree_flatten(tree)))
    os.replace(beside, path)


def main(folder, checkpoint, stop, dies=-1, dies_at=-1):
    group = mx.distributed.init(backend="ring")
    rank, path = group.rank(), Path(checkpoint)
    mx.random.seed(rank)  # a rank that did not load would start elsewhere
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2),
        GradScaler(init_scale=256.0, growth_interval=3, max_scale=1024.0),
        group=group,
        average=True,
    )
    state = {"model": model.parameters(), "step": mx.array(0)}
    if from_rank_0(path.exists, group):
        loaded = from_rank_0(lambda: mx.load(checkpoint), group)
        state = tree_unflatten(list(loaded.items()))
        model.update(state["model"])
        optimizer.init(model.trainable_parameters())
        optimizer.state = state["optimizer"]
    else:
        state = from_rank_0(lambda: state, group)
    model.update(state["model"])
    start = state["step"].item()
    report = {"start": start, "loaded": fingerprint(everything(model, optimizer))}
    step = compiled_step(model, optimizer)
    assert_in_sync(everything(model, optimizer), group)
    try:
        for i in range(start, stop):
            if rank == dies and i == dies_at:
                # The other ranks wait for its gradients.
                loss_and_grad = optimizer.value_and_grad(model, mse(model))
                mx.eval(loss_and_grad(*share(i, group)))
                os._exit(9)
            step(*share(i, group))
            report["saved"] = fingerprint(everything(model, optimizer))
            if rank == 0:
                save(path, everything(model, optimizer) | {"step": mx.array(i + 1)})
    except RuntimeError as error:
        report["error"] = str(error)
    else:
        report["scaler"] = optimizer.scaler.state_dict()
        report["parameters"] = {
            path: x.tolist() for path, x in tree_flatten(optimizer.state["masters"])
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


def everything(model, optimizer):
    return {"model": model.parameters(), "optimizer": optimizer.state}


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
