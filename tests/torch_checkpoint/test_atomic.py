"""A failed save leaves the old file, and nothing else, behind."""

import os
import stat

import mlx.core as mx
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.files import atomic
from mlx_gradscale.files.atomic import atomic_write
from mlx_gradscale.torch_checkpoint import writer


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"old")
    return path


def test_a_save_replaces_the_file_at_the_end(path):
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["run.pt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_on_the_way_changes_nothing(path, error, monkeypatch):
    def fail_at_second(array):
        if array.size == 2:
            raise error
        return chunks(array)

    chunks = writer._chunks
    monkeypatch.setattr(writer, "_chunks", fail_at_second)
    with pytest.raises(error):
        torch_checkpoint.save(path, [mx.zeros((1,)), mx.zeros((2,))])
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["run.pt"]


def test_a_full_disk_is_reported_as_such(tmp_path, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError):  # noqa: PT011
        torch_checkpoint.save(full, {"x": mx.zeros((1000,))})


def test_long_files_are_flushed_on_the_way(path, monkeypatch):
    monkeypatch.setattr(atomic, "_FLUSH_EVERY", 1000)
    synced = []

    def fsync(descriptor):
        synced.append(descriptor)
        real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    torch_checkpoint.save(path, [mx.zeros((1000,))] + [mx.ones((1000,))] * 9)
    assert len(synced) >= 3  # on the way, at the end, and the folder
    assert len(torch_checkpoint.load(path)) == 10


def test_the_mode_is_that_of_any_new_file(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    torch_checkpoint.save(tmp_path / "x.pt", {})
    mode = stat.S_IMODE((tmp_path / "x.pt").stat().st_mode)
    assert mode == stat.S_IMODE(plain.stat().st_mode)


def test_a_link_keeps_pointing(path, tmp_path):
    link = tmp_path / "latest.pt"
    link.symlink_to(path)
    torch_checkpoint.save(link, {"epoch": 1})
    assert link.is_symlink()
    assert torch_checkpoint.load(path) == {"epoch": 1}


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        torch_checkpoint.save(tmp_path / "no" / "x.pt", {})
