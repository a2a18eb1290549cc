"""What test_distributed.py checks on each rank.

python distributed_worker.py FOLDER CHECK...

A check raises on the rank that finds a mistake. What it returns must be equal on all.
"""

import json
import math
import sys
import traceback
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
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
    rank_batch,
)
from support.helpers import INF, Mlp, Traced, batch, gradients_like, mse, parameters
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
    norms = []
    for i in range(12):
        x, y = batch(i)
        bad = i in (3, 8)
        is_poisoned = bad and group.rank() == group.size() - 1
        step(x, y, mx.array(INF if is_poisoned else 1.0))
        mx.eval(state)
        reference(x, y, mx.array(INF if bad else 1.0))
        mx.eval(reference_state)
        norms.append(optimizer.grad_norm.item())
        assert norms[-1] == pytest.approx(expected.grad_norm.item(), rel=1e-6)
    assert max(norms) == math.inf
    assert optimizer.scaler.skipped_steps.item() == 2
    whole.layers = cut_layers()
    theirs = dict(tree_flatten(whole.trainable_parameters()))
    for path, x in tree_flatten(cut.trainable_parameters()):
        assert mx.abs(x - theirs[path]).max().item() < 1e-6
    return norms, fingerprint(optimizer.scaler.state)


def many_buckets_of_mixed_dtypes_keep_their_order(group):
    """They are evaluated in opposite order on two ranks."""
    kinds = (("half", mx.float16), ("full", mx.float32), ("complex", mx.complex64))
    like = {name: parameters(dtype) for name, dtype in kinds}
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
    full = [dict(tree_flatten(tree_map(to_float32, tree))) for tree in trees]
    for path, x in tree_flatten(mean):
        expected = sum(tree[path] for tree in full) / len(full)
        assert x.dtype == expected.dtype
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
    odd = group.rank() == group.size() - 1

    def init(expected, model=None, inner=None, scaler=None, **options):
        if model is None:
            mx.random.seed(0)
            model = Deep(1)
        options = {"average": True, **options}
        inner = inner or optim.AdamW(1e-2)
        optimizer = LossScaleOptimizer(inner, scaler, group=group, **options)
        error = message(lambda: optimizer.init(model.trainable_parameters()))
        if expected is None:
            assert error is None, error
        else:
            assert error.startswith("ValueError: The ranks differ in "), error
            assert expected in error, error

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
    scaler = GradScaler(2.0**9 if odd else 2.0**8)
    init("'scale': rank 0 has 256.0, rank 1 has 512.0.", scaler=scaler)
    scaler = GradScaler(growth_interval=7 if odd else 8)
    init("'growth_interval': rank 0 has 8, rank 1 has 7.", scaler=scaler)
    norm = 1.0 if odd else None
    init("'max_grad_norm': rank 0 has None, rank 1 has 1.0.", max_grad_norm=norm)
    init("'average': rank 0 has True, rank 1 has False.", average=not odd)
    bits = 16 if odd else 32
    init("'state_bits': rank 0 has 32, rank 1 has 16.", state_bits=bits)
    inner = optim.SGD(1e-2) if odd else optim.Lion(1e-2)
    init("'class': rank 0 has 'Lion', rank 1 has 'SGD'.", inner=inner)
    rate = 1e-2 if odd else 1e-3
    for inner in (optim.AdamW(rate), optim.AdamW(optim.cosine_decay(rate, 10))):
        init("'learning_rate': rank 0 has 0.001, rank 1 has 0.01.", inner=inner)
    inner = optim.AdamW(1e-2, weight_decay=0.1 if odd else 0.01)
    init("'weight_decay': rank 0 has 0.01, rank 1 has 0.1.", inner=inner)
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
    check.__name__: check
    for check in (
        overflow_on_one_rank_skips_the_step_on_all_ranks,
        scaler_in_a_custom_loop_decides_with_one_all_reduce,
        ranks_with_different_or_no_gradients_decide_together,
        shards_are_clipped_and_skipped_like_the_whole_model,
        many_buckets_of_mixed_dtypes_keep_their_order,
        communication_does_not_grow_with_the_parameters,
        assert_in_sync_names_leaf_and_rank,
        from_rank_0_restores_every_rank_or_raises_on_all,
        calibrate_finds_one_scale_for_all_ranks,
        init_names_what_differs_on_every_rank_with_both_values,
        rank_whose_gradients_differ_from_init_refuses_the_step_alone,
        ranks_that_make_different_calls_raise_and_name_them,
    )
}


def main(folder, names):
    group = mx.distributed.init(strict=True, backend="ring")
    findings = {}
    for name in names:
        mx.random.seed(0)
        try:
            findings[name] = ["passed", CHECKS[name](group)]
        except Exception:
            # The ranks may have lost step: this one leaves, and the others notice.
            findings[name] = ["failed", traceback.format_exc()]
            break
    path = Path(folder) / f"{group.rank()}.json"
    path.write_text(json.dumps(findings))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
