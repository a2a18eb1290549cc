"""Updates on the CPU in vector code: what GCC needs to know of a kernel's pointers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEP = """
from benchmarks import variants
make = variants.OPTIMIZERS[{name!r}]
variants.{variant}(make, [(8, 8), (8, 8), (4, 4)], {options}).run()
"""
ONE_MOMENT = ("Lion", "SGD, momentum")
OPTIONS = {"scaler": "", "loss_scale_optimizer": "clip=True"}


def updates(name, variant, folder):
    """The kernels of the update that a step builds: C++ that writes float32."""
    code = STEP.format(name=name, variant=variant, options=OPTIONS[variant])
    environment = os.environ | {"TMPDIR": str(folder)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    texts = [path.read_text() for path in folder.rglob("*.cpp")]
    return [x for x in texts if re.search(r"float tmp_\w+ = Subtract", x)]


def pairs(kernel):
    """How many pairs of float pointers may overlap, of which one is written."""
    pointers = set(re.findall(r"^  float\* (\w+) =", kernel, re.MULTILINE))
    written = set(re.findall(r"^  (\w+)\[i\] = ", kernel, re.MULTILINE)) & pointers
    read = len(pointers - written)
    return len(written) * read + len(written) * (len(written) - 1) // 2


@pytest.mark.skipif(
    "KERNEL_STORE" not in os.environ,
    reason="MLX keeps no kernels in a folder on this machine.",
)
@pytest.mark.parametrize("variant", OPTIONS)
@pytest.mark.parametrize("name", ["SGD", *ONE_MOMENT])
def test_the_compiler_can_tell_the_pointers_of_an_update_apart(name, variant, tmp_path):
    (kernel,) = updates(name, variant, tmp_path)
    # GCC vectorises up to 10; with a factor in float32 it is 11.
    assert pairs(kernel) == (9 if name in ONE_MOMENT else 3)
