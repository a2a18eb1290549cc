"""Run tests while MLX flushes subnormals to zero, as Apple's GPUs do.

    python tools/as_on_metal.py [PYTEST ARGUMENT...]

Without arguments, it runs the core tests. Only MLX flushes subnormals; Python,
hypothesis and the tests' reference do not. This works only on Linux on x86-64.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).parent


def why_not() -> str | None:
    """Return the reason why this machine is not supported, or None."""
    here = platform.system(), platform.machine()
    if here != ("Linux", "x86_64"):
        return f"Only Linux on x86_64 can flush subnormals in MLX alone, got {here}."
    return None


def build(folder: str | Path) -> Path:
    """Compile ``flush_subnormals.c`` with g++, which MLX's CPU backend needs too."""
    library = Path(folder) / "flush_subnormals.so"
    flags = ["-xc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    source = str(TOOLS / "flush_subnormals.c")
    subprocess.run(["g++", *flags, source, "-o", str(library), "-ldl"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Return the environment for a process in which MLX flushes subnormals."""
    others = os.environ.get("LD_PRELOAD")
    return os.environ | {"LD_PRELOAD": ":".join(filter(None, [str(library), others]))}


def main(arguments: list[str]) -> int:
    """Run pytest with the library; return its exit code, or 0 if not supported."""
    if reason := why_not():
        print(reason)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or ["-m", "core"])]
        run = subprocess.run(command, cwd=TOOLS.parent, env=environment(build(folder)))
        return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
