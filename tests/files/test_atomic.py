"""Files and folders are written whole or not at all, and nothing stays behind."""

import contextlib
import os
import resource
from pathlib import Path

import mlx.core as mx
import pytest
from support.checkpoint_writers import small

from mlx_gradscale import save_checkpoint
from mlx_gradscale.files.arrays import write_arrays
from mlx_gradscale.files.disk import atomic_folder, atomic_write

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


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_next_save_removes_temporary_folders_of_killed_writers(tmp_path):
    (tmp_path / LEFTOVER).mkdir()
    (tmp_path / LEFTOVER / "new").write_text("half")
    save_checkpoint(tmp_path, *small())
    assert names(tmp_path) == {"save-000001"}


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
    assert names(tmp_path) == {"out"}


@each_kind
@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127], ids=["ascii", "umlauts"])
def test_longest_names_can_be_written(kind, name, tmp_path):
    write(kind, tmp_path / name)
    assert names(tmp_path) == {name}


def test_concurrent_writers_do_not_remove_each_others_files(tmp_path):
    with atomic_folder(tmp_path / "folder") as first, atomic_write(tmp_path / "out"):
        write("folder", tmp_path / "other", "second")
        write("file", tmp_path / "out")
        fill(first, "first")
    assert names(tmp_path) == {"folder", "other", "out"}
    assert owner(tmp_path / "folder") == "first"


def test_writer_that_began_beside_another_is_safe_after_that_one_has_ended(tmp_path):
    with contextlib.ExitStack() as stack:
        with atomic_folder(tmp_path / "first") as first:
            second = stack.enter_context(atomic_folder(tmp_path / "second"))
            fill(first, "first")
        write("folder", tmp_path / "third")
        fill(second, "second")
    assert owner(tmp_path / "second") == "second"


def test_files_with_similar_names_are_neither_opened_nor_removed(tmp_path):
    (tmp_path / ".mlx_gradscale-0123.tmp").mkdir()
    (tmp_path / LEFTOVER[1:]).mkdir()
    (tmp_path / LEFTOVER).symlink_to(LEFTOVER[1:])
    os.mkfifo(tmp_path / ".mlx_gradscale-fedcba9876543210.tmp")
    before = names(tmp_path)
    save_checkpoint(tmp_path, *small())
    assert names(tmp_path) == before | {"save-000001"}


def test_folder_replaces_an_empty_folder_but_never_a_file(tmp_path):
    (tmp_path / "empty").mkdir()
    write("folder", tmp_path / "empty")
    assert owner(tmp_path / "empty") == "mine"
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(NotADirectoryError, match="file"):
        write("folder", tmp_path / "file")
    assert owner(tmp_path / "file") == "theirs"
    assert names(tmp_path) == {"empty", "file"}


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
    assert names(tmp_path) == {"out"}


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


def write_small_checkpoint(path, size):
    save_checkpoint(path, *small(), values=mx.zeros(size))


@pytest.mark.parametrize(
    "write",
    [lambda path, n: write_arrays(path, {"w": mx.zeros(n)}), write_small_checkpoint],
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
