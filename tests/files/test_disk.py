"""Paths of files, and JSON within bounds."""

import os
import signal

import mlx.nn as nn
import pytest

from mlx_gradscale import GradScaler, float32_layers, torch_checkpoint
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.files.arrays import read_arrays
from mlx_gradscale.files.disk import check_file, read_json
from mlx_gradscale.inspect import describe


def test_check_file_refuses_existing_paths(tmp_path):
    (tmp_path / "old").touch()
    check_file(tmp_path / "new")
    check_file(tmp_path / "old", overwrite=True)
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_file(tmp_path / "old")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 10**5, b" " * 2**24 + b"1", b"\xff"]
)
def test_bad_json_is_a_value_error_that_names_the_file(data, tmp_path):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")


def test_json_file_is_read_up_to_its_size_limit(tmp_path):
    with open(tmp_path / "sparse.json", "wb") as file:
        file.truncate(2**40)  # a terabyte of zeros
    with pytest.raises(ValueError, match="longer than 16,777,216"):
        read_json(tmp_path / "sparse.json")


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
