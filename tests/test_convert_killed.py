"""A process that is killed, or a disk that fails, while a run is replaced."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from convert_helpers import fails, paths, usual

from mlx_gradscale.convert import (
    from_torch,
    read_run,
    read_torch,
    write_run,
    write_torch,
)
from mlx_gradscale.files import folders

# Replaces a run and is killed at one of its renames; with "renames", as on a disk that
# cannot exchange two folders in one step.
REPLACE = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from mlx_gradscale.convert import from_torch, write_run

folder, at, way = sys.argv[1:]
rename, calls = Path.rename, []

def killed(self, target):
    calls.append(target)
    if len(calls) == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

if way == "renames":
    from mlx_gradscale.files import folders
    folders._in_one_step = lambda a, b: False
Path.rename = killed
write_run(folder, from_torch({"new": mx.ones(2)}), overwrite=True)
"""
OLD, NEW = {"fc.weight", "fc.bias"}, {"new"}


def kill_while_replacing(run, at, way="one step"):
    """A run with two more files, of which a process was killed at a rename."""
    write_run(run, from_torch(usual()))
    for name in ("a.txt", "b.txt"):
        (run / name).write_text(name)
    code = [sys.executable, "-c", REPLACE, str(run), str(at), way]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(code, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def is_whole(run):
    weights = read_run(run).weights.keys()
    files = {p.name for p in run.iterdir()} - {"a.txt", "b.txt"}
    more = {"optimizer.safetensors", "scaler.json"} if weights == OLD else set()
    return (
        weights in (OLD, NEW) and files == {"model.safetensors", "training.json"} | more
    )


def write_again(run):
    write_run(run, from_torch({"again": mx.ones(2)}), overwrite=True)
    assert read_run(run).weights.keys() == {"again"}
    for name in ("a.txt", "b.txt"):
        assert (run / name).read_text() == name


@pytest.mark.parametrize("at", [1, 2])
def test_a_killed_process_leaves_a_whole_run_in_its_place(at, tmp_path):
    run = tmp_path / "run"
    kill_while_replacing(run, at)
    assert is_whole(run)
    write_again(run)


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_the_same_where_folders_are_exchanged_by_renames(at, tmp_path):
    run = tmp_path / "run"
    kill_while_replacing(run, at, "renames")
    assert is_whole(run)
    write_again(run)


@pytest.mark.parametrize("chosen", [OLD, NEW])
def test_runs_that_a_killed_process_hid_are_named(chosen, tmp_path, capsys):
    run = tmp_path / "my run"
    kill_while_replacing(run, 2, "renames")
    assert not run.exists()
    for refused in (
        lambda: read_run(run),
        lambda: read_torch(run),
        lambda: write_run(run, from_torch({"other": mx.ones(2)})),
        lambda: write_torch(run, {"a.pt": {"other": mx.ones(2)}}, is_folder=True),
    ):
        with pytest.raises(FileNotFoundError, match="Nothing is lost") as error:
            refused()
    where = [*paths(tmp_path, usual())[:2], "--mlx-path", str(run)]
    for flags in ([], ["--overwrite"], ["--to", "torch"], ["--dry-run"]):
        assert str(error.value) in fails(capsys, *where, *flags)
    assert not run.exists()

    commands = "mv " + str(error.value).split(" with mv ")[1]
    old, new = (shlex.split(command) for command in commands.split(" or "))
    assert old[1] == f"{new[1]}.old"
    subprocess.run(old if chosen == OLD else new, check=True)
    assert read_run(run).weights.keys() == chosen
    assert is_whole(run)
    write_again(run)


def test_hidden_runs_of_another_folder_are_not_meant(tmp_path):
    kill_while_replacing(tmp_path / "run.b", 2, "renames")
    with pytest.raises(ValueError, match="There is no folder"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("kind", ["run", "torch"])
@pytest.mark.parametrize("is_new", [True, False])
def test_all_is_on_the_disk_before_it_takes_its_place(
    kind, is_new, tmp_path, monkeypatch
):
    folder = tmp_path / "deep" / "folder"

    def write():
        if kind == "run":
            write_run(folder, from_torch(usual()), overwrite=True)
        else:
            content = {"a.pt": usual(), "b.safetensors": {"w": mx.ones(2)}}
            write_torch(folder, content, is_folder=True, overwrite=True)

    def number(path):
        return path.stat().st_ino if path.exists() else None

    if not is_new:
        write()
    old, synced, fsync = number(folder), {True: set(), False: set()}, os.fsync

    def noted(descriptor):
        is_placed = number(folder) != old
        synced[is_placed].add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write()
    assert number(folder) != old
    assert synced[False] >= {number(p) for p in (folder, *folder.iterdir())}
    assert synced[True] >= {number(folder.parent)}
    assert (number(tmp_path) in synced[False]) == is_new  # the name "deep" is there


@pytest.mark.parametrize("is_new", [True, False])
def test_a_disk_that_fails_changes_nothing(is_new, tmp_path, monkeypatch):
    """Whichever of the writes it is that does not reach the disk."""
    run, fsync = tmp_path / "run", os.fsync
    calls, failing = 0, None

    def counted(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError("the disk is broken")
        fsync(descriptor)

    def files():
        return {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}

    def write():
        write_run(run, from_torch({"new": mx.ones(2)}), overwrite=True)

    monkeypatch.setattr(os, "fsync", counted)
    write()
    count = calls
    shutil.rmtree(run)
    if not is_new:
        write_run(run, from_torch(usual()))
        (run / "a.txt").write_text("mine")
    before = files()
    for number in range(1, count + 1):
        calls, failing = 0, number
        with pytest.raises(OSError, match="the disk is broken"):
            write()
        assert files() == before


def test_an_old_run_is_not_deleted_where_it_cannot_be_put_back(tmp_path, monkeypatch):
    """One failure makes the exchange undone, and the undoing fails too."""
    run = tmp_path / "run"
    write_run(run, from_torch(usual()))
    (run / "a.txt").write_text("mine")
    exchange, calls = folders._exchange, []

    def only_once(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise OSError("no way back")
        exchange(a, b)

    def refused(self, target):
        raise OSError("no")

    monkeypatch.setattr(folders, "_exchange", only_once)
    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="no way back"):
        write_run(run, from_torch({"new": mx.ones(2)}), overwrite=True)
    monkeypatch.undo()
    (hidden,) = (p for p in tmp_path.iterdir() if p != run)
    assert is_whole(hidden)
    assert read_run(run).weights.keys() == NEW
    assert (hidden / "a.txt").read_text() == "mine"
