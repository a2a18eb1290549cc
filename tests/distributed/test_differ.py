"""Ranks that differ say so, all of them, before a step is taken."""

import signal

import pytest
from helpers import BEFORE_0_32
from test_distributed import NOT_NOTICED, run_ranks

WORKER = "distributed_differ.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What three ranks were told of which the last one differs."""
    folder = tmp_path_factory.mktemp("differ") / "reports"
    codes, found, output = run_ranks(3, folder, WORKER, "told")
    assert codes == [0, 0, 0], output
    assert [report.pop("lines") for report in found] == [1, 0, 0]
    return found


DIFFERENCES = {
    "layer": "'layers.1.weight': it has float16[8, 8], rank 0 has nothing of this name",
    "shape": "'out.weight': it has float32[1, 9], rank 0 has float16[1, 8].",
    "dtype": "'out.weight': it has bfloat16[1, 8], rank 0 has float16[1, 8].",
    "scale": "'scaler.scale': it has 512.0, rank 0 has 256.0.",
    "interval": "'scaler.growth_interval': it has 7, rank 0 has 8.",
    "enabled": "'scaler.enabled': it has False, rank 0 has True.",
    "norm": "'max_grad_norm': it has 1.0, rank 0 has None.",
    "masters": "'masters': it has remainder, rank 0 has float32.",
    "average": "'average': it has scaled, rank 0 has float32.",
    "optimizer": "'optimizer': it has SGD, rank 0 has Lion.",
    "rate": "'optimizer.learning_rate': it has 0.00999",
    "shards' scale": "'scaler.scale': it has 8.0, rank 0 has 4.0.",
    "calls": "'average': it has nothing of this name, rank 0 has scaled.",
    "load": "'scaler.scale': it has 32.0, rank 0 has 65536.0.",
    "load before init": "'optimizer.step': it has 5, rank 0 has 0.",
    "scaler in it": "'scaler.scale': it has 32.0, rank 0 has 64.0.",
    "scaler": "'scaler.scale': it has 4.0, rank 0 has 8.0.",
    "scaler load": "'scaler.scale': it has 32.0, rank 0 has 64.0.",
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_all_ranks_are_told_which_rank_differs_in_what(told, case):
    for report in told:
        assert report[case].startswith("RuntimeError: Rank 2 differs in '")
        assert f"Rank 2 differs in {DIFFERENCES[case]}" in report[case]
        assert "Rank 1 differs" not in report[case]
        assert "from_rank_0()" in report[case]


@pytest.mark.parametrize("case", ["nothing", "shards", "own shards"])
def test_what_may_differ_may(told, case):
    assert [report[case] for report in told] == [None] * 3


def test_nothing_is_sent_inside_of_compile(told):
    assert [report["compiled"] for report in told] == [None] * 3


def test_ranks_at_different_calls_are_told(told):
    for rank, report in enumerate(told):
        other = 0 if rank == 2 else 2
        calls = ["GradScaler()", "GradScaler()", "assert_in_sync()"]
        assert report["other call"].startswith(
            f"RuntimeError: Rank {rank} is at {calls[rank]}, rank {other} at "
            f"{calls[other]}. Every rank of the group must make the same calls"
        )


@pytest.mark.skipif(BEFORE_0_32, reason=NOT_NOTICED)
@pytest.mark.parametrize("case", ["init_in_a_step", "left_out"])
def test_a_rank_that_meets_a_step_of_another_says_so(tmp_path, case):
    codes, [first, second], output = run_ranks(2, tmp_path / "run", WORKER, case)
    assert second is not None, output
    call = "init()" if case == "init_in_a_step" else "assert_in_sync()"
    assert second.startswith(f"RuntimeError: Rank 1 is at {call}, and rank 0 is not")
    # The other one is in MLX's hands: it says that the connection is lost.
    assert codes[1] == 0
    assert first is None or "connection to a peer was lost" in first


@pytest.mark.skipif(BEFORE_0_32, reason=NOT_NOTICED)
def test_waiting_has_an_end(tmp_path):
    codes, found, output = run_ranks(2, tmp_path / "run", WORKER, "too_late")
    # MLX may abort at the exit of a process in which it still waits.
    assert codes in ([0, 0], [-signal.SIGABRT, 0]), output
    assert found[0].startswith(
        "TimeoutError: Rank 0 waited 1 seconds at GradScaler() for the other ranks."
    )
    assert "Start all ranks again" in found[0]
    assert "connection" in found[1]
