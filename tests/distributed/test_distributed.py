"""The same decision on every rank, in real processes over MLX's ring on loopback."""

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from distributed_parts import overflows
from helpers import BEFORE_0_32, OPTIMIZERS
from kernel_arguments import BOUND
from reference import Reference

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.distributed import average_gradients

TESTS = Path(__file__).parent
EXAMPLE = TESTS.parent / "examples" / "distributed.py"
# A hang must end; how long the ranks take is no part of any test.
LIMIT = 600
NOT_NOTICED = "MLX before 0.32 waits for ever for a rank that has ended."


def free_ports(n, consecutive=False):
    """Ports that nobody listens on, as far as one can know beforehand."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
            try:
                sockets[0].bind(("127.0.0.1", 0))
                first = sockets[0].getsockname()[1]
                for i, s in enumerate(sockets[1:], 1):
                    s.bind(("127.0.0.1", first + i if consecutive else 0))
            except (OSError, OverflowError):
                continue
            return [s.getsockname()[1] for s in sockets]
    raise RuntimeError("There are no free ports on the loopback interface.")


def finish(commands):
    """Run all at once, and leave none behind, whatever happens.

    Args:
        commands: Pairs of a command line and what to add to the environment.
    """
    # Open and silent: mlx.launch spins on an input that is at its end.
    silence, kept_open = os.pipe()
    processes = []
    try:
        processes += [start(*command, silence) for command in commands]
        outputs = [p.communicate(timeout=LIMIT)[0] for p in processes]
    finally:
        for p in processes:
            # The whole session, as mlx.launch has children of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()
            p.stdout.close()
        os.close(silence)
        os.close(kept_open)
    return [p.returncode for p in processes], "\n".join(outputs)


def start(command, env, stdin):
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | env,
        start_new_session=True,
    )


def run_ranks(n, folder, script, *args):
    """Start the ranks as mlx.launch does; return exit codes, reports and output."""
    folder.mkdir()
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    command = [sys.executable, str(TESTS / script), str(folder), *map(str, args)]
    env = {"MLX_HOSTFILE": str(hosts)} if n > 1 else {}
    codes, output = finish([(command, env | {"MLX_RANK": str(r)}) for r in range(n)])
    return codes, reports(n, folder), output


def mlx_launch(n, folder, script, *args):
    """Start the ranks by mlx.launch itself."""
    folder.mkdir()
    launcher = shutil.which("mlx.launch", path=Path(sys.executable).parent)
    # It leaves temporary files: in our folder, where MLX shall still find the
    # kernels that it compiled before.
    kernels = Path(tempfile.gettempdir()) / "mlx"
    kernels.mkdir(exist_ok=True)
    (folder / "mlx").symlink_to(kernels)
    port = free_ports(n, consecutive=True)[0]
    ring = ["--backend", "ring", "-n", str(n), "--starting-port", str(port)]
    command = [launcher, *ring, "--", sys.executable, str(script), *map(str, args)]
    _, output = finish([(command, {"TMPDIR": str(folder)})])
    return output


def reports(n, folder):
    files = [folder / f"{rank}.json" for rank in range(n)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


CHECKS = [
    "data parallel float32",
    "data parallel scaled",
    "data parallel remainder",
    "sharded remainder",
    "own loop",
    "loss of one",
    "order",
    "decide",
    "tensor parallel",
    "fully sharded",
    "uneven",
    "buckets",
    "counted",
    "kernel arguments",
    "drift",
    "calibrated",
]
# Fewer steps: ranks that wait are ranks that spin, and there may be two cores.
CHECKS_OF_FOUR = ["data parallel short", "tensor parallel", "uneven", "drift"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks found, in one launch for all the tests."""
    folder = tmp_path_factory.mktemp("two") / "reports"
    codes, found, output = run_ranks(2, folder, "distributed_worker.py", *CHECKS)
    assert codes == [0, 0], output
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The same of four ranks. Not by mlx.launch, which spins for each of them."""
    folder = tmp_path_factory.mktemp("four") / "reports"
    codes, found, output = run_ranks(
        4, folder, "distributed_worker.py", *CHECKS_OF_FOUR
    )
    assert codes == [0] * 4, output
    return found


@pytest.fixture(params=[2, 4])
def ranks(request):
    found = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    assert [report["size"] for report in found] == [request.param] * request.param
    return found


def equal(found, check):
    """The report that all ranks agree on."""
    first, *others = [report[check] for report in found]
    for other in others:
        assert other == first
    return first


def check_data_parallel(report, ranks, steps):
    finite = ~overflows(steps, ranks).any(axis=1)
    assert 0 < finite.sum() < steps
    expected = Reference(scale=2.0**8, growth_interval=10, max_scale=2.0**10)
    scales = []
    for ok in finite:
        expected.update(ok)
        scales.append(expected.scale)
    assert report["scales"] == scales
    assert report["skipped"] == (~finite).sum()
    assert report["steps"] == finite.sum()
    assert report["traces"] == 1


@pytest.mark.parametrize("average", ["float32", "scaled"])
def test_an_overflow_on_one_rank_skips_the_step_on_both(two, average):
    check_data_parallel(equal(two, f"data parallel {average}"), 2, 200)


def test_so_it_does_with_masters_as_remainders(two):
    check_data_parallel(equal(two, "data parallel remainder"), 2, 50)
    report = equal(two, "sharded remainder")
    assert report == {"skipped": 1, "same": True, "moved": True}


def test_an_overflow_on_one_rank_skips_the_step_on_all_four(four):
    check_data_parallel(equal(four, "data parallel short"), 4, 50)


def test_a_loop_of_ones_own_with_unscale_average_and_clip(two):
    report = equal(two, "own loop")
    skipped = overflows(40, 2).any(axis=1).sum()
    assert 0 < skipped == report["skipped"]
    assert report["traces"] == 1
    # The averaging, and one for the decision of unscale_() and step() together.
    assert report["all_reduces"] == 2


def test_a_loss_that_is_nan_on_one_rank_moves_the_scale_on_none(two):
    report = equal(two, "loss of one")
    for case in ("averaged", "sharded", "clipped"):
        assert report[case] == [256.0, 2, 2, 2], case


def test_a_float16_sum_overflows_where_no_rank_did(two):
    report = equal(two, "order")
    assert report["finite_here"] is True
    assert report["float32"] == [[-40000 / 1024] * 3, 1024.0]
    assert report["scaled"] == [[0.0] * 3, 512.0]


def test_ranks_with_gradients_of_their_own_or_none_decide_together(two):
    for rank, report in enumerate(report["decide"] for report in two):
        for case, (scale, all_reduces, moved) in report.items():
            bad = case.endswith("True")
            assert scale == (4.0 if bad else 16.0), case
            assert all_reduces == 1, case
            applied = not bad and not case.startswith("unscale_only")
            assert moved == [applied] * rank, case
        assert len(report) == 10


@pytest.mark.parametrize(
    ("check", "tolerance"), [("tensor parallel", 1e-6), ("fully sharded", 1e-3)]
)
def test_shards_are_clipped_and_skipped_as_the_whole_model(two, check, tolerance):
    check_sharded(two, check, tolerance)


def test_four_shards_too(four):
    check_sharded(four, "tensor parallel", 1e-6)


def check_sharded(found, check, tolerance):
    for report in (report[check] for report in found):
        norms, expected = zip(*report["norms"], strict=True)
        np.testing.assert_allclose(norms, expected, rtol=tolerance)
        assert max(norms) == math.inf
        assert report["norms"] == found[0][check]["norms"]
        assert report["scaler"] == found[0][check]["scaler"]
        assert report["skipped"][0] == report["skipped"][1] > 0
        assert report["error"] < tolerance


def test_shards_cost_one_all_reduce_besides_the_layers_own(two):
    report = two[0]["tensor parallel"]
    assert report["all_reduces"] == report["all_reduces_without_group"] + 1


def test_what_the_ring_cannot_do(two):
    # When this fails, MLX has learnt it: use nn.fully_shard in the worker.
    said = "module 'mlx.nn' has no attribute 'fully_shard'"
    said = said if BEFORE_0_32 else "[ring] sum_scatter not supported."
    assert {r["fully sharded"]["nn.fully_shard"] for r in two} == {said}


def test_uneven_micro_batches_and_a_rank_without_any(ranks):
    report = equal(ranks, "uneven")
    assert report["float32"]["error"] < 1e-6
    assert report["scaled"]["error"] < 1e-6


def test_many_buckets_of_mixed_dtypes_keep_their_order(two):
    report = equal(two, "buckets")
    assert report["same_dtypes"]
    assert report["error"] == 0


def test_no_kernel_of_a_rank_takes_more_buffers_than_metal_allows(two):
    found = equal(two, "kernel arguments")
    # Averaged in float32, averaged as they are scaled, where no gradient is true, and
    # sharded.
    assert [len(each) for each in found] == [8, 4, 8] * len(OPTIMIZERS)
    for way, count in ((way, n) for each in found for way, n in each.items()):
        assert 10 < count <= 22 < BOUND, way


def test_communication_does_not_grow_with_the_parameters(two):
    report = dict(equal(two, "counted"))
    # As test_kernel_arguments.py has it of one rank.
    assert 10 < report.pop("buffers") <= 22 < BOUND
    # For 4 and for 26 parameters. The weight of a rank rides along in float32.
    assert report == {
        "none None": [0, 0],
        "none 1.0": [0, 0],
        "float32 None": [1, 1],
        "float32 1.0": [1, 1],
        "scaled None": [2, 2],
        "scaled 1.0": [2, 2],
        "sharded None": [1, 1],
        "sharded 1.0": [1, 1],
    }


def test_drift_is_caught_with_rank_and_name(ranks):
    last = len(ranks) - 1
    for report in (report["drift"] for report in ranks):
        assert report["scaler"].startswith(
            f"RuntimeError: Rank {last} differs in 'scale': it has 32.0, rank 0 has "
            "65536.0."
        )
        assert f"Rank {last} differs in 'layers.1.weight': it has bf" in report["model"]
        assert "layers.0" not in report["model"]
        assert f"Rank {last} differs in 'b'" in report["structure"]
        assert "rank 0 has no such leaf" in report["structure"]
        assert "There are 12 more." in report["many"]


def test_rank_0_brings_everybody_back(ranks):
    for rank, report in enumerate(report["drift"] for report in ranks):
        assert report["scale"] == 65536.0
        assert report["tree"]
        assert report["kinds"]
        assert "no such file.safetensors" in report["missing"]
        assert ("Rank 0 could not load" in report["missing"]) == (rank > 0)
        assert report["after"] == 1


def test_calibrate_finds_one_scale_for_all_ranks(two):
    found = [report["calibrated"] for report in two]
    alone = [report["alone"] for report in found]
    assert alone[0] > alone[1]
    for rank, report in enumerate(found):
        ways = {report[way] for way in ("bare", "scaler", "optimizer")}
        assert ways == {min(alone)}
        assert report["left"] == report["after"] == min(alone)
        own = "The loss of this batch is not finite", "failed on another rank"
        assert own[rank] in report["bad"]


@pytest.mark.skipif(BEFORE_0_32, reason=NOT_NOTICED)
def test_a_rank_dies_and_training_goes_on_from_the_checkpoint(tmp_path):
    worker, checkpoint = "distributed_restart.py", tmp_path / "run.safetensors"

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

    checkpoint.unlink()
    codes, [uninterrupted], output = train(1, 16, -1, -1)
    assert codes == [0], output
    assert uninterrupted["scaler"] == found[0]["scaler"]
    assert uninterrupted["scaler"]["skipped_steps"] == 3
    for path, values in uninterrupted["parameters"].items():
        np.testing.assert_allclose(
            values, found[0]["parameters"][path], rtol=0.02, atol=2e-3
        )


def test_the_example_runs_under_mlx_launch(tmp_path):
    output = mlx_launch(2, tmp_path / "run", EXAMPLE, "--steps", "40")
    assert "2 ranks, in sync" in output, output


def test_a_group_of_one_talks_to_nobody():
    group = mx.distributed.init()
    assert group.size() == 1
    for options in ({}, {"average": "float32"}, {"average": "scaled"}):
        scaler = GradScaler(init_scale=8.0, group=group)
        grads = {"w": scaler.scale(mx.array([2.0]))}
        optimizer = LossScaleOptimizer(optim.SGD(1.0), scaler, group=group, **options)
        new = optimizer.apply_gradients(grads, {"w": mx.array([3.0])})
        assert new["w"].item() == 1.0
    scaler.assert_in_sync()
    assert average_gradients({}, group) == {}


def test_misuse_says_what_to_do():
    group = mx.distributed.init()
    sgd = optim.SGD(0.1)
    with pytest.raises(ValueError, match=r"group=mx.distributed.init\(\)"):
        LossScaleOptimizer(sgd, average="float32")
    with pytest.raises(ValueError, match='"float32" or "scaled"'):
        LossScaleOptimizer(sgd, group=group, average="float16")
    with pytest.raises(ValueError, match="another group"):
        LossScaleOptimizer(sgd, GradScaler(group=mx.distributed.init()), group=group)
    optimizer = LossScaleOptimizer(sgd, group=group, average="float32")
    with pytest.raises(ValueError, match=r"init\(parameters\)"):
        optimizer.apply_gradients({}, {"w": mx.ones(2)})
