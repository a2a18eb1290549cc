"""The kernels of MLX's CPU backend, compiled once for all processes that run tests."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

FRONT = Path(__file__).parent / "compiler"
# In the folder for temporary files.
STORE = "mlx_gradscale_kernels"


def use():
    """Have this process and those it starts take kernels from the store.

    MLX does not lock its folder of kernels, so each run of tests gets one of its own.

    Returns:
        Path | None: The folder, to be removed at the end. None where MLX compiles for
        itself: without its headers or a compiler, or on macOS.
    """
    compiler = shutil.which("g++")
    headers = Path(mx.__file__).parent / "include"
    if sys.platform != "linux" or compiler is None or not headers.is_dir():
        return None
    if "KERNEL_STORE" not in os.environ:
        store = Path(tempfile.gettempdir()) / STORE
        store /= _digest(compiler, headers)
        store.mkdir(parents=True, exist_ok=True)
        os.environ["KERNEL_STORE"] = str(store)
        os.environ["KERNEL_COMPILER"] = compiler
        os.environ["KERNEL_HEADERS"] = str(headers)
        os.environ["PATH"] = f"{FRONT}{os.pathsep}{os.environ['PATH']}"
    # Python has chosen its own folder for temporary files above and stays there.
    folder = Path(tempfile.mkdtemp(prefix="mlx_gradscale_tests_"))
    os.environ["TMPDIR"] = str(folder)
    return folder


def _digest(compiler, headers):
    """What kernels depend on besides their source and flags."""
    version = subprocess.run(
        [compiler, "--version"], stdout=subprocess.PIPE, check=True
    )
    digest = hashlib.sha256(version.stdout)
    for path in sorted(headers.rglob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
