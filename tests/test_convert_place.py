"""Where a run is written: what is refused, what stays, what is undone."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import pytest
from convert_helpers import fails, paths, usual

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import (
    Record,
    Run,
    from_torch,
    main,
    read_run,
    write_run,
)
from mlx_gradscale.files import folders
from mlx_gradscale.files.folders import check_folder


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    run = from_torch(usual())
    write_run(tmp_path / "run", run)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    run.record.checkpoint = {"odd": object()}
    with pytest.raises(TypeError, match="odd is a object"):
        write_run(tmp_path / "run", run, overwrite=True)
    run.record.checkpoint = None
    run.scaler = {"scale": object()}
    with pytest.raises(TypeError):
        write_run(tmp_path / "run", run, overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_place_that_cannot_be_taken_keeps_the_old_folder(tmp_path, monkeypatch):
    run = from_torch(usual())
    write_run(tmp_path / "run", run)
    rename, calls = Path.rename, []

    def second_fails(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(folders, "_in_one_step", lambda *_: False)
    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no"):
        write_run(tmp_path / "run", run, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert read_run(tmp_path / "run").scaler == run.scaler


@pytest.mark.parametrize("inside", ["run.pt", "deep/run.pt", "."])
@pytest.mark.parametrize("way", ["mlx", "torch"])
def test_a_source_in_the_target_is_refused(inside, way, tmp_path, capsys):
    """--overwrite deleted the checkpoint it had read."""
    run = tmp_path / "run"
    file = run / inside
    for needed in (run, file.parent):
        needed.mkdir(parents=True, exist_ok=True)
    if inside != ".":
        torch_checkpoint.save(file, usual())
    before = sorted(run.rglob("*"))
    where = ["--torch-path", str(file), "--mlx-path", str(run), "--overwrite"]
    assert "one lies in the other" in fails(capsys, *where, "--to", way)
    assert sorted(run.rglob("*")) == before
    if way == "mlx" and inside == "run.pt":  # the other way about
        link = tmp_path / "link"
        link.symlink_to(run)
        where = ["--torch-path", str(link), "--mlx-path", str(run / "x")]
        assert "one lies in the other" in fails(capsys, *where)


def test_other_files_of_a_replaced_folder_stay(tmp_path):
    where = [*paths(tmp_path, usual()), "--to", "mlx", "--overwrite"]
    assert main(where) == 0
    run = tmp_path / "run"
    (run / "notes.txt").write_text("mine")
    (run / "plots").mkdir()
    (run / "plots" / "a.csv").write_text("1")
    (run / "dead").symlink_to("nowhere")
    run.chmod(0o750)
    bare = {"model": usual()["model"]}  # the old optimizer and scaler must go
    torch_checkpoint.save(tmp_path / "a.pt", bare)
    assert main(where) == 0
    assert {p.name for p in run.iterdir()} == {
        "model.safetensors",
        "training.json",
        "notes.txt",
        "plots",
        "dead",
    }
    assert (run / "plots" / "a.csv").read_text() == "1"
    assert run.stat().st_mode & 0o777 == 0o750
    assert {p.name for p in tmp_path.iterdir()} == {"a.pt", "run"}


# Each of the two files is renamed, and the folders three times or not at all.
@pytest.mark.parametrize(
    ("renames", "failing"),
    [*((True, i) for i in range(5)), *((False, i) for i in range(2))],
)
def test_a_failed_swap_is_undone(renames, failing, tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_run(run, from_torch(usual()))
    for name in ("a.txt", "b.txt"):
        (run / name).write_text(name)
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    rename, calls = Path.rename, []

    def one_fails(self, target):
        calls.append(target)
        if len(calls) == failing + 1:
            raise OSError("no")
        return rename(self, target)

    if renames:
        monkeypatch.setattr(folders, "_in_one_step", lambda *_: False)
    monkeypatch.setattr(Path, "rename", one_fails)
    with pytest.raises(OSError, match="no"):
        write_run(run, from_torch({"w": mx.ones(2)}), overwrite=True)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_link_is_followed_and_a_file_is_refused(tmp_path, capsys):
    where = [*paths(tmp_path, usual()), "--to", "mlx", "--overwrite"]
    (tmp_path / "run").write_text("hello")
    for flags in ([], ["--dry-run"]):
        assert "is a file" in fails(capsys, *where, *flags)
    assert (tmp_path / "run").read_text() == "hello"
    (tmp_path / "run").unlink()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "keep.txt").write_text("x")
    (tmp_path / "run").symlink_to("real")
    assert main(where) == 0
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "real" / "keep.txt").exists()
    assert (tmp_path / "real" / "model.safetensors").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"a.pt", "run", "real"}


def test_places_that_cannot_be_written_to(tmp_path, capsys, monkeypatch):
    where = paths(tmp_path, usual())
    assert main(where) == 0
    where[1] = str(tmp_path / "no" / "back.pt")
    said = fails(capsys, *where)
    assert f"no folder {tmp_path / 'no'}" in said
    assert ".tmp" not in said
    (tmp_path / "there").mkdir()
    where[1] = str(tmp_path / "there")
    assert "is a folder" in fails(capsys, *where, "--to", "torch")
    monkeypatch.chdir(tmp_path / "there")
    where = ["--torch-path", "../a.pt", "--mlx-path", ".", "--to", "mlx"]
    assert "the folder you are in" in fails(capsys, *where, "--overwrite")
    assert list((tmp_path / "there").iterdir()) == []


def test_a_mounted_disk_is_not_replaced():
    mounted = [p for p in map(Path, ("/proc", "/dev")) if p.is_mount()]
    if not mounted:
        pytest.skip("no mounted disk is known here")
    with pytest.raises(ValueError, match="give a folder inside it"):
        check_folder(mounted[0], overwrite=True)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write"
)
def test_a_read_only_run_is_not_replaced(tmp_path):
    run = tmp_path / "run"
    write_run(run, from_torch(usual()))
    run.chmod(0o555)
    with pytest.raises(PermissionError, match="not yours to read and write"):
        write_run(run, from_torch({"w": mx.ones(2)}), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    run.chmod(0o755)
    assert read_run(run).scaler == usual()["scaler"]


def test_a_hidden_folder_of_the_user_is_left_alone(tmp_path):
    """.run.20240101 was taken for what a killed process had left."""
    write_run(tmp_path / "run", from_torch(usual()))
    kept = tmp_path / ".run.20240101" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    write_run(tmp_path / "run", from_torch(usual()), overwrite=True)
    assert kept.read_text() == "mine"


# Writes a run again and again; both scaler and record tell which process it was.
WRITE = """
import sys
import mlx.core as mx
from mlx_gradscale.convert import Run, write_run
from mlx_gradscale.files import folders

folder, number, way = sys.argv[1:]
if way == "renames":
    folders._in_one_step = lambda a, b: False
run = Run({"w": mx.ones(2)}, scaler={"scale": float(number)})
run.record.checkpoint = {"who": float(number)}
for _ in range(60):
    write_run(folder, run, overwrite=True)
"""


@pytest.mark.parametrize("way", ["one step", "renames"])
def test_two_processes_that_write_lose_nothing(way, tmp_path):
    run = tmp_path / "run"
    write_run(
        run, Run({"w": mx.ones(2)}, scaler={"scale": 3.0}, record=Record({"who": 3.0}))
    )
    names = {f"{i}.txt" for i in range(8)}
    for name in names:
        (run / name).write_text(name)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WRITE, str(run), number, way],
                    env=environment,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for number in "12"
        ]
        while way == "one step" and any(writer.poll() is None for writer in writers):
            read = read_run(run)
            assert (
                read.scaler["scale"] == read.record.checkpoint["who"]
            )  # the files of one run
        for writer in writers:
            said = writer.communicate()[1]
            # Only where a folder is not there for a moment may a writer give up.
            assert writer.returncode == 0 or way == "renames", said
    assert {p.name for p in run.iterdir()} >= names
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_pytorch_files_keeps_what_is_not_its_own(tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    for folder_ in (there, back):
        folder_.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", usual()["model"])
    where = ["--torch-path", str(there), "--mlx-path", str(tmp_path / "run")]
    assert main(where) == 0
    where[1] = str(back)
    where += ["--to", "torch", "--overwrite"]
    (back / "notes.txt").write_text("mine")
    (back / "best.pt").write_text("mine")
    assert "best.pt" in fails(capsys, *where)
    (back / "best.pt").unlink()
    assert main(where) == 0
    assert {p.name for p in back.iterdir()} == {"notes.txt", "pytorch_model.bin"}
