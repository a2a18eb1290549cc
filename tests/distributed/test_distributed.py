"""Every rank makes the same decision, in real processes over MLX's ring backend."""

import copy
import shutil
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.distributed_worker import CHECKS
from support.ring import mlx_launch, run_ranks

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.distributed import broadcast, from_rank_0

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
# Fewer, because ranks that wait spin, and there may be only two cores.
CHECKS_OF_FOUR = [
    "overflow_on_one_rank_skips_the_step_on_all_ranks",
    "shards_are_clipped_and_skipped_like_the_whole_model",
    "assert_in_sync_names_leaf_and_rank",
    "from_rank_0_restores_every_rank_or_raises_on_all",
]

pytestmark = pytest.mark.compiles


def launch(tmp_path_factory, n, checks):
    """Return the findings of each rank, from one launch for all tests."""
    folder = tmp_path_factory.mktemp("ranks") / "reports"
    _, found, output = run_ranks(n, folder, "distributed_worker.py", *checks)
    assert None not in found, output
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory, 2, CHECKS)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    # They compile nothing: each would call g++.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_DISABLE_COMPILE", "1")
        return launch(tmp_path_factory, 4, CHECKS_OF_FOUR)


def check(found, name):
    first, *others = [rank.get(name, ["", "not reached"]) for rank in found]
    for finding in (first, *others):
        assert finding[0] == "passed", finding[1]
        assert finding == first


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(two, name):
    check(two, name)


@pytest.mark.parametrize("name", CHECKS_OF_FOUR)
def test_on_four_ranks(four, name):
    check(four, name)


def test_training_resumes_from_the_checkpoint_after_a_rank_died(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    worker, checkpoint = "distributed_worker.py", tmp_path / "run"

    def train(n, stop, *dies):
        folder = tmp_path / f"{n} ranks to {stop} {dies}"
        return run_ranks(n, folder, worker, "restart", checkpoint, stop, *dies)

    codes, found, output = train(4, 16, 2, 4)
    assert codes == [0, 0, 9, 0], output
    assert found.pop(2) is None
    for report in found:
        assert report["error"] == "[ring] connection to a peer was lost"
        assert report["saved"] == found[0]["saved"]

    start, last = 4, found[0]["saved"]
    for n, stop in ((2, 8), (4, 12), (1, 16)):
        codes, found, output = train(n, stop)
        assert codes == [0] * n, output
        for report in found:
            assert report["start"] == start
            assert report["loaded"] == last
            assert report["saved"] == found[0]["saved"]
            assert report["scaler"] == found[0]["scaler"]
        start, last = stop, found[0]["saved"]

    shutil.rmtree(checkpoint)
    codes, [uninterrupted], output = train(1, 16, -1, -1)
    assert codes == [0], output
    assert uninterrupted["scaler"] == found[0]["scaler"]
    assert uninterrupted["scaler"]["skipped_steps"] == 3
    for path, values in uninterrupted["parameters"].items():
        np.testing.assert_allclose(
            values, found[0]["parameters"][path], rtol=0.02, atol=2e-3
        )


def test_distributed_example_runs_under_mlx_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    output = mlx_launch(2, tmp_path / "run", EXAMPLE, "--steps", "40")
    assert "2 ranks, in sync" in output, output


def test_group_of_one_does_not_communicate():
    group = mx.distributed.init()
    assert group.size() == 1
    for options in ({}, {"average": True}, {"sharded": True}):
        scaler = GradScaler(init_scale=8.0, group=group)
        grads = {"w": scaler.scale(mx.array([2.0]))}
        optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler, group=group, **options)
        new = optimizer.apply_gradients(grads, {"w": mx.array([3.0])})
        assert new["w"].item() == 1.0
        assert "group of 1" in repr(optimizer)
    anything = object()
    assert broadcast(anything, group) is anything
    assert from_rank_0(lambda: anything) is anything


def test_wrong_group_arguments_are_refused_with_advice():
    group = mx.distributed.init()
    sgd = optim.SGD(0.1)
    for arguments in ({"average": True}, {"sharded": True}):
        with pytest.raises(ValueError, match=r"group=mx.distributed.init\(\)"):
            LossScaleOptimizer(sgd, **arguments)
    with pytest.raises(TypeError, match="average must be True or False"):
        LossScaleOptimizer(sgd, group=group, average="float32")
    with pytest.raises(ValueError, match="requires average= or sharded="):
        LossScaleOptimizer(sgd, group=group, max_grad_norm=1.0)
    for wrong in (False, 0, [], "x"):
        for refuse in (partial(LossScaleOptimizer, sgd), GradScaler):
            with pytest.raises(TypeError, match="group must be an mx"):
                refuse(group=wrong)
        with pytest.raises(TypeError, match="group must be an mx"):
            broadcast({}, wrong)


def test_scaler_and_optimizer_may_each_be_given_the_result_of_init():
    make = mx.distributed.init  # returns a new object each time
    scaler = GradScaler(1.0, dynamic=False, group=make())
    optimizer = LossScaleOptimizer(optim.SGD(0.1), scaler, group=make(), average=True)
    weights = {"w": mx.ones(1)}
    optimizer.apply_gradients(weights, weights)
    other = copy.deepcopy(optimizer)  # shares only the group
    other.apply_gradients(weights, weights)
    assert other.group is optimizer.group
    assert [each.step.item() for each in (optimizer, other)] == [1, 2]
