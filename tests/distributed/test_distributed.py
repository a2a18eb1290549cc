"""Every rank makes the same decision, in real processes over MLX's ring backend."""

import copy
import math
import shutil
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from support.distributed_parts import overflows
from support.distributed_worker import CHECKS
from support.reference import Reference
from support.ring import mlx_launch, run_ranks

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.distributed import broadcast, from_rank_0

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"

# Fewer, because ranks that wait spin, and there may be only two cores.
CHECKS_OF_FOUR = ["data parallel", "tensor parallel", "drift"]

pytestmark = pytest.mark.compiles


def launch(tmp_path_factory, n, checks):
    folder = tmp_path_factory.mktemp("ranks") / "reports"
    codes, found, output = run_ranks(n, folder, "distributed_worker.py", *checks)
    assert codes == [0] * n, output
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return the findings of two ranks, from one launch for all tests."""
    return launch(tmp_path_factory, 2, CHECKS)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Return those of four ranks, which compile nothing: each would call g++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_DISABLE_COMPILE", "1")
        return launch(tmp_path_factory, 4, CHECKS_OF_FOUR)


@pytest.fixture(params=[2, 4])
def ranks(request):
    found = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    assert [report["size"] for report in found] == [request.param] * request.param
    return found


def equal(found, check):
    """Return the report of a check, which must be equal on all ranks."""
    first, *others = [report[check] for report in found]
    for other in others:
        assert other == first
    return first


def test_overflow_on_one_rank_skips_the_step_on_all_ranks(ranks):
    report = equal(ranks, "data parallel")
    finite = ~overflows(len(report["scales"]), len(ranks)).any(axis=1)
    assert 0 < finite.sum() < len(finite)
    expected = Reference(scale=2.0**8, growth_interval=10, max_scale=2.0**10)
    scales = []
    for ok in finite:
        expected.update(ok)
        scales.append(expected.scale)
    assert report["scales"] == scales
    assert report["skipped"] == (~finite).sum()
    assert report["steps"] == finite.sum()
    assert len(ranks) > 2 or report["traces"] == 1


def test_scaler_in_a_custom_loop_decides_with_one_all_reduce(two):
    report = equal(two, "own loop")
    skipped = overflows(40, 2).any(axis=1).sum()
    assert 0 < skipped == report["skipped"]
    assert report["traces"] == 1
    # The averaging, and one for the decision of unscale_() and step() together.
    assert report["all_reduces"] == 2


def test_ranks_with_different_or_no_gradients_decide_together(two):
    for rank, report in enumerate(report["decide"] for report in two):
        for case, (scale, all_reduces, moved) in report.items():
            bad = case.endswith("True")
            assert scale == (4.0 if bad else 16.0), case
            assert all_reduces == 1, case
            applied = not bad and not case.startswith("unscale_only")
            n_weights = 1 if case.startswith("wrapper") else rank
            assert moved == [applied] * n_weights, case
        assert len(report) == 10


def test_shards_are_clipped_and_skipped_like_the_whole_model(ranks):
    reports = [report["tensor parallel"] for report in ranks]
    for report in reports:
        norms, expected = zip(*report["norms"], strict=True)
        np.testing.assert_allclose(norms, expected, rtol=1e-6)
        assert max(norms) == math.inf
        assert report["norms"] == reports[0]["norms"]
        assert report["scaler"] == reports[0]["scaler"]
        assert report["skipped"] == 2
        assert report["error"] < 1e-6


def test_many_buckets_of_mixed_dtypes_keep_their_order(two):
    report = equal(two, "buckets")
    assert report["dtypes"] == ["mlx.core.complex64", "mlx.core.float32"]
    assert report["error"] == 0


def test_communication_does_not_grow_with_the_parameters(two):
    # For 4 and for 26 parameters.
    assert equal(two, "counted") == {
        "none None": [0, 0],
        "none 1.0": [0, 0],
        "average None": [1, 1],
        "average 1.0": [1, 1],
        "sharded None": [1, 1],
        "sharded 1.0": [1, 1],
    }


def test_assert_in_sync_names_leaf_and_rank(ranks):
    last = len(ranks) - 1
    for report in (report["drift"] for report in ranks):
        assert report["scaler"].startswith(
            "RuntimeError: The ranks differ in 'scale': rank 0 has float32 65536.0"
        )
        assert f"rank {last} has float32 32.0." in report["scaler"]
        assert "The ranks differ in 'layers.0.weight': rank 0 has bf" in report["seeds"]
        assert "The ranks differ in 'layers.1.weight': rank 0 has bf" in report["model"]
        assert "layers.0" not in report["model"]
        assert "The ranks differ in 'b': rank 0 has nothing" in report["structure"]
        assert "... and 12 more." in report["many"]


def test_from_rank_0_restores_every_rank_or_raises_on_all(ranks):
    for rank, report in enumerate(report["drift"] for report in ranks):
        assert report["scale"] == 65536.0
        assert report["tree"]
        assert report["kinds"]
        assert "no such file.safetensors" in report["missing"]
        assert ("Rank 0 failed with" in report["missing"]) == (rank > 0)
        assert "unsupported type" in report["unsupported"]
        assert report["after"] == 1


def test_calibrate_finds_one_scale_for_all_ranks(two):
    scale = equal([{"scale": report["calibrated"]["scale"]} for report in two], "scale")
    for rank, report in enumerate(report["calibrated"] for report in two):
        assert report["after"] == scale
        own = "The loss on this batch is nan", "failed on another rank"
        assert own[rank] in report["bad"]


DIFFERENCES = {
    "seed": "'layers.0.bias': rank 0 has float16 (8,) with checksum",
    "layer": "'layers.1.bias': rank 0 has nothing, rank 1 has float16 (8,)",
    "shape": "'out.weight': rank 0 has float16 (1, 8) with checksum",
    "scale": "'scale': rank 0 has 256.0, rank 1 has 512.0.",
    "interval": "'growth_interval': rank 0 has 8, rank 1 has 7.",
    "bits": "'state_bits': rank 0 has 32, rank 1 has 16.",
    "clipping": "'max_grad_norm': rank 0 has None, rank 1 has 1.0.",
    "norm": "'max_grad_norm': rank 0 has 2.0, rank 1 has 1.0.",
    "average": "'average': rank 0 has True, rank 1 has False.",
    "optimizer": "'class': rank 0 has 'Lion', rank 1 has 'SGD'.",
    "rate": "'learning_rate': rank 0 has 0.001, rank 1 has 0.01.",
    "schedule": "'learning_rate': rank 0 has 0.001, rank 1 has 0.01.",
    "decay": "'weight_decay': rank 0 has 0.01, rank 1 has 0.1.",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_init_names_what_differs_on_every_rank_with_both_values(two, case):
    for report in two:
        assert report["differ"][case].startswith("ValueError: The ranks differ in ")
        assert DIFFERENCES[case] in report["differ"][case]


def test_rank_whose_gradients_differ_from_init_refuses_the_step_alone(two):
    missing, added, reshaped = two[1]["frozen"]["refused"]
    assert "for 'b', expected a gradient of shape (3,), got none. After f" in missing
    assert "for 'c', expected none, got a gradient of shape (1,). After f" in added
    assert "for 'a', expected a gradient of shape (2,), got a gradient of" in reshaped
    assert [report["frozen"]["new"] for report in two] == [[0.0] * 3] * 2


def test_ranks_that_make_different_calls_raise_and_name_them(two):
    one, other = (report["mixed up"] for report in two)
    assert "called assert_in_sync(), but rank 1 called broadcast(). All" in one["call"]
    assert (
        "called broadcast(), but rank 0 called assert_in_sync(). All" in other["call"]
    )
    stranger = "rank 1 called another function that communicates, such as update()."
    assert f"This rank called save_checkpoint(), but {stranger}" in one["save"]
    assert "connection to a peer was lost" in other["save"]


@pytest.mark.parametrize("case", ["nothing", "broadcast", "half", "shards"])
def test_init_does_not_raise_on_ranks_that_agree(two, case):
    assert [report["differ"][case] for report in two] == [None, None]


def test_training_resumes_from_the_checkpoint_after_a_rank_died(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    worker, checkpoint = "distributed_restart.py", tmp_path / "run"

    def train(n, stop, *dies):
        folder = tmp_path / f"{n} ranks to {stop} {dies}"
        return run_ranks(n, folder, worker, checkpoint, stop, *dies)

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
