"""A write that does not fit on the disk is an error, and the old file stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Writes one kind of file: small at first, then larger than a file may be.
PROGRAM = """
import resource, sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
from mlx_gradscale import save_checkpoint
from mlx_gradscale.files.arrays import write_arrays

def write(size):
    if kind == "arrays":
        write_arrays(path, {"w": mx.zeros(size)})
    else:
        save_checkpoint(path, nn.Linear(size, 1), optim.SGD(0.1))

kind, path = sys.argv[1:]
write(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    write(2000)
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["arrays", "run"])
def test_write_that_does_not_fit_leaves_the_old_file_and_names_it(kind, tmp_path):
    path = tmp_path / kind
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "File too large" in done.stdout, done.stderr
    assert str(tmp_path) in done.stdout
    left = [each.relative_to(tmp_path) for each in tmp_path.rglob("*")]
    assert not [each for each in left if ".tmp" in str(each)]
    assert {each.parts[1] for each in left if len(each.parts) > 1} <= {"save-000001"}
    file = path if kind == "arrays" else path / "save-000001" / "model.safetensors"
    assert file.stat().st_size < 500
