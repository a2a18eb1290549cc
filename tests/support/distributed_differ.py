"""What one rank does in test_distributed_differ.py: differ, and write what it is told.

python distributed_differ.py FOLDER CASE
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from distributed_parts import Deep, compiled_step, rank_batch
from helpers import same
from mlx.utils import tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.diagnostics import LossScaleCallback
from mlx_gradscale.distributed import assert_in_sync, exchange


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def wrapped(group, scaler=None, average="float32", inner=None, **options):
    inner = inner or optim.AdamW(1e-2)
    return LossScaleOptimizer(inner, scaler, group=group, average=average, **options)


def told(group):
    """Everything in which the last rank can differ, one after the other."""
    odd = group.rank() == group.size() - 1
    found = {}

    def init(case, model=None, **options):
        model = Deep(1) if model is None else model
        optimizer = wrapped(group, **options)
        found[case] = message(lambda: optimizer.init(model.trainable_parameters()))
        # All raise and nothing is half done, so that the next one can be tried.
        kept = optimizer.state["masters"] or optimizer.state["remainders"]
        assert (found[case] is None) == bool(kept)

    init("nothing")
    init("layer", Deep(2 if odd else 1))
    for half in ("shape", "dtype"):
        model = Deep(1)
        if odd and half == "shape":
            model.out = nn.Linear(9, 1)
        elif odd:
            model.out.set_dtype(mx.bfloat16)
        init(half, model)
    init("scale", scaler=GradScaler(2.0**9 if odd else 2.0**8), average="scaled")
    init("interval", scaler=GradScaler(growth_interval=7 if odd else 8))
    init("enabled", scaler=GradScaler(enabled=not odd))
    init("norm", max_grad_norm=1.0 if odd else None)
    init("masters", masters="remainder" if odd else "float32")
    init("average", average="scaled" if odd else "float32")
    init("optimizer", inner=optim.SGD(1e-2) if odd else optim.Lion(1e-2))
    init("rate", inner=optim.SGD(1e-2 if odd else 1e-3))
    # Shards may have any shape; who decides together must scale together.
    init("shards", Deep(2 if odd else 1), average=None)
    init("shards' scale", average=None, scaler=GradScaler(8.0 if odd else 4.0))
    init("own shards", Deep(2 if odd else 1), sharded=lambda p, _: "layers" in p)
    init("calls", average=None if odd else "scaled", sharded=lambda *_: False)

    optimizer = wrapped(group)
    model = Deep(1)
    optimizer.init(model.trainable_parameters())
    before = tree_map(lambda x: x, optimizer.state)
    other = tree_map(lambda x: x, optimizer.state)
    if odd:
        other["scaler"]["scale"] = mx.array(32.0)
        other["optimizer"]["step"] = mx.array(5, mx.uint64)
    found["load"] = message(lambda: setattr(optimizer, "state", other))
    assert same(optimizer.state, before)
    fresh = wrapped(group)
    found["load before init"] = message(lambda: setattr(fresh, "state", other))
    saved = GradScaler(32.0 if odd else 64.0).state_dict()
    found["scaler in it"] = message(lambda: optimizer.scaler.load_state_dict(saved))
    assert same(optimizer.state, before)

    found["scaler"] = message(lambda: GradScaler(4.0 if odd else 8.0, group=group))
    scaler = GradScaler(group=group)
    found["scaler load"] = message(lambda: scaler.load_state_dict(saved))
    assert scaler.get_scale() == 65536.0
    if odd:
        found["other call"] = message(lambda: assert_in_sync({}, group))
    else:
        found["other call"] = message(lambda: GradScaler(group=group))

    # One rank calls init, the others take their first step, and then all go on.
    optimizer, model = wrapped(group), Deep(1)
    model.update(tree_map(mx.zeros_like, model.parameters()))
    optimizer.scale_loss(lambda: None, model)
    if odd:
        optimizer.init(model.trainable_parameters())
    grads = {} if odd else tree_map(mx.ones_like, model.trainable_parameters())
    optimizer.update(model, grads)
    assert_in_sync(optimizer.state, group)

    # Inside of mx.compile nothing is sent, or all would be told.
    optimizer, model = wrapped(group), Deep(2 if odd else 1)
    state = [model.state, optimizer.state]
    step = mx.compile(optimizer.init, inputs=state, outputs=state)
    found["compiled"] = message(lambda: step(model.trainable_parameters()))

    lines = []
    callback = LossScaleCallback(optimizer, write=lines.append)
    callback.on_train_loss_report({"iteration": 1, "train_loss": 1.0})
    found["lines"] = len(lines)
    return found


def init_in_a_step(group):
    """Rank 0 trains already when rank 1 initialises once more."""
    model, optimizer = Deep(1), wrapped(group)
    step = compiled_step(model, optimizer)
    step(*rank_batch(0, group.rank(), False))
    if group.rank():
        return message(lambda: optimizer.init(model.trainable_parameters()))
    return message(lambda: [step(*rank_batch(i, 0, False)) for i in range(3)])


def left_out(group):
    """Rank 1 leaves out a step, and is at the end when rank 0 is not."""
    model, optimizer = Deep(1), wrapped(group)
    step = compiled_step(model, optimizer)

    def train():
        for i in range(5):
            if group.rank() == 0 or i != 2:
                step(*rank_batch(i, group.rank(), False))
        assert_in_sync(optimizer.state, group)

    return message(train)


def too_late(group):
    """Rank 1 never comes."""
    exchange.PATIENCE = 1.0
    if group.rank() == 0:
        return message(lambda: GradScaler(group=group))
    # Until rank 0 is gone.
    return message(lambda: mx.eval(mx.distributed.recv((4,), mx.float32, 0)))


CASES = {case.__name__: case for case in (told, init_in_a_step, left_out, too_late)}


def main(folder, case):
    group = mx.distributed.init(strict=True, backend="ring")
    found = CASES[case](group)
    (Path(folder) / f"{group.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
