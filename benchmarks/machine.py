"""The machine that numbers belong to, and its memory made even for both sides."""

import ctypes
import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

# MLX runs a stream of the CPU on one thread; PyTorch is set to the same number.
THREADS = 1
# What decides on a CPU whether a loop over float16 is vector code.
_VECTOR_UNITS = ("avx2", "avx512f", "avx512_fp16", "f16c", "asimd", "asimdhp", "sve")
_KEPT_BYTES = 2**31 - 1


def describe() -> dict[str, Any]:
    """Return processor, cores, threads, system and versions."""
    found = {
        "processor": processor(),
        "vector units": vector_units(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "load when it began": round(os.getloadavg()[0], 1),
        "device": "Metal" if mx.metal.is_available() else mx.default_device().type.name,
        "system": system(),
        "compiler of the kernels": _compiler(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    versions = {x: _version(x) for x in ("mlx", "numpy", "torch", "mlx_gradscale")}
    return {k: v for k, v in (found | versions).items() if v not in (None, "")}


def in_a_line(machine: dict[str, Any]) -> str:
    """Return what goes under every picture and table."""
    units = machine.get("vector units")
    torch = f", PyTorch {machine['torch']}" if "torch" in machine else ""
    plural = "" if machine["threads"] == 1 else "s"
    return ", ".join(
        [
            machine["processor"] + (f" ({units})" if units else ""),
            f"{machine['cores']} cores, {machine['threads']} thread{plural}",
            f"MLX {machine['mlx']} ({machine['device']}){torch}",
            machine["system"],
            machine["date"],
        ]
    )


def processor() -> str:
    """Return the processor's name, as precisely as the system tells it."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    name = _cpu("model name") or platform.processor() or platform.machine()
    # A virtual machine may hide the number in the name, but not the family.
    family, model = _cpu("cpu family"), _cpu("model")
    return f"{name}, family {family} model {model}" if family and model else name


def vector_units() -> str:
    """Return those that matter to float16, where the system tells."""
    found = (_cpu("flags") or _cpu("Features")).split()
    return " ".join(x for x in _VECTOR_UNITS if x in found)


def system() -> str:
    """Return the name of the operating system."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def keep_freed_memory() -> None:
    """Let both allocators keep what is freed, as Metal's does by itself.

    MLX's on the CPU keeps 32 MB, and PyTorch's is malloc, which gives arrays of some
    MB back to the system. A step of 8 M parameters then faults 7,600 pages in again,
    in some runs and not in others: 25 ms or 43 ms for the same work.
    """
    mx.set_cache_limit(2 * _KEPT_BYTES)
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, _KEPT_BYTES)
        mallopt(mmap_threshold, 2**24)


def _cpu(field: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""


def _compiler() -> str:
    if mx.metal.is_available() or not shutil.which("g++"):
        return ""
    return _output("g++", "--version").partition("\n")[0]


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
