"""One checkpoint for all ranks: they resume bit-identically, or all raise."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.ring import run_ranks

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.checkpoint.run import find_group


def launch(n, folder, task):
    """Run the worker on n ranks of a ring; return their reports."""
    place, run = folder / f"{n} {task}", folder / "run"
    codes, reports, output = run_ranks(n, place, "checkpoint_ranks.py", run, task)
    assert codes == [0] * n, output
    return reports


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


def test_new_processes_with_different_weights_resume_bit_identically(saved):
    folder, before = saved
    for now, then in zip(launch(2, folder, "restore"), before, strict=True):
        assert now["again"] == then["next"]
        assert now["restored"] == then["restored"]


def test_different_number_of_ranks_resumes_from_the_same_state(saved):
    folder, before = saved
    for n, task in ((3, "restore"), (1, "alone")):
        found = launch(n, folder, task)
        assert {report["restored"] for report in found} == {before[0]["restored"]}
        assert len({tuple(report["random"]) for report in found}) == n


def test_statistics_differ_between_ranks_and_are_restored_from_rank_0(saved):
    first, second = saved[1]
    assert first["statistics"] != second["statistics"]
    assert first["restored statistics"] == first["statistics"]
    assert second["restored statistics"] == first["statistics"]


def test_failure_on_one_rank_raises_on_all_and_changes_nothing(saved):
    first, second = saved[1]
    assert "FileExistsError" in first["file"]
    assert "Rank 0 failed with" in second["file"]
    assert "There is no checkpoint" in first["missing"]
    assert "There is no checkpoint" in second["missing"]
    assert "unsupported type set" in first["a set"]
    assert "unsupported type set" in second["a set"]
    assert "Rank 1 failed with" in first["other model"]
    assert "more.bias is missing in the checkpoint" in second["other model"]
    for report in (first, second):
        assert "The ranks differ in 'model.layers.0.weight'" in report["other weights"]
        assert report["unchanged"]


def test_checkpoint_is_gathered_from_the_group_of_the_wrapper_or_the_scaler():
    group = mx.distributed.init()
    wrapper = LossScaleOptimizer(optim.SGD(0.1), group=group)
    assert find_group(wrapper, wrapper.scaler) is group
    assert find_group(optim.SGD(0.1), GradScaler(group=group)) is group
