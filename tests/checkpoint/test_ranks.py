"""One checkpoint for all ranks: they resume bit-identically, or all raise."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
WORKER = TESTS / "support" / "checkpoint_ranks.py"


def free_ports(n):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def launch(n, folder, task):
    """Run the worker on n ranks of a ring; return their reports."""
    place = folder / f"{n} {task}"
    place.mkdir()
    hosts = place / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        **({"MLX_HOSTFILE": str(hosts)} if n > 1 else {}),
    }
    command = [sys.executable, str(WORKER), str(place), str(folder / "run"), task]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * n, "\n".join(outputs)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(n)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch(2, folder, "save")


def test_same_processes_resume_with_their_own_random_state(saved):
    first, second = saved[1]
    for report in (first, second):
        assert report["again"] == report["next"]
        assert report["extra"] == {"step": 3}
    assert first["next"] != second["next"]


def test_fresh_processes_with_other_weights_resume_bit_identically(saved):
    folder, before = saved
    for now, then in zip(launch(2, folder, "restore"), before, strict=True):
        assert now["again"] == then["next"]
        assert now["restored"] == then["restored"]


def test_another_number_of_ranks_starts_from_the_same_state(saved):
    folder, before = saved
    for n, task in ((3, "restore"), (1, "alone")):
        found = launch(n, folder, task)
        assert {report["restored"] for report in found} == {before[0]["restored"]}
        assert len({tuple(report["again"]) for report in found}) == n


def test_statistics_differ_between_ranks_and_are_restored_from_rank_0(saved):
    first, second = saved[1]
    assert first["statistics"] != second["statistics"]
    assert first["restored statistics"] == first["statistics"]
    assert second["restored statistics"] == first["statistics"]


def test_failure_on_one_rank_raises_on_all_and_changes_nothing(saved):
    first, second = saved[1]
    assert "FileExistsError" in first["file"]
    assert "failed on rank 0" in second["file"]
    assert "There is no checkpoint" in first["missing"]
    assert "There is no checkpoint" in second["missing"]
    assert "failed on rank 1" in first["a set"]
    assert "failed on rank 1" in first["other model"]
    assert "the checkpoint has no more.bias" in second["other model"]
    assert first["unchanged"]
    assert second["unchanged"]


def test_shards_are_refused_on_every_rank(saved):
    for report in saved[1]:
        assert "gather a sharded model first" in report["shards"]
        assert "model.layers.0.weight" in report["shards"]
