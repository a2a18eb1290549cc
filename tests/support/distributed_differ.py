"""One rank of test_differ.py: differ, and write down the errors.

python distributed_differ.py FOLDER
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.distributed import broadcast
from support.distributed_parts import Deep, message


def differ(group):
    """Let the last rank differ in one thing after the other; return the errors."""
    odd = group.rank() == group.size() - 1
    found = {}

    def init(case, model=None, inner=None, scaler=None, **options):
        if model is None:
            mx.random.seed(0)
            model = Deep(1)
        options = {"average": True, **options}
        inner = inner or optim.AdamW(1e-2)
        optimizer = LossScaleOptimizer(inner, scaler, group=group, **options)
        found[case] = message(lambda: optimizer.init(model.trainable_parameters()))

    init("nothing")
    mx.random.seed(group.rank())
    model = Deep(1)
    init("seed", model)
    model.update(broadcast(model.parameters(), group))
    init("broadcast", model)
    mx.random.seed(0)
    init("layer", Deep(2 if odd else 1))
    model = Deep(1)
    if odd:
        model.out = nn.Linear(9, 1)
    init("shape", model)
    init("scale", scaler=GradScaler(2.0**9 if odd else 2.0**8))
    init("interval", scaler=GradScaler(growth_interval=7 if odd else 8))
    init("norm", max_grad_norm=1.0 if odd else None)
    init("masters", masters="remainder" if odd else "float32")
    init("optimizer", inner=optim.SGD(1e-2) if odd else optim.Lion(1e-2))
    init("decay", inner=optim.AdamW(1e-2, weight_decay=0.1 if odd else 0.01))
    mx.random.seed(group.rank())
    init("shards", Deep(1), average=False, sharded=True)
    # A scaler constructed on one rank alone must not wait for the others.
    if odd:
        GradScaler(group=group)
    return found


if __name__ == "__main__":
    group = mx.distributed.init(strict=True, backend="ring")
    found = differ(group)
    (Path(sys.argv[1]) / f"{group.rank()}.json").write_text(json.dumps(found))
