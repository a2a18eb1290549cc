"""Files and folders are written whole or not at all, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_gradscale.files.atomic import atomic_write, new_folder

# Begins to write, says so, and finishes when it is told to.
PROGRAM = """
import sys
from mlx_gradscale.files.atomic import atomic_write, new_folder

kind, path = sys.argv[1:]
if kind == "file":
    with atomic_write(path) as file:
        file.write(b"theirs")
        print("begun", flush=True)
        sys.stdin.readline()
else:
    with new_folder(path) as folder:
        (folder / "owner").write_text("theirs")
        print("begun", flush=True)
        sys.stdin.readline()
"""
KINDS = ["file", "folder"]
each_kind = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def writer(kind, path):
    """A process in the middle of a write."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
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


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def write(kind, path, text="mine"):
    if kind == "file":
        with atomic_write(path) as file:
            file.write(text.encode())
    else:
        with new_folder(path) as folder:
            (folder / "owner").write_text(text)


def owner(kind, path):
    return path.read_text() if kind == "file" else (path / "owner").read_text()


def names(folder):
    return {path.name for path in folder.iterdir()}


@each_kind
def test_next_writer_removes_what_killed_writers_left(kind, tmp_path):
    path = tmp_path / "out"
    for _ in range(3):
        with writer(kind, path) as process:
            kill(process)
    assert len(names(tmp_path)) == 1  # each removed what the one before it left
    write(kind, path)
    assert names(tmp_path) == {"out"}
    assert owner(kind, path) == "mine"


def test_living_writers_lose_nothing(tmp_path):
    path = tmp_path / "out"
    with writer("file", path) as first, writer("file", path) as second:
        begun = names(tmp_path)
        assert len(begun) == 2
        write("file", path)
        write("file", path)
        assert names(tmp_path) == begun | {"out"}
        kill(first)
        write("file", path)
        assert len(names(tmp_path)) == 2  # only the dead one's is gone
        assert second.communicate("go\n")[0] == ""
        assert second.returncode == 0
    assert path.read_text() == "theirs"
    assert names(tmp_path) == {"out"}


def test_living_writer_of_a_folder_finishes_beside_others(tmp_path):
    with writer("folder", tmp_path / "out") as process:
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
            (folder / "owner").write_text(str(1 // 0))
        assert process.communicate("go\n")[0] == ""
        assert process.returncode == 0
    assert owner("folder", tmp_path / "out") == "theirs"


@each_kind
def test_files_with_similar_names_stay(kind, tmp_path):
    for name in (".out.txt.tmp", ".out-0123.tmp", ".out-01234567.0123456789abcdef.tmp"):
        (tmp_path / name).touch()
    with writer(kind, tmp_path / "out2") as process:
        kill(process)
    before = names(tmp_path)
    write(kind, tmp_path / "out")
    assert names(tmp_path) == before | {"out"}


@each_kind
@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127], ids=["ascii", "umlauts"])
def test_longest_names_can_be_written(kind, name, tmp_path):
    with writer(kind, tmp_path / name) as process:
        kill(process)
    write(kind, tmp_path / name)
    assert owner(kind, tmp_path / name) == "mine"
    assert names(tmp_path) == {name}


@each_kind
def test_error_leaves_the_old_content_and_no_temporary_file(kind, tmp_path):
    path = tmp_path / "out"
    if kind == "file":
        write(kind, path)
    before = names(tmp_path)
    make = atomic_write if kind == "file" else new_folder
    with pytest.raises(KeyboardInterrupt), make(path):
        raise KeyboardInterrupt
    assert names(tmp_path) == before
    assert kind == "folder" or owner(kind, path) == "mine"


def test_folder_replaces_only_an_empty_folder(tmp_path):
    (tmp_path / "out").mkdir()
    write("folder", tmp_path / "out")
    with pytest.raises(FileExistsError, match="already exists"):
        write("folder", tmp_path / "out", "again")
    assert owner("folder", tmp_path / "out") == "mine"


def test_link_keeps_pointing_to_the_new_file(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write("file", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "mine"


def test_devices_and_folders_are_not_replaced(tmp_path):
    with pytest.raises(OSError, match="is a device or socket, not a file"):
        write("file", Path(os.devnull))
    with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
        write("file", tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        write("file", tmp_path / "none" / "out")


def test_new_file_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write("file", tmp_path / "out")
        write("folder", tmp_path / "folder")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
