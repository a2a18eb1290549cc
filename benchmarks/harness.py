"""Helpers for the benchmarks: time variants in turn, and describe the machine."""

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

# A table: one dict per row, all with the same keys.
Rows = list[dict[str, Any]]
NO_TORCH: Rows = [{"note": "PyTorch is not installed: pip install -e '.[torch]'"}]
_KEPT_BYTES = 2**31 - 1


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 3,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, float]:
    """Time every variant once per round; return each variant's lower quartile.

    A slow phase of the machine then affects all variants, and the lower quartile
    excludes most slow rounds.

    Args:
        runs (dict): The variants, as functions that return when their work is done.
        rounds (int): How many times each variant is timed.
        warm_up (int): Number of untimed calls per variant, to compile and fill caches.
        before (Callable): Called with a variant's name before each call, untimed.
    """
    for name, run in runs.items():
        for _ in range(warm_up):
            before(name)
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                before(name)
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return {name: lower_quartile(values) for name, values in seconds.items()}


def lower_quartile(values: list[float]) -> float:
    """Return the lower quartile of the values; of one value, the value itself."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def keep_freed_memory() -> None:
    """Let MLX's and PyTorch's allocators keep freed memory, as on Metal.

    On a CPU, MLX caches 32 MB, and malloc returns large arrays to the system. In some
    runs, a step with 8 M parameters then has 7,600 page faults and takes 43 ms instead
    of 25 ms.
    """
    mx.set_cache_limit(2 * _KEPT_BYTES)
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, _KEPT_BYTES)
        mallopt(mmap_threshold, 2**24)


def release_memory() -> None:
    """Release the memory of the last case, so that all cases start alike."""
    gc.collect()
    mx.clear_cache()


def describe_machine() -> dict[str, Any]:
    """Return the device, the number of cores, the system and the installed versions."""
    kind = "Metal" if mx.metal.is_available() else "CPU"
    found = {
        "device": f"{mx.device_info().get('device_name', 'unknown')}, {kind}",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in ("mlx", "torch", "mlx_gradscale"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
