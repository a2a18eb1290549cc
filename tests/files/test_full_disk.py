"""A disk that is full in the middle of a write: an error, and the old file stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# One way to write a file in each function, small first, then larger than the limit.
PROGRAM = """
import io, json, resource, sys
import mlx.core as mx
from mlx_gradscale import GradScaler, torch_checkpoint
from mlx_gradscale.files.arrays import write_arrays
from mlx_gradscale.convert import from_torch, save_run, write_torch
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.formats import save_flodl
from mlx_gradscale.files.atomic import atomic_write
import mlx.nn as nn

kind, path, limit, when = sys.argv[1:]
scaler = GradScaler()

def history(steps):
    made = ScaleHistory(every=10_000)
    for _ in range(steps):
        made.record(scaler, loss=0.5)
    return made

def text(path):
    with atomic_write(path) as file:  # and nobody looks at what write returns
        file.write("x".encode() * (9 if when == "old" else 99_999))

def picture(path):
    from mlx_gradscale.plot import plot_history
    plot_history(history(3), path)

def append(path):
    made = ScaleHistory(path, every=10_000)
    for _ in range(1 if when == "old" else 2000):
        made.record(scaler, loss=0.5)
    made.flush()

size = 2 if when == "old" else 2000
WAYS = {
    "write": text,
    "scaler.pt": scaler.save,
    "scaler.json": scaler.save,
    "scaler.safetensors": scaler.save,
    "run.csv": lambda path: history(size).save(path),
    "appended.csv": append,
    "model.pt": lambda path: torch_checkpoint.save(path, {"w": mx.zeros(size)}),
    "model.safetensors": lambda path: write_arrays(path, {"w": mx.zeros(size)}, {}),
    "flodl": lambda path: save_flodl(path, scaler.state_dict()),
    "picture.png": picture,
    "picture.pdf": picture,
    "run": lambda path: save_run(path, nn.Linear(size, 1), scaler=scaler),
    "torch": lambda path: write_torch(
        path, {"a.bin": {"w": mx.zeros(size)}}, is_folder=True, overwrite=True
    ),
}
if kind == "all":
    for kind, way in WAYS.items():
        way(f"{path}/{kind}")
    sys.exit()
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    WAYS[kind](path)
except OSError as error:
    print(type(error).__name__, error.errno, error)
    sys.exit(3)
"""
# How many bytes the disk takes: less than each writes.
LIMITS = {
    **dict.fromkeys(("scaler.pt", "scaler.json", "scaler.safetensors"), 100),
    **{"flodl": 10, "picture.pdf": 1000},
}


def write(kind, path, limit, when):
    code = [sys.executable, "-c", PROGRAM, kind, str(path), str(limit), when]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(code, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A function that puts the old file of a kind at a path."""
    folder = tmp_path_factory.mktemp("old")
    done = write("all", folder, 0, "old")
    assert done.returncode == 0, done.stderr

    def put(kind, path):
        copy = shutil.copytree if (folder / kind).is_dir() else shutil.copy
        copy(folder / kind, path)

    return put


def content(folder):
    return {p.name: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize(
    "kind",
    ["write", "scaler.pt", "scaler.json", "scaler.safetensors", "run.csv", "model.pt",
     "model.safetensors", "flodl", "picture.pdf", "run", "torch"],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_an_error(kind, old, tmp_path):
    path = tmp_path / kind
    old(kind, path)
    before = content(tmp_path)
    done = write(kind, path, LIMITS.get(kind, 4000), "new")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "File too large" in done.stdout  # the cause
    assert str(path) in done.stdout  # the target, and no hidden name
    assert ".tmp" not in done.stdout
    assert "mlx_gradscale_" not in done.stdout
    assert content(tmp_path) == before


def test_lines_that_do_not_fit_are_an_error_and_whole_lines_stay(old, tmp_path):
    path = tmp_path / "appended.csv"
    old("appended.csv", path)
    done = write("appended.csv", path, 4000, "new")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert str(path) in done.stdout
    from mlx_gradscale.diagnostics import ScaleHistory

    assert len(ScaleHistory.load(path)) > 1


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


@pytest.mark.parametrize("kind", ["write", "run.csv", "run"])
def test_a_disk_that_is_really_full(kind, old, small_disk):
    path = small_disk / kind
    old(kind, path)
    before = content(small_disk)
    (small_disk / "filler").write_bytes(bytes(40_000))
    before["filler"] = bytes(40_000)
    done = write(kind, path, 0, "new")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "No space left" in done.stdout
    assert str(path) in done.stdout
    assert content(small_disk) == before
