"""How many kernels the first step builds, where none is in MLX's folder yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    "KERNEL_STORE" not in os.environ,
    reason="MLX keeps no kernels in a folder on this machine.",
)


def kernels_built(folder, *arguments):
    """The sources of the kernels that a Python builds which starts with none."""
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return [path.read_text() for path in folder.rglob("*.cpp")]


# AdamW's two, 1 - lr * weight_decay and the update, and with loss scaling one that
# looks whether all is finite and one for the scale with all its counts.
@pytest.mark.parametrize(
    ("variant", "leaves", "kernels"),
    [
        ("bare", 8, 2),
        ("scaler", 8, 4),
        ("scaler", 32, 4),
        ("loss_scale_optimizer", 8, 4),
        ("loss_scale_optimizer", 32, 4),
    ],
)
def test_the_first_step_builds_two_kernels_more_than_the_bare_optimizer(
    variant, leaves, kernels, tmp_path
):
    module = ("-m", "benchmarks.first_call", variant, str(leaves))
    assert len(kernels_built(tmp_path, *module)) == kernels


CHECK = """
import mlx.core as mx
from mlx_gradscale import all_finite
leaves = [mx.ones((8, 4), mx.{dtype}).T for _ in range(24)]
mx.eval(all_finite(leaves))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_many_leaves_are_joined_by_one_kernel_also_where_they_are_transposed(
    dtype, tmp_path
):
    [kernel] = kernels_built(tmp_path, "-c", CHECK.format(dtype=dtype))
    # One that goes through strides takes several times as long.
    assert "tmp_A = A[i];" in kernel
