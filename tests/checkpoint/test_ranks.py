"""One checkpoint for all ranks: bit for bit on as many, and shards are refused."""

import pytest
from test_distributed import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    found = launch(2, folder, "save")
    return folder, found


def launch(n, folder, task):
    place = folder / f"{n} {task}"
    worker, checkpoint = "checkpoint_ranks.py", folder / "run"
    codes, found, output = run_ranks(n, place, worker, checkpoint, task)
    assert codes == [0] * n, output
    return found


def test_the_same_processes_go_on(saved):
    for report in saved[1]:
        assert report["again"] == report["next"]
        assert report["extra"] == {"step": 3}
    # Each has dropped out for itself, and still does.
    assert saved[1][0]["next"][0] != saved[1][1]["next"][0]


def test_fresh_processes_go_on(saved):
    folder, before = saved
    for now, then in zip(launch(2, folder, "restore"), before, strict=True):
        assert now["again"] == then["next"]
        assert now["restored"] == then["restored"]


def test_another_number_of_ranks_starts_from_the_same(saved):
    folder, before = saved
    for n, task in ((3, "restore"), (1, "alone")):
        found = launch(n, folder, task)
        assert {report["restored"] for report in found} == {before[0]["restored"]}
        assert len({tuple(report["again"][0]) for report in found}) == n


def test_what_one_rank_cannot_do_none_does(saved):
    first, second = saved[1]
    assert "FileExistsError" in first["foreign"]
    assert "failed on rank 0" in second["foreign"]
    assert "There is no folder" in first["missing"]
    assert "Rank 0 could not load" in second["missing"]
    assert first["begun"] == second["begun"] == ""
    assert "is no checkpoint" in first["late"]
    assert "failed on rank 0" in second["late"]
    assert "failed on rank 1" in first["other model"]
    assert "has no more.bias" in second["other model"]
    assert first["unchanged"]
    assert second["unchanged"]


def test_shards_are_refused_on_every_rank(saved):
    for report in saved[1]:
        assert "shards must be gathered" in report["shards"]
        assert "differs in 'model.layers.0.weight'" in report["shards"]


def test_statistics_of_batches_are_those_of_rank_0(saved):
    assert [report["statistics"] for report in saved[1]] == [[5, 5], [5, 5]]
