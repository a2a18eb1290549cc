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


# AdamW's two, 1 - lr * weight_decay and the update, and with loss scaling one that
# looks whether all is finite and one for the scale with all its counts.
@pytest.mark.parametrize(
    ("variant", "kernels"), [("bare", 2), ("scaler", 4), ("loss_scale_optimizer", 4)]
)
def test_the_first_step_builds_two_kernels_more_than_the_bare_optimizer(
    variant, kernels, tmp_path
):
    subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", variant, "8"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert len(list(tmp_path.rglob("*.so"))) == kernels
