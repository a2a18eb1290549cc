"""What test_distributed.py checks on each rank.

python distributed_worker.py FOLDER CHECK...
python distributed_worker.py FOLDER restart CHECKPOINT STOP [RANK_THAT_DIES STEP]

A check raises on the rank that finds a mistake. What it returns must be equal on all.
"""

import json
import os
import sys
import traceback
from functools import partial
from inspect import signature
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import (
    GradScaler,
    LossScaleOptimizer,
    restore_checkpoint,
    save_checkpoint,
)
from mlx_gradscale.core import ranks as core_ranks
from mlx_gradscale.diagnostics import calibrate
from mlx_gradscale.distributed import assert_in_sync, broadcast, from_rank_0
from support.distributed_parts import (
    Deep,
    all_reduces,
    compiled_step,
    fingerprint,
    message,
    rank_batch,
)
from support.helpers import (
    INF,
    Mlp,
    Traced,
    batch,
    compiled_if,
    gradients_like,
    mse,
    parameters,
)
from support.optimizer_helpers import assert_near
from support.reference import Reference
from support.scaler_helpers import used

SCALER = {"init_scale": 2.0**8, "growth_interval": 10, "max_scale": 2.0**10}


def overflows(steps, ranks):
    """Return which rank overflows in which step, as bools of shape (steps, ranks)."""
    found = np.random.default_rng(7).random((steps, ranks)) < 0.05
    assert 0 < found.any(axis=1).sum() < steps
    return found


def overflow_on_one_rank_skips_the_step_on_all_ranks(group):
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
    bad = overflows(80 if group.size() == 2 else 50, group.size())
    expected = Reference(scale=2.0**8, growth_interval=10, max_scale=2.0**10)
    for i, each in enumerate(bad):
        step(*rank_batch(i, group.rank(), each[group.rank()]))
        expected.update(not each.any())
        assert optimizer.scaler.get_scale() == expected.scale
    n_skipped = bad.any(axis=1).sum()
    assert optimizer.scaler.skipped_steps.item() == n_skipped
    assert optimizer.step.item() == len(bad) - n_skipped
    assert group.size() > 2 or step.traced.count == 1
    return fingerprint([model.parameters(), optimizer.state])


def scaler_in_a_custom_loop_decides_with_one_all_reduce(group):
    model, scaler = Mlp(), GradScaler(**SCALER, group=group)
    optimizer = optim.AdamW(1e-2)
    loss_and_grad = scaler.value_and_grad(model, mse(model), mx.float16)
    optimizer.init(model.trainable_parameters())

    def step(x, y):
        loss, grads = loss_and_grad(x, y)
        grads = nn.average_gradients(grads, group)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        scaler.minimize(optimizer, model, grads)
        return loss

    traced, state = Traced(step), [model.state, optimizer.state, scaler.state]
    compiled = compiled_if(True, traced, *state)
    bad = overflows(40, group.size())
    for i, each in enumerate(bad):
        loss = compiled(*rank_batch(i, group.rank(), each[group.rank()]))
        # The averaging, and one for the decision of unscale_() and step() together.
        assert all_reduces([loss, state]) == 2
        mx.eval(state)
    assert scaler.skipped_steps.item() == bad.any(axis=1).sum()
    assert traced.count == 1
    return fingerprint(state)


def ranks_with_different_or_no_gradients_decide_together(group):
    rank, last = group.rank(), group.size() - 1
    options = {"init_scale": 8.0, "growth_interval": 1, "group": group}

    def check(scaler, new, state, applied, bad):
        assert all_reduces([new, state]) == 1  # before anything is evaluated
        assert scaler.get_scale() == (4.0 if bad else 16.0)
        for x in new.values():
            assert x.tolist() == [-1.0 if applied else 0.0] * x.size

    for bad in (False, True):
        value = INF if bad and rank == last else 8.0
        grads = {} if rank == 0 else {"w": mx.full((rank,), value)}
        weights = tree_map(mx.zeros_like, grads)
        for mode in ("step", "unscale and step", "unscale"):
            scaler, sgd, new = used(GradScaler(**options)), optim.SGD(1.0), weights
            given = grads if mode == "step" else scaler.unscale_(sgd, grads)
            if mode != "unscale":
                new = scaler.apply_gradients(sgd, given, weights)
            scaler.update()
            check(scaler, new, scaler.state, mode != "unscale" and not bad, bad)
        grads = {f"w{rank}": mx.full((rank + 1,), value)}
        weights = tree_map(mx.zeros_like, grads)
        for norm in (None, INF):
            scaler = used(GradScaler(**options))
            wrapper = LossScaleOptimizer(
                optim.SGD(1.0), scaler, max_grad_norm=norm, group=group, sharded=True
            )
            wrapper.init(weights)
            new = wrapper.apply_gradients(grads, weights)
            check(scaler, new, wrapper.state, not bad, bad)


def shards_are_clipped_and_skipped_like_the_whole_model(group):
    """Linear layers cut over the ranks, against the same model in one piece."""
    mx.random.seed(3)
    whole, cut = Mlp(16), Mlp(16)

    def cut_layers():
        kinds = ("all-to-sharded", "sharded-to-all")
        shard = partial(nn.layers.distributed.shard_linear, group=group)
        return [shard(*each) for each in zip(whole.layers, kinds, strict=True)]

    cut.layers = cut_layers()

    def trainer(model, **ranks):
        optimizer = LossScaleOptimizer(
            optim.AdamW(1e-2), GradScaler(**SCALER), max_grad_norm=0.5, **ranks
        )
        loss_and_grad = optimizer.value_and_grad(model, mse(model))
        optimizer.init(model.trainable_parameters())

        def step(x, y, poison):
            loss, grads = loss_and_grad(x, y)
            grads["layers"][0]["weight"] *= poison
            optimizer.update(model, grads)
            return loss

        return compiled_if(True, step, model.state, optimizer.state), optimizer

    step, optimizer = trainer(
        cut, group=group, sharded=lambda path, _: path != "layers.1.bias"
    )
    reference, expected = trainer(whole)
    norms = []
    for i in range(12):
        x, y = batch(i)
        bad = i in (3, 8)
        is_poisoned = bad and group.rank() == group.size() - 1
        step(x, y, mx.array(INF if is_poisoned else 1.0))
        mx.eval(cut.state, optimizer.state)
        reference(x, y, mx.array(INF if bad else 1.0))
        norms.append(optimizer.grad_norm.item())
        assert norms[-1] == pytest.approx(expected.grad_norm.item(), rel=1e-6)
    assert max(norms) == INF
    assert optimizer.scaler.skipped_steps.item() == 2
    whole.layers = cut_layers()
    assert_near(cut.trainable_parameters(), whole.trainable_parameters(), 0, 1e-6)
    return norms, fingerprint(optimizer.scaler.state)


def many_buckets_of_mixed_dtypes_keep_their_order(group):
    """They are evaluated in opposite order on two ranks."""
    kinds = (("half", mx.float16), ("full", mx.float32), ("complex", mx.complex64))
    like = {name: parameters(dtype) for name, dtype in kinds}
    trees = [gradients_like(like, seed) for seed in range(group.size())]
    trees = [tree_map(lambda p, g: g.astype(p.dtype), like, tree) for tree in trees]
    for tree in trees:  # two of these add up to inf in float16
        tree["large"] = mx.full((3,), 40000.0, mx.float16)
    trees = [dict(tree_flatten(tree)) for tree in trees]
    normal, core_ranks._BUCKET_BYTES = core_ranks._BUCKET_BYTES, 64
    try:
        mean = core_ranks.Ranks(group, average=True).averaged(trees[group.rank()])
        for x in list(mean.values())[:: 1 if group.rank() else -1]:
            mx.eval(x)
    finally:
        core_ranks._BUCKET_BYTES = normal
    for path, x in mean.items():
        wide = mx.complex64 if path.startswith("complex") else mx.float32
        expected = sum(tree[path].astype(wide) for tree in trees) / len(trees)
        assert x.dtype == wide
        assert mx.array_equal(x, expected), path
    return fingerprint(mean)


def communication_does_not_grow_with_the_parameters(group):
    for ranks, n_reduces in (
        ({}, 0),
        ({"group": group, "average": True}, 1),
        ({"group": group, "sharded": True}, 1),
    ):
        for max_grad_norm in (None, 1.0):
            for depth in (1, 12):  # 4 and 26 parameters
                model = Deep(depth)
                optimizer = LossScaleOptimizer(
                    optim.AdamW(1e-2), max_grad_norm=max_grad_norm, **ranks
                )
                step = compiled_step(model, optimizer)
                loss = step.compiled(*rank_batch(0, 0, False))
                # Not evaluated, on any rank.
                found = all_reduces([loss, model.state, optimizer.state])
                assert found == n_reduces


def assert_in_sync_names_leaf_and_rank(group):
    rank, last = group.rank(), group.size() - 1

    def differ(tree, leaf, values=""):
        error = message(lambda: assert_in_sync(tree, group))
        start = f"RuntimeError: The ranks differ in {leaf!r}: rank 0 has {values}"
        assert error.startswith(start), error
        return error

    scaler = GradScaler(group=group)
    assert_in_sync(scaler.state, group)
    if rank == last:
        scaler.update(32.0)
    error = differ(scaler.state, "scale", "float32 65536.0")
    assert f"rank {last} has float32 32.0." in error
    scaler.load_state_dict(from_rank_0(scaler.state_dict, group))
    assert_in_sync(scaler.state, group)
    assert scaler.get_scale() == 65536.0

    mx.random.seed(rank)
    model = Mlp(dtype=mx.bfloat16)
    differ({"w": model.layers[0].weight}, "w", "bf")
    model.update(broadcast(model.parameters(), group))
    assert_in_sync(model.parameters(), group)
    if rank == last:
        model.layers[1].weight = model.layers[1].weight + 1
    assert "layers.0" not in differ(model.parameters(), "layers.1.weight", "bf")
    extra = {"a": mx.ones(2)} | ({"b": mx.ones(2)} if rank == last else {})
    differ(extra, "b", "nothing")
    many = {f"x{i}": mx.array(rank == last) for i in range(20)}
    assert "... and 12 more." in differ(many, "x0")


def from_rank_0_restores_every_rank_or_raises_on_all(group):
    rank = group.rank()
    nan = np.array([0x7FC12345, 0x80000000], np.uint32)
    tree = {
        "bits": mx.array(nan).view(mx.float32),
        "half": [mx.array(-0.0, mx.bfloat16), {}, (mx.array(True), None)],
        "wide": mx.array(np.array([2**63 + 1], np.uint64)),
        "empty": mx.zeros((0, 3), mx.float16),
        "numbers": {"scale": 1e300, "steps": 2**53 + 1, "name": "x", "flag": True},
    }
    got = from_rank_0(lambda: tree if rank == 0 else 1 / 0, group)
    assert fingerprint(got) == fingerprint(tree)
    assert got["numbers"] == tree["numbers"]
    assert got["half"][1:] == [{}, (tree["half"][2][0], None)]
    missing = "no such file.safetensors"
    error = message(lambda: from_rank_0(lambda: mx.load(missing), group))
    assert missing in error
    assert ("Rank 0 failed with" in error) == (rank > 0)
    error = message(lambda: from_rank_0(lambda: {"x": group}, group))
    assert "unsupported type" in error
    assert from_rank_0(lambda: 1 + rank, group) == 1


def calibrate_finds_one_scale_for_all_ranks(group):
    """Batches of very different size, and one batch that no scale cures."""
    model, rank = Mlp(dtype=mx.float16), group.rank()
    x, y = batch(rank, 4, mx.float16)
    loss_fn = lambda x, y: 10.0 ** (2 * rank) * mse(model)(x, y)  # noqa: E731
    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(), group=group)
    scale = calibrate(optimizer, model, loss_fn, x, y, group=group)
    bad = x * (float("nan") if rank == 0 else 1)
    error = message(lambda: calibrate(optimizer, model, loss_fn, bad, y))
    own = ("The loss on this batch is nan", "failed on another rank")
    assert own[rank] in error
    assert optimizer.scaler.get_scale() == scale
    return scale


def init_names_what_differs_on_every_rank_with_both_values(group):
    odd, decay = group.rank() == group.size() - 1, optim.cosine_decay

    def init(expected, model=None, inner=None, scaler=None, **options):
        if model is None:
            mx.random.seed(0)
            model = Deep(1)
        options = {"average": True, **options}
        inner = inner or optim.AdamW(1e-2)
        optimizer = LossScaleOptimizer(inner, scaler, group=group, **options)
        error = message(lambda: optimizer.init(model.trainable_parameters()))
        start = "" if expected is None else "ValueError: The ranks differ in "
        assert str(error).startswith(start), error
        assert str(expected) in str(error), error

    init(None)
    mx.random.seed(group.rank())
    model = Deep(1)
    init("'layers.0.bias': rank 0 has float16 (8,) with checksum", model)
    model.update(broadcast(model.parameters(), group))
    init(None, model)
    mx.random.seed(0)
    model = Deep(2 if odd else 1)
    init("'layers.1.bias': rank 0 has nothing, rank 1 has float16 (8,)", model)
    model = Deep(1)
    if odd:
        model.out = nn.Linear(9, 1)
    init("'out.weight': rank 0 has float16 (1, 8) with checksum", model)
    for name, first, second, make in (
        ("scale", 256.0, 512.0, lambda x: {"scaler": GradScaler(x)}),
        ("growth_interval", 8, 7, lambda x: {"scaler": GradScaler(growth_interval=x)}),
        ("max_grad_norm", None, 1.0, lambda x: {"max_grad_norm": x}),
        ("average", True, False, lambda x: {"average": x}),
        ("state_bits", 32, 16, lambda x: {"state_bits": x}),
        ("class", "Lion", "SGD", lambda x: {"inner": getattr(optim, x)(1e-2)}),
        ("learning_rate", 0.1, 0.2, lambda x: {"inner": optim.AdamW(x)}),
        ("learning_rate", 0.1, 0.2, lambda x: {"inner": optim.AdamW(decay(x, 10))}),
        (
            "weight_decay",
            0.1,
            0.2,
            lambda x: {"inner": optim.AdamW(1e-2, weight_decay=x)},
        ),
    ):
        expected = f"{name!r}: rank 0 has {first!r}, rank 1 has {second!r}."
        init(expected, **make(second if odd else first))
    init(None, inner=optim.AdamW(mx.array(0.25, mx.bfloat16)))
    mx.random.seed(group.rank())
    init(None, Deep(1), average=False, sharded=True)
    # A scaler constructed on one rank alone must not wait for the others.
    if odd:
        GradScaler(group=group)


def rank_whose_gradients_differ_from_init_refuses_the_step_alone(group):
    weights = {"a": mx.ones(2), "b": mx.ones(3)}
    optimizer = LossScaleOptimizer(optim.SGD(1.0), group=group, average=True)
    optimizer.init(weights)
    if group.rank() == 1:
        for grads, expected in (
            ({"a": mx.ones(2)}, "for 'b', expected a gradient of shape (3,), got none"),
            (weights | {"c": mx.ones(1)}, "for 'c', expected none, got a gradient of"),
            ({"a": mx.ones(3)}, "of shape (2,), got a gradient of shape (3,)"),
        ):
            step = partial(optimizer.apply_gradients, grads, weights | grads)
            assert expected in message(step)
    # All ranks can agree to train only a part.
    optimizer.init({"b": weights["b"]})
    gradient = {"b": mx.full((3,), 2.0 * group.rank())}
    new = optimizer.apply_gradients(gradient, weights)
    assert new["b"].tolist() == [0.0] * 3


def ranks_that_make_different_calls_raise_and_name_them(group):
    """The last check, because it ends the ring."""
    rank, model = group.rank(), Deep(1)
    optimizer = LossScaleOptimizer(optim.SGD(0.1), group=group, average=True)
    optimizer.init(model.trainable_parameters())
    calls = [assert_in_sync, broadcast][:: -1 if rank else 1]
    error = message(lambda: calls[0](model.parameters(), group))
    own, other = (call.__name__ for call in calls)
    assert f"called {own}(), but rank {1 - rank} called {other}(). All" in error
    grads = tree_map(mx.ones_like, model.trainable_parameters())
    if rank == 0:
        error = message(lambda: save_checkpoint("nothing", model, optimizer))
        stranger = "rank 1 called another function that communicates, such as update()."
        assert f"This rank called save_checkpoint(), but {stranger}" in error
    else:
        optimizer.update(model, grads)
        error = message(lambda: mx.eval(model.state))
        assert "connection to a peer was lost" in error


CHECKS = {
    name: check
    for name, check in list(globals().items())
    if getattr(check, "__module__", None) == __name__
    and [*signature(check).parameters] == ["group"]
}


def restart(group, checkpoint, stop, dies=-1, dies_at=-1):
    """Train, save after each step, and report; one rank may die in a step."""
    rank = group.rank()
    mx.random.seed(rank)  # a rank that did not restore would start elsewhere
    model = Mlp(dtype=mx.float16)
    optimizer = LossScaleOptimizer(
        optim.AdamW(1e-2),
        GradScaler(init_scale=256.0, growth_interval=3, max_scale=1024.0),
        group=group,
        average=True,
    )

    def share(i):
        """Return this rank's part of eight samples, of which one may overflow."""
        x, y = batch(i, 8, mx.float16)
        if i in (2, 7, 11):
            x[5] = x[5] * 30000
        return tuple(mx.split(a, group.size())[rank] for a in (x, y))

    def now():
        return fingerprint([model.parameters(), optimizer.state])

    start = 0
    if Path(checkpoint).exists():
        start = restore_checkpoint(checkpoint, model, optimizer)["step"]
    else:
        model.update(broadcast(model.parameters(), group))
    report = {"start": start, "loaded": now()}
    step = compiled_step(model, optimizer)
    try:
        for i in range(start, int(stop)):
            if (rank, i) == (int(dies), int(dies_at)):
                # The other ranks wait for its gradients.
                loss_and_grad = optimizer.value_and_grad(model, mse(model))
                mx.eval(loss_and_grad(*share(i)))
                os._exit(9)
            step(*share(i))
            report["saved"] = now()
            save_checkpoint(checkpoint, model, optimizer, step=i + 1)
    except RuntimeError as error:
        report["error"] = str(error)
    else:
        report["scaler"] = optimizer.scaler.state_dict()
        masters = tree_flatten(optimizer.masters(model.trainable_parameters()))
        report["parameters"] = {path: x.tolist() for path, x in masters}
    return report


def run_checks(group, names):
    findings = {}
    for name in names:
        mx.random.seed(0)
        try:
            findings[name] = ["passed", CHECKS[name](group)]
        except Exception:
            # The ranks may have lost step: this one leaves, and the others notice.
            findings[name] = ["failed", traceback.format_exc()]
            break
    return findings


def main(folder, *arguments):
    group = mx.distributed.init(strict=arguments[0] != "restart", backend="ring")
    if arguments[0] == "restart":
        report = restart(group, *arguments[1:])
    else:
        report = run_checks(group, arguments)
    (Path(folder) / f"{group.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
