"""Run Python while MLX's Linux wheel reports a GPU, and count what a step launches."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

FOLDER = Path(__file__).parent
# The versions of MLX on which the functions below were checked; see README.md.
KNOWN = ("0.32.4",)
JUMP_SIZE = 14
_ARRAYS = "std::vector<mlx::core::array, std::allocator<mlx::core::array> >"
# The functions of MLX that pretend.cpp replaces (gpu) or calls, with their arguments.
FUNCTIONS = {
    "gpu::eval": "mlx::core::array&",
    "gpu::finalize": "mlx::core::Stream",
    "gpu::new_stream": "mlx::core::Stream",
    "gpu::new_thread_unsafe_stream": "mlx::core::Stream",
    "gpu::synchronize": "mlx::core::Stream",
    "cpu::eval": "mlx::core::array&",
    "cpu::new_stream": "mlx::core::Stream",
    "cpu::new_thread_unsafe_stream": "mlx::core::Stream",
    "Compiled::eval_cpu": f"{_ARRAYS} const&, {_ARRAYS}&",
}


@dataclass(frozen=True)
class Launch:
    """A primitive that launches kernels, with the arrays as Metal would bind them.

    Attributes:
        primitive (str): Its name; ``"Compiled"`` for a fused kernel.
        count (int): Its launches: two for a large reduction, one for each array that
            is concatenated, otherwise one.
        bytes (int): What it reads and writes, each array once.
        elements (int): The size of its first output.
        buffers (int): Its inputs and outputs; for a fused kernel also the shape, the
            strides and the number of dimensions.
        inputs (list): The dtypes of its inputs without constants.
        outputs (list): The dtypes of its outputs.
    """

    primitive: str
    count: int
    bytes: int
    elements: int
    buffers: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_active() -> bool:
    """Return whether this process runs under the tool."""
    return hasattr(ctypes.CDLL(None), "as_on_gpu_record")


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Record what is evaluated inside the ``with`` block, and fill the list at its end.

    Evaluate the arguments before the block and the results inside it.
    """
    if not is_active():
        raise RuntimeError("Nothing is recorded. Use: python -m tools.as_on_gpu SCRIPT")
    library = ctypes.CDLL(None)
    library.as_on_gpu_records.restype = ctypes.c_char_p
    launches: list[Launch] = []
    library.as_on_gpu_record(True)
    try:
        yield launches
        launches += map(_parse, library.as_on_gpu_records().decode().splitlines())
    finally:
        library.as_on_gpu_record(False)


@contextmanager
def compiled_kernels() -> Iterator[None]:
    """Compile fused kernels with g++ instead of replaying them, if the tool is active.

    A replay keeps intermediate arrays, so only this shows how much memory a step takes.
    Fused kernels are not recorded.
    """
    switch = getattr(ctypes.CDLL(None), "as_on_gpu_compile", lambda on: None)
    switch(True)
    try:
        yield
    finally:
        switch(False)


def _parse(line: str) -> Launch:
    primitive, *numbers, inputs, outputs = line.split("\t")
    count, moved, elements, buffers = map(int, numbers)
    read, written = tuple(inputs.split()), tuple(outputs.split())
    return Launch(primitive, count, moved, elements, buffers, read, written)


def why_not() -> str | None:
    """Return the reason why this machine is not supported, or None."""
    here = platform.system(), platform.machine()
    if here != ("Linux", "x86_64"):
        return f"Only MLX for Linux on x86_64 can pretend to have a GPU, got {here}."
    return None


def build(folder: str | Path) -> Path:
    """Compile ``pretend.cpp`` against the installed wheel; return the library."""
    try:
        wheel = distribution("mlx-cpu")
    except PackageNotFoundError:
        sys.exit("MLX's CPU backend is not installed. Use: pip install 'mlx[cpu]'")
    if version("mlx") not in KNOWN:
        sys.exit(
            f"MLX {version('mlx')} is not among the versions that this tool knows "
            f"({', '.join(KNOWN)}). {FOLDER / 'README.md'} says what to check."
        )
    mlx = Path(str(wheel.locate_file("mlx")))
    library = Path(folder) / "as_on_gpu.so"
    defined = {"JUMP_SIZE": JUMP_SIZE, **offsets(mlx / "lib" / "libmlx.so")}
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    flags += [f"-D{name}={value:#x}" for name, value in defined.items()]
    flags += [f"-I{mlx / 'include'}", f"-L{mlx / 'lib'}", f"-Wl,-rpath,{mlx / 'lib'}"]
    source = str(FOLDER / "pretend.cpp")
    subprocess.run(["g++", *flags, source, "-o", str(library), "-lmlx"], check=True)
    return library


def offsets(libmlx: Path) -> dict[str, int]:
    """Return where each function starts in the library, as ``{"GPU_EVAL": 0x...}``."""
    command = ["nm", "--demangle", "--print-size", str(libmlx)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for name, arguments in FUNCTIONS.items():
        signature = f"mlx::core::{name}({arguments})"
        line = rf"^(\w+) (\w+) \w {re.escape(signature)}$"
        match = re.search(line, listing, re.MULTILINE)
        if match is None or int(match[2], 16) < JUMP_SIZE:
            sys.exit(f"{libmlx} has no {signature} of {JUMP_SIZE} bytes or more.")
        found[name.replace("::", "_").upper()] = int(match[1], 16)
    return found


def main(arguments: list[str]) -> int:
    """Run Python with the arguments, by default for the core's tests."""
    if reason := why_not():
        print(reason)
        return 0
    environment = dict(os.environ)
    paths = [str(FOLDER.parents[1]), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        environment["LD_PRELOAD"] = str(build(folder))
        command = [sys.executable, *(arguments or ["-m", "pytest", "-q", "-m", "core"])]
        return subprocess.run(command, env=environment).returncode
