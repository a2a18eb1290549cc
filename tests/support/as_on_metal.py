"""Run tests where MLX flushes subnormals to zero, as Apple's GPUs do.

python tests/as_on_metal.py [PYTEST ARGUMENT...]

Without arguments: the core's tests. Python itself, and so hypothesis and the reference,
stays as it is. Only Linux on x86-64 can do this.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
CORE = [
    "test_as_on_metal.py",
    "test_mlx_internals.py",
    "test_scale.py",
    "test_scale_bounds.py",
    "test_scaler.py",
    "test_scaler_machine.py",
    "test_scaled_loss.py",
    "test_finite.py",
    "test_finite_edges.py",
    "test_guard.py",
    "test_guard_classes.py",
    "test_guard_in_place.py",
    "test_optimizer.py",
    "test_optimizer_masters.py",
    "test_optimizer_remainder.py",
    "test_optimizer_state.py",
    "test_precision.py",
    "test_true_gradients.py",
    "test_forward.py",
    "test_remainder.py",
    "test_learning.py",
]


def why_not():
    """Why this machine cannot do it, or None."""
    here = platform.system(), platform.machine()
    if here != ("Linux", "x86_64"):
        return f"Only Linux on x86_64 can flush subnormals in MLX alone, not {here}."
    return None


def build(folder):
    """Compile the library with what MLX's CPU backend compiles its kernels with."""
    library = Path(folder) / "flush_subnormals.so"
    source = TESTS / "flush_subnormals.c"
    command = ["g++", "-xc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", source]
    subprocess.run([*command, "-o", library, "-ldl"], check=True)
    return library


def environment(library):
    """The environment of a process in which MLX flushes."""
    others = os.environ.get("LD_PRELOAD")
    return os.environ | {"LD_PRELOAD": ":".join(filter(None, [str(library), others]))}


def main(arguments):
    if reason := why_not():
        print(reason)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q"]
        command += arguments or [str(TESTS / name) for name in CORE]
        return subprocess.run(command, env=environment(build(folder))).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
