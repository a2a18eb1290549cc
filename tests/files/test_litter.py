"""What killed processes leave behind is removed by the next writer, and only that."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import Run, read_run, write_run, write_torch
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.files.atomic import atomic_write

# Begins to write, says so, and goes on when it is told to.
PROGRAM = """
import sys
import mlx.core as mx
from mlx_gradscale.convert import Run, write_run, write_torch
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.files import atomic
from mlx_gradscale.torch_checkpoint import writer
from mlx_gradscale.files.atomic import atomic_write

kind, path = sys.argv[1:]

def wait(*_):
    print("begun", flush=True)
    sys.stdin.readline()

if kind == "file":
    with atomic_write(path) as file:
        file.write(b"theirs")
        wait()
elif kind == "run":
    write_run(path, Run({"theirs": mx.ones(2)}), overwrite=True, progress=wait)
elif kind == "torch":
    chunks = writer._chunks
    writer._chunks = lambda array: [wait(), *chunks(array)][1:]
    write_torch(path, {"a.bin": {"theirs": mx.ones(2)}}, True, True)
elif kind == "history":
    history = ScaleHistory(path)
    wait()
"""
WAYS = ["file", "run", "torch"]


@contextmanager
def writer(kind, path):
    """A process in the middle of a write."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, str(path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def write(kind, path):
    if kind == "file":
        with atomic_write(path) as file:
            file.write(b"mine")
    elif kind == "run":
        write_run(path, Run({"mine": mx.ones(2)}), overwrite=True)
    else:
        write_torch(path, {"a.bin": {"mine": mx.ones(2)}}, True, True)


def owner(kind, path):
    if kind == "file":
        return path.read_text()
    if kind == "run":
        return next(iter(read_run(path).weights))
    return next(iter(torch_checkpoint.load(path / "a.bin")))


def names(folder):
    return {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("kind", WAYS)
def test_the_next_writer_removes_what_killed_ones_left(kind, tmp_path):
    path = tmp_path / "out"
    for _ in range(3):
        with writer(kind, path) as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert len(names(tmp_path)) == 1  # each removed what the one before it left
    write(kind, path)
    assert names(tmp_path) == {"out"}
    assert owner(kind, path) == "mine"


@pytest.mark.parametrize("kind", WAYS)
def test_a_living_writer_loses_nothing(kind, tmp_path):
    path = tmp_path / "out"
    with writer(kind, path) as first, writer(kind, path) as second:
        begun = names(tmp_path)
        assert len(begun) == 2
        write(kind, path)  # twice: the second could remove what the first left
        write(kind, path)
        assert names(tmp_path) == begun | {"out"}
        assert owner(kind, path) == "mine"
        first.send_signal(signal.SIGKILL)
        first.wait()
        write(kind, path)
        assert len(names(tmp_path)) == 2  # only the dead one's is gone
        assert second.communicate("go\n")[0] == ""
        assert second.returncode == 0
    assert owner(kind, path) == "theirs"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("kind", WAYS)
def test_what_belongs_to_another_target_stays(kind, tmp_path):
    """And so do files of the user whose names only look alike."""
    mine = {".out.txt.tmp", ".out.0123.tmp", ".out.mlx_gradscale_", ".out"}
    for name in mine:
        (tmp_path / name).touch()
    (tmp_path / ".out.mlx_gradscale_abcdefg").mkdir()
    with writer(kind, tmp_path / "out2") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = names(tmp_path)
    write(kind, tmp_path / "out")
    assert names(tmp_path) == before | {"out"}


@pytest.mark.parametrize("length", [240, 255])
@pytest.mark.parametrize("kind", WAYS)
def test_long_names(kind, length, tmp_path):
    """A name that leaves no room for a suffix of ours is written to all the same."""
    for name in ("x" * length, "ü" * (length // 2)):
        path = tmp_path / name
        with writer(kind, path) as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
        write(kind, path)
        assert owner(kind, path) == "mine"
        assert names(tmp_path) == {name}
        (tmp_path / name).rename(tmp_path / "gone")
        subprocess.run(["rm", "-r", str(tmp_path / "gone")], check=True)


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_two_histories_do_not_share_a_file(name, tmp_path):
    from mlx_gradscale import GradScaler

    path, scaler = tmp_path / name, GradScaler()
    with writer("history", path) as process:
        with pytest.raises(OSError, match="by another process"):
            ScaleHistory(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = ScaleHistory(path, every=1)
    first.record(scaler, loss=1.0)
    second = ScaleHistory(path, every=1)  # of this process: a notebook's new try
    second.record(scaler, loss=2.0)
    with pytest.raises(RuntimeError, match="a newer ScaleHistory"):
        first.record(scaler, loss=1.0)
    assert [record.loss for record in ScaleHistory.load(path)] == [1.0, 2.0]
    assert len(first) == 2  # nothing is lost: it can be saved elsewhere


def test_a_history_whose_file_was_moved_goes_on_in_a_new_one(tmp_path):
    from mlx_gradscale import GradScaler

    path, scaler = tmp_path / "run.csv", GradScaler()
    history = ScaleHistory(path, every=1)
    history.record(scaler, loss=1.0)
    path.rename(tmp_path / "old.csv")
    history.record(scaler, loss=2.0)
    assert [record.loss for record in ScaleHistory.load(path)] == [2.0]
