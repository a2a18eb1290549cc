"""One rank of test_distributed.py: run checks and write the findings as JSON.

python distributed_worker.py FOLDER CHECK...
"""

import json
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_gradscale import GradScaler, LossScaleOptimizer, save_checkpoint
from mlx_gradscale.core import ranks as core_ranks
from mlx_gradscale.core.masters import to_float32
from mlx_gradscale.diagnostics import calibrate
from mlx_gradscale.distributed import assert_in_sync, broadcast, from_rank_0
from support.distributed_parts import (
    Deep,
    all_reduces,
    compiled_step,
    fingerprint,
    message,
    overflows,
    rank_batch,
)
from support.helpers import INF, Mlp, Traced, batch, gradients_like, mse, parameters
from support.scaler_helpers import used

SCALER = {"init_scale": 2.0**8, "growth_interval": 10, "max_scale": 2.0**10}


def data_parallel(group):
    """Float16 training where random ranks overflow at random steps."""
    steps = 80 if group.size() == 2 else 50
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2),
        GradScaler(**SCALER),
        max_grad_norm=1.0,
        state_bits=32 if group.size() == 2 else 8,
        group=group,
        average=True,
    )
    step = compiled_step(model, optimizer)
    scales = []
    bad = overflows(steps, group.size())
    for i in range(steps):
        step(*rank_batch(i, group.rank(), bad[i, group.rank()]))
        scales.append(optimizer.scaler.get_scale())
    return {
        "scales": scales,
        "skipped": optimizer.scaler.skipped_steps.item(),
        "steps": optimizer.step.item(),
        "state": fingerprint([model.parameters(), optimizer.state]),
        "traces": step.traced.count,
    }


def own_loop(group, steps=40):
    """A loop with a GradScaler that averages and clips, compiled as a whole."""
    model, scaler = Mlp(), GradScaler(**SCALER, group=group)
    optimizer = optim.AdamW(1e-2)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    state = [model.state, optimizer.state, scaler.state]
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        grads = nn.average_gradients(grads, group)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        scaler.minimize(optimizer, model, grads)
        return loss

    traced = Traced(step)
    compiled = mx.compile(traced, inputs=state, outputs=state)
    bad = overflows(steps, group.size())
    for i in range(steps):
        loss = compiled(*rank_batch(i, group.rank(), bad[i, group.rank()]))
        count = all_reduces([loss, state])
        mx.eval(state)
    return {
        "skipped": scaler.skipped_steps.item(),
        "scale": scaler.get_scale(),
        "state": fingerprint(state),
        "traces": traced.count,
        "all_reduces": count,
    }


def decide(group):
    """Different gradients on every rank, none on rank 0, without averaging."""
    rank, last = group.rank(), group.size() - 1
    options = {"init_scale": 8.0, "growth_interval": 1, "group": group}
    found = {}

    def report(case, scaler, new, state):
        count = all_reduces([new, state])
        moved = [x.tolist() == [-1.0] * x.size for x in new.values()]
        found[case] = [scaler.get_scale(), count, moved]

    for bad in (False, True):
        value = INF if bad and rank == last else 8.0
        grads = {} if rank == 0 else {"w": mx.full((rank,), value)}
        weights = tree_map(mx.zeros_like, grads)

        for way in ("step", "unscale_and_step", "unscale_only"):
            one, sgd, new = used(GradScaler(**options)), optim.SGD(1.0), weights
            given = grads if way == "step" else one.unscale_(sgd, grads)
            if way != "unscale_only":
                new = one.apply_gradients(sgd, given, weights)
            one.update()
            report(f"{way} {bad}", one, new, one.state)
        grads = {f"w{rank}": mx.full((rank + 1,), value)}
        weights = tree_map(mx.zeros_like, grads)
        for max_grad_norm in (None, INF):
            wrapper = LossScaleOptimizer(
                optim.SGD(1.0),
                used(GradScaler(**options)),
                max_grad_norm=max_grad_norm,
                group=group,
                sharded=True,
            )
            wrapper.init(weights)
            new = wrapper.apply_gradients(grads, weights)
            case = f"wrapper {max_grad_norm} {bad}"
            report(case, wrapper.scaler, new, wrapper.state)
    return found


def tensor_parallel(group, steps=12):
    """Linear layers cut over the ranks, against the same model in one piece."""
    mx.random.seed(3)
    whole, cut = Mlp(16), Mlp(16)

    def cut_layers():
        kinds = ("all-to-sharded", "sharded-to-all")
        return [
            nn.layers.distributed.shard_linear(layer, kind, group=group)
            for layer, kind in zip(whole.layers, kinds, strict=True)
        ]

    cut.layers = cut_layers()

    def trainer(model, **ranks):
        scaler = GradScaler(**SCALER)
        optimizer = LossScaleOptimizer(
            optim.AdamW(1e-2), scaler, max_grad_norm=0.5, **ranks
        )
        loss_and_grad = optimizer.value_and_grad(model, mse(model))
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state]

        def step(x, y, poison):
            loss, grads = loss_and_grad(x, y)
            weight = grads["layers"][0]["weight"]
            grads["layers"][0]["weight"] = weight * poison
            optimizer.update(model, grads)
            return loss

        return mx.compile(step, inputs=state, outputs=state), state, optimizer

    step, state, optimizer = trainer(
        cut, group=group, sharded=lambda path, _: path != "layers.1.bias"
    )
    reference, reference_state, expected = trainer(whole)
    last = group.size() - 1
    norms = []
    for i in range(steps):
        x, y = batch(i)
        bad = i in (3, 8)
        step(x, y, mx.array(INF if bad and group.rank() == last else 1.0))
        mx.eval(state)
        reference(x, y, mx.array(INF if bad else 1.0))
        mx.eval(reference_state)
        norms.append([optimizer.grad_norm.item(), expected.grad_norm.item()])
    mine = tree_flatten(cut.trainable_parameters())
    whole.layers = cut_layers()
    theirs = dict(tree_flatten(whole.trainable_parameters()))
    return {
        "norms": norms,
        "skipped": optimizer.scaler.skipped_steps.item(),
        "scaler": fingerprint(optimizer.scaler.state),
        "error": max(mx.abs(x - theirs[p]).max().item() for p, x in mine),
    }


def buckets(group):
    """Many buckets of mixed dtypes, evaluated in opposite order on two ranks."""
    like = {
        "half": parameters(mx.float16),
        "full": parameters(),
        "complex": parameters(mx.complex64),
    }
    trees = [gradients_like(like, seed) for seed in range(group.size())]
    trees = [tree_map(lambda p, g: g.astype(p.dtype), like, tree) for tree in trees]
    for tree in trees:  # two of these add up to inf in float16
        tree["large"] = mx.full((3,), 40000.0, mx.float16)
    normal, core_ranks._BUCKET_BYTES = core_ranks._BUCKET_BYTES, 64
    try:
        own = dict(tree_flatten(trees[group.rank()]))
        mean = core_ranks.Ranks(group, average=True).averaged(own)
        mean = tree_unflatten(list(mean.items()))
        for _, x in tree_flatten(mean)[:: 1 if group.rank() else -1]:
            mx.eval(x)
    finally:
        core_ranks._BUCKET_BYTES = normal
    full = [tree_map(to_float32, tree) for tree in trees]
    expected = tree_map(lambda *g: sum(g) / len(g), *full)
    differences = tree_map(
        lambda a, b: mx.abs(a - b).max() if a.size else mx.array(0.0), mean, expected
    )
    return {
        "error": max(x.item() for _, x in tree_flatten(differences)),
        "dtypes": sorted({str(x.dtype) for _, x in tree_flatten(mean)}),
        "mean": fingerprint(mean),
    }


def counted(group):
    """All-reduces in one compiled step, for few and for many parameters."""
    found = {}
    cases = {
        "none": {},
        "average": {"group": group, "average": True},
        "sharded": {"group": group, "sharded": True},
    }
    for name, ranks in cases.items():
        for max_grad_norm in (None, 1.0):
            counts = found[f"{name} {max_grad_norm}"] = []
            for depth in (1, 12):
                model = Deep(depth)
                optimizer = LossScaleOptimizer(
                    optim.AdamW(1e-2), max_grad_norm=max_grad_norm, **ranks
                )
                step = compiled_step(model, optimizer)
                loss = step.compiled(*rank_batch(0, 0, False))
                # Not evaluated, on any rank.
                counts.append(all_reduces([loss, model.state, optimizer.state]))
    return found


def drift(group):
    """assert_in_sync finds differences, and from_rank_0 removes them."""
    rank, last = group.rank(), group.size() - 1
    found = {}
    scaler = GradScaler(group=group)
    assert_in_sync(scaler.state, group)
    if rank == last:
        scaler.update(32.0)
    found["scaler"] = message(lambda: assert_in_sync(scaler.state, group))
    scaler.load_state_dict(from_rank_0(scaler.state_dict, group))
    assert_in_sync(scaler.state, group)
    found["scale"] = scaler.get_scale()

    mx.random.seed(rank)
    model = Mlp(dtype=mx.bfloat16)
    found["seeds"] = message(lambda: assert_in_sync(model.parameters(), group))
    model.update(broadcast(model.parameters(), group))
    assert_in_sync(model.parameters(), group)
    if rank == last:
        model.layers[1].weight = model.layers[1].weight + 1
    found["model"] = message(lambda: assert_in_sync(model.parameters(), group))
    extra = {"a": mx.ones(2)} | ({"b": mx.ones(2)} if rank == last else {})
    found["structure"] = message(lambda: assert_in_sync(extra, group))
    many = {f"x{i}": mx.array(rank == last) for i in range(20)}
    found["many"] = message(lambda: assert_in_sync(many, group))

    nan = np.array([0x7FC12345, 0x80000000], np.uint32)
    tree = {
        "bits": mx.array(nan).view(mx.float32),
        "half": [mx.array(-0.0, mx.bfloat16), {}, (mx.array(True), None)],
        "wide": mx.array(np.array([2**63 + 1], np.uint64)),
        "empty": mx.zeros((0, 3), mx.float16),
        "numbers": {"scale": 1e300, "steps": 2**53 + 1, "name": "x", "flag": True},
    }
    got = from_rank_0(lambda: tree if rank == 0 else 1 / 0, group)
    found["tree"] = fingerprint(got) == fingerprint(tree)
    found["kinds"] = got["numbers"] == tree["numbers"] and got["half"][1:] == [
        {},
        (tree["half"][2][0], None),
    ]
    missing = Path("no such file.safetensors")
    found["missing"] = message(
        lambda: from_rank_0(lambda: mx.load(str(missing)), group)
    )
    found["unsupported"] = message(lambda: from_rank_0(lambda: {"x": group}, group))
    found["after"] = from_rank_0(lambda: 1 + rank, group)
    return found


def calibrated(group):
    """Batches of very different size, one scale; and one batch that no scale cures."""
    model, rank = Mlp(dtype=mx.float16), group.rank()
    x, y = batch(rank, 4, mx.float16)
    loss_fn = lambda x, y: 10.0 ** (2 * rank) * mse(model)(x, y)  # noqa: E731
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(), group=group)
    found = {"scale": calibrate(optimizer, model, loss_fn, x, y, group=group)}
    bad = x * (float("nan") if rank == 0 else 1)
    found["bad"] = message(lambda: calibrate(optimizer, model, loss_fn, bad, y))
    found["after"] = optimizer.scaler.get_scale()
    return found


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
    init("clipping", max_grad_norm=1.0 if odd else None)
    init("norm", max_grad_norm=1.0 if odd else 2.0)
    init("rate", inner=optim.AdamW(1e-2 if odd else 1e-3))
    rate = optim.cosine_decay(1e-2 if odd else 1e-3, 10)
    init("schedule", inner=optim.AdamW(rate))
    init("average", average=not odd)
    init("bits", state_bits=16 if odd else 32)
    init("optimizer", inner=optim.SGD(1e-2) if odd else optim.Lion(1e-2))
    init("decay", inner=optim.AdamW(1e-2, weight_decay=0.1 if odd else 0.01))
    init("half", inner=optim.AdamW(mx.array(0.25, mx.bfloat16)))
    mx.random.seed(group.rank())
    init("shards", Deep(1), average=False, sharded=True)
    # A scaler constructed on one rank alone must not wait for the others.
    if odd:
        GradScaler(group=group)
    return found


def frozen(group):
    """A rank whose gradients differ from init() refuses its step on its own."""
    weights = {"a": mx.ones(2), "b": mx.ones(3)}
    optimizer = LossScaleOptimizer(optim.SGD(1.0), group=group, average=True)
    optimizer.init(weights)
    others = {"a": mx.ones(2)}, weights | {"c": mx.ones(1)}, {"a": mx.ones(3)}
    steps = [partial(optimizer.apply_gradients, x, weights | x) for x in others]
    found = {"refused": [message(step) for step in steps if group.rank() == 1]}
    # All ranks can agree to train only a part.
    optimizer.init({"b": weights["b"]})
    gradient = {"b": mx.full((3,), 2.0 * group.rank())}
    found["new"] = optimizer.apply_gradients(gradient, weights)["b"].tolist()
    return found


def mixed_up(group):
    """Ranks that make different calls; the last check, because it ends the ring."""
    rank, model = group.rank(), Deep(1)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), group=group, average=True)
    optimizer.init(model.trainable_parameters())
    call = [assert_in_sync, broadcast][rank]
    found = {"call": message(lambda: call(model.parameters(), group))}
    grads = tree_map(mx.ones_like, model.trainable_parameters())

    def train_or_save():
        if rank == 0:
            save_checkpoint("nothing", model, optimizer)
        optimizer.update(model, grads)
        mx.eval(model.state)

    return found | {"save": message(train_or_save)}


CHECKS = {
    "data parallel": data_parallel,
    "own loop": own_loop,
    "decide": decide,
    "tensor parallel": tensor_parallel,
    "buckets": buckets,
    "counted": counted,
    "drift": drift,
    "calibrated": calibrated,
    "differ": differ,
    "frozen": frozen,
    "mixed up": mixed_up,
}


def main(folder, names):
    group = mx.distributed.init(strict=True, backend="ring")
    findings = {"size": group.size()}
    for name in names:
        mx.random.seed(0)
        findings[name] = CHECKS[name](group)
    path = Path(folder) / f"{group.rank()}.json"
    path.write_text(json.dumps(findings))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
