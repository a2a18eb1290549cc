"""A disk that is full in the middle of a write is an error, and the old file stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Writes one kind of file: small at first, then larger than the limit.
PROGRAM = """
import resource, sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from mlx_gradscale import GradScaler, save_checkpoint
from mlx_gradscale.files.arrays import write_arrays
from mlx_gradscale.files.atomic import atomic_write

kind, path, limit, when = sys.argv[1:]
size = 2 if when == "old" else 2000

def write(path):
    with atomic_write(path) as file:
        file.write(b"x" * 50 * size)

KINDS = {
    "plain": write,
    "scaler.json": GradScaler().save,
    "scaler.safetensors": GradScaler().save,
    "model.safetensors": lambda path: write_arrays(path, {"w": mx.zeros(size)}),
    "run": lambda path: save_checkpoint(path, nn.Linear(size, 1), optim.SGD(0.1)),
}
if kind == "all":
    for kind, write in KINDS.items():
        write(f"{path}/{kind}")
    sys.exit()
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    KINDS[kind](path)
except OSError as error:
    print(type(error).__name__, error.errno, error)
    sys.exit(3)
"""
# How many bytes a file may have: less than each is to have.
LIMITS = {
    "plain": 4000,
    "scaler.json": 100,
    "scaler.safetensors": 100,
    "model.safetensors": 4000,
    "run": 4000,
}


def write(kind, path, limit, when):
    code = [sys.executable, "-c", PROGRAM, kind, str(path), str(limit), when]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(code, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Return a function that puts the old file of a kind at a path."""
    folder = tmp_path_factory.mktemp("old")
    done = write("all", folder, 0, "old")
    assert done.returncode == 0, done.stderr

    def put(kind, path):
        copy = shutil.copytree if (folder / kind).is_dir() else shutil.copy
        copy(folder / kind, path)

    return put


def content(folder):
    return {p.name: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("kind", LIMITS)
def test_file_that_does_not_fit_is_an_error_that_names_it(kind, old, tmp_path):
    path = tmp_path / kind
    old(kind, path)
    before = content(tmp_path)
    done = write(kind, path, LIMITS[kind], "new")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert str(path) in done.stdout
    assert ".tmp" not in done.stdout  # the user's path, not the hidden one
    assert content(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("a small disk cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", ["plain", "run"])
def test_full_disk_leaves_the_old_file(kind, old, small_disk):
    path = small_disk / kind
    old(kind, path)
    (small_disk / "filler").write_bytes(bytes(40_000))
    before = content(small_disk)
    done = write(kind, path, 0, "new")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "No space left" in done.stdout
    assert str(path) in done.stdout
    assert content(small_disk) == before
