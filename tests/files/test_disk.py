"""Files and folders are written whole or not at all, and read within bounds."""

import contextlib
import os
import resource
import signal
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.checkpoint_writers import names, save_steps, small

from mlx_gradscale import GradScaler, float32_layers, save_checkpoint, torch_checkpoint
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.files.arrays import read_arrays, write_arrays
from mlx_gradscale.files.disk import atomic_folder, atomic_write, check_file, read_json
from mlx_gradscale.inspect import describe

LEFTOVER = ".mlx_gradscale-0123456789abcdef.tmp"
WRITERS = {"file": atomic_write, "folder": atomic_folder}
each_kind = pytest.mark.parametrize("kind", WRITERS)


def fill(opened, text="mine"):
    if isinstance(opened, Path):
        (opened / "owner").write_text(text)
    else:
        opened.write(text.encode())


def write(kind, path, text="mine"):
    with WRITERS[kind](path) as opened:
        fill(opened, text)


def owner(path):
    return (path / "owner" if path.is_dir() else path).read_text()


@each_kind
def test_old_content_is_replaced_only_when_the_writer_finishes(kind, tmp_path):
    out = tmp_path / "out"
    write(kind, out, "old")
    with pytest.raises(KeyboardInterrupt), WRITERS[kind](out):
        raise KeyboardInterrupt
    assert owner(out) == "old"
    with WRITERS[kind](out) as opened:
        fill(opened, "new")
        assert owner(out) == "old"
    assert owner(out) == "new"
    assert names(tmp_path) == ["out"]


@each_kind
@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127], ids=["ascii", "umlauts"])
def test_longest_names_can_be_written(kind, name, tmp_path):
    write(kind, tmp_path / name)
    assert names(tmp_path) == [name]


def test_concurrent_writers_do_not_remove_each_others_files(tmp_path):
    with contextlib.ExitStack() as stack:
        with atomic_folder(tmp_path / "first") as first, atomic_write(tmp_path / "out"):
            write("folder", tmp_path / "other", "second")
            write("file", tmp_path / "out")
            fill(first, "first")
            second = stack.enter_context(atomic_folder(tmp_path / "second"))
        write("folder", tmp_path / "third")
        fill(second, "second")
    assert names(tmp_path) == ["first", "other", "out", "second", "third"]
    assert owner(tmp_path / "first") == "first"
    assert owner(tmp_path / "second") == "second"


def test_next_save_removes_folders_of_killed_writers_but_not_similar_ones(tmp_path):
    (tmp_path / LEFTOVER).mkdir()
    (tmp_path / LEFTOVER / "new").write_text("half")
    save_steps(tmp_path, 0)
    assert names(tmp_path) == ["save-000001"]
    (tmp_path / ".mlx_gradscale-0123.tmp").mkdir()
    (tmp_path / LEFTOVER[1:]).mkdir()
    (tmp_path / LEFTOVER).symlink_to(LEFTOVER[1:])
    os.mkfifo(tmp_path / ".mlx_gradscale-fedcba9876543210.tmp")
    before = {*names(tmp_path)}
    save_steps(tmp_path, 1, keep=2)
    assert {*names(tmp_path)} == before | {"save-000002"}


def test_folder_replaces_an_empty_folder_but_never_a_file(tmp_path):
    (tmp_path / "empty").mkdir()
    write("folder", tmp_path / "empty")
    assert owner(tmp_path / "empty") == "mine"
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(NotADirectoryError, match="file"):
        write("folder", tmp_path / "file")
    assert owner(tmp_path / "file") == "theirs"
    assert names(tmp_path) == ["empty", "file"]


def test_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    def fail_for_the_new_folder(path, target):
        if path.name.startswith(".mlx_gradscale-"):
            raise OSError("Input/output error")
        return rename(path, target)

    write("folder", tmp_path / "out", "old")
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fail_for_the_new_folder)
    with pytest.raises(OSError, match="Input/output error"):
        write("folder", tmp_path / "out", "new")
    assert owner(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


def test_link_keeps_pointing_to_the_new_file(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write("file", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert owner(tmp_path / "real") == "mine"


def test_pipes_and_folders_are_not_replaced(tmp_path):
    # Not /dev/null: if the check is missing, root would replace the system's device.
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            write("file", path)


@each_kind
def test_writing_into_a_missing_folder_names_the_folder(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*none"):
        write(kind, tmp_path / "none" / "out")


@pytest.mark.parametrize(
    "write",
    [
        lambda path, n: write_arrays(path, {"w": mx.zeros(n)}),
        lambda path, n: save_checkpoint(path, *small(), values=mx.zeros(n)),
    ],
    ids=["arrays", "checkpoint"],
)
def test_write_beyond_the_file_size_limit_leaves_the_old_files(write, tmp_path):
    write(tmp_path / "out", 2)
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "out", 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.rglob("*")) == before


def test_check_file_refuses_existing_paths(tmp_path):
    (tmp_path / "old").touch()
    check_file(tmp_path / "new")
    check_file(tmp_path / "old", overwrite=True)
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_file(tmp_path / "old")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10**5, b"\xff", 2**40])
def test_bad_json_is_a_value_error_that_names_the_file(data, tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            file.truncate(data)  # a terabyte of zeros
    with pytest.raises(ValueError, match=r"a\.json cannot be read") as caught:
        read_json(tmp_path / "a.json")
    assert data != 2**40 or "longer than 16,777,216 bytes" in str(caught.value)


READERS = {
    "a.csv": [ScaleHistory, ScaleHistory.load],
    "a.json": [
        read_json,
        describe,
        GradScaler().load,
        lambda path: float32_layers(nn.Linear(1, 1), path),
    ],
    "a.json.gz": [GradScaler().load],
    "a.safetensors": [read_arrays, describe, GradScaler().load],
    "a.pt": [torch_checkpoint.load, torch_checkpoint.shapes, GradScaler().load],
}


def time_out(*_):
    raise TimeoutError("A reader waits for a pipe.")


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_pipe_without_waiting(name, tmp_path):
    os.mkfifo(tmp_path / name)
    previous = signal.signal(signal.SIGALRM, time_out)
    signal.alarm(20)
    try:
        for read in READERS[name]:
            with pytest.raises((OSError, ValueError), match="regular file"):
                read(tmp_path / name)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
