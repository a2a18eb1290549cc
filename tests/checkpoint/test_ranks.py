"""Ranks resume bit-identically from copies or shards, or all raise."""

import shutil

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.checkpoint_ranks import KINDS, Net
from support.checkpoint_writers import names, save_steps
from support.ring import TESTS, mlx_launch, reports, run_ranks

from mlx_gradscale import GradScaler, LossScaleOptimizer, restore_checkpoint
from mlx_gradscale.checkpoint import latest_checkpoint
from mlx_gradscale.checkpoint.folder import _read
from mlx_gradscale.checkpoint.run import find_group

SCRIPT = TESTS / "support" / "checkpoint_ranks.py"
SHARDED = [kind for kind in KINDS if kind != "copies"]


def launch(folder, checkpoint, task):
    output = mlx_launch(2, folder / task, SCRIPT, folder / task, checkpoint, task)
    found = reports(2, folder / task)
    assert None not in found, output
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a run of each kind, and what its two ranks report."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder / "runs", launch(folder, folder / "runs", "save")


@pytest.fixture(scope="module")
def restored(saved):
    folder, _ = saved
    return launch(folder.parent, folder, "restore")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_resume_bit_identically_in_the_same_and_in_new_processes(
    kind, saved, restored
):
    _, before = saved
    for rank, (then, now) in enumerate(zip(before, restored, strict=True)):
        then, now = then[kind], now[kind]
        assert then["again"] == now["again"] == then["next"]
        assert then["state"] == now["state"]
        writer = 0 if kind == "copies" else rank
        assert then["extra"] == now["extra"] == {"step": 3, "rank": writer}
        statistics = before[writer][kind]["statistics"]
        assert now["restored statistics"] == statistics
    first, second = (report[kind] for report in before)
    assert first["next"] != second["next"]
    assert first["statistics"] != second["statistics"]


@pytest.mark.parametrize("n", [3, 1])
def test_different_number_of_ranks_resumes_copies_from_the_same_state(n, saved):
    folder, before = saved
    place = folder.parent / str(n)
    codes, found, output = run_ranks(n, place, SCRIPT.name, folder, "copies")
    assert codes == [0] * n, output
    assert {x["copies"]["state"] for x in found} == {before[0]["copies"]["state"]}
    assert len({tuple(x["copies"]["random"]) for x in found}) == n


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_run_is_not_restored_on_another_number_of_ranks(kind, saved):
    model, optimizer = Net(None), optim.AdamW(1e-2)
    before = dict(model.shard)
    message = "the shards of 2 ranks, but this run has 1. Restore it on 2 ranks"
    with pytest.raises(ValueError, match=message):
        restore_checkpoint(saved[0] / kind, model, optimizer)
    assert all(model.shard[name] is x for name, x in before.items())


def test_mlx_reads_the_shards_of_each_rank(saved):
    save = latest_checkpoint(saved[0] / "fully_shard")
    paths = [save / f"rank-{rank}-of-2" / "model.safetensors" for rank in range(2)]
    first, second = (mx.load(str(path)) for path in paths)
    name = "shard.module.weight"
    assert first[name].shape == second[name].shape == (2, 8)
    assert not mx.array_equal(first[name], second[name])
    assert mx.array_equal(first["same.weight"], second["same.weight"])


@pytest.mark.parametrize("kind", ["copies", "some shards"])
def test_failure_on_one_rank_raises_on_all_and_changes_nothing(kind, saved):
    first, second = (report[kind] for report in saved[1])
    assert "FileExistsError" in first["file"]
    assert "Rank 0 failed with" in second["file"]
    assert "Rank 1 failed with ValueError: model.shard.weight contains" in first["nan"]
    assert "contains NaN" in second["nan"]
    assert "Rank 1 failed with TypeError" in first["a set"]
    assert "unsupported type set" in second["a set"]
    assert "Rank 1 failed with" in first["other model"]
    assert "more.bias is missing in the checkpoint" in second["other model"]
    for report in (first, second):
        assert "There is no checkpoint" in report["missing"]
        assert "The ranks differ in 'model.same.weight'" in report["a copy"]
        assert report["unchanged"]
        assert report["files"] == ["save-000001"]


def test_save_without_the_shards_of_a_rank_is_not_read(saved, tmp_path):
    shutil.copytree(saved[0] / "sharded=True", tmp_path / "run")
    shutil.rmtree(latest_checkpoint(tmp_path / "run") / "rank-1-of-2")
    with pytest.raises(ValueError, match="the shards of 2 ranks, but this run has 1"):
        _read(tmp_path / "run", 1, 0)
    with pytest.raises(ValueError, match=r"No such file .*rank-1-of-2"):
        _read(tmp_path / "run", 2, 1)


def test_save_with_shards_is_removed_by_the_next_one(saved, tmp_path):
    shutil.copytree(saved[0] / "sharded=True", tmp_path / "run")
    save_steps(tmp_path / "run", 0)
    assert names(tmp_path / "run") == ["save-000002"]


@pytest.mark.parametrize(("rank", "at"), [(0, 4), (0, 30), (0, 50), (1, 2), (1, 9)])
def test_rank_killed_while_it_saves_shards_leaves_whole_checkpoints(rank, at, tmp_path):
    run = tmp_path / "run"
    mlx_launch(2, tmp_path / "ranks", SCRIPT, tmp_path, run, "kill", rank, at)
    save = latest_checkpoint(run)
    for rank in range(2):
        saved = _read(save, 2, rank)
        step = saved.extra["step"]
        assert saved.weights["shard.bias"].tolist() == [step] * 4
        assert save.name == f"save-{step + 1:06}"


def test_checkpoint_is_gathered_from_the_group_of_the_wrapper_or_the_scaler():
    group = mx.distributed.init()
    wrapper = LossScaleOptimizer(optim.SGD(0.1), group=group)
    assert find_group(wrapper, wrapper.scaler) is group
    assert find_group(optim.SGD(0.1), GradScaler(group=group)) is group
