"""Sharded runs: each rank saves its shards, and restores them bit-identically."""

import shutil

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.checkpoint_shards import KINDS, Net
from support.checkpoint_writers import small
from support.ring import TESTS, mlx_launch, reports

from mlx_gradscale import restore_checkpoint, save_checkpoint
from mlx_gradscale.checkpoint import latest_checkpoint
from mlx_gradscale.checkpoint.folder import _read

EVERY = pytest.mark.parametrize("kind", KINDS)


SCRIPT = TESTS / "support" / "checkpoint_shards.py"


def launch(folder, checkpoint, task):
    place = folder / task
    output = mlx_launch(2, place, SCRIPT, place, checkpoint, task)
    found = reports(2, place)
    assert None not in found, output
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder / "run", *(
        launch(folder, folder / "run", t) for t in ("save", "restore")
    )


@EVERY
def test_sharded_run_resumes_bit_identically_in_new_processes(kind, runs):
    _, saved, restored = runs
    for rank in range(2):
        assert restored[rank][kind]["next"] == saved[rank][kind]["next"]
        assert restored[rank][kind]["extra"] == {"step": 3, "rank": rank}
    assert saved[0][kind]["next"] != saved[1][kind]["next"]


@EVERY
def test_sharded_run_is_not_restored_on_another_number_of_ranks(kind, runs):
    model, optimizer = Net(None, False), optim.AdamW(1e-2)
    before = dict(model.shard)
    with pytest.raises(
        ValueError, match="the shards of 2 ranks, but this run has 1"
    ) as e:
        restore_checkpoint(runs[0] / kind, model, optimizer)
    assert "Restore it on 2 ranks" in str(e.value)
    assert all(model.shard[name] is x for name, x in before.items())


def test_mlx_reads_the_shards_of_each_rank(runs):
    save = latest_checkpoint(runs[0] / "fully_shard")
    paths = [save / f"rank-{rank}-of-2" / "model.safetensors" for rank in range(2)]
    first, second = (mx.load(str(path)) for path in paths)
    name = "shard.module.weight"
    assert first[name].shape == second[name].shape == (2, 8)
    assert not mx.array_equal(first[name], second[name])
    assert mx.array_equal(first["same.weight"], second["same.weight"])


def test_failure_on_one_rank_saves_no_shards_on_any(runs):
    first, second = (report["some shards"] for report in runs[1])
    assert "Rank 1 failed with ValueError: model.shard.weight contains" in first["nan"]
    assert "contains NaN" in second["nan"]
    assert "Rank 1 failed with TypeError" in first["a set"]
    assert "unsupported type set" in second["a set"]
    for report in (first, second):
        assert "The ranks differ in 'model.same.weight'" in report["a copy"]
        assert report["files"] == ["save-000001"]


def test_save_without_the_shards_of_a_rank_is_not_read(runs, tmp_path):
    shutil.copytree(runs[0] / "sharded=True", tmp_path / "run")
    shutil.rmtree(latest_checkpoint(tmp_path / "run") / "rank-1-of-2")
    with pytest.raises(ValueError, match="the shards of 2 ranks, but this run has 1"):
        _read(tmp_path / "run", 1, 0)
    with pytest.raises(ValueError, match=r"No such file .*rank-1-of-2"):
        _read(tmp_path / "run", 2, 1)


def test_save_with_shards_is_removed_by_the_next_one(runs, tmp_path):
    shutil.copytree(runs[0] / "sharded=True", tmp_path / "run")
    save_checkpoint(tmp_path / "run", *small())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["save-000002"]


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
