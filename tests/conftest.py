"""What every test starts from."""

import argparse
import os
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from tools import as_on_gpu

# Times are no part of any test here, and the machine may be busy.
slow = [HealthCheck.too_slow]
settings.register_profile("mlx", deadline=None, suppress_health_check=slow)
settings.load_profile("mlx")

TESTS = Path(__file__).parent
CORE = {TESTS / "core", TESTS.parent / "mlx_gradscale" / "core"}
# What MLX's compiler makes of a step, and third-party software: run only if named.
APART = {TESTS / "performance", TESTS / "interop"}
# What a step launches on a GPU. python -m tools.as_on_gpu adds these tests to the core.
(CORE if as_on_gpu.is_active() else APART).add(TESTS / "as_on_gpu")
# These files take half a minute each, and are marked as slow. They start first, so that
# no worker ends long after the others.
SLOW = {"test_skip_matrix", "test_distributed", "test_examples", "test_mlx_lm"}
SLOW |= {"test_lora", "test_layers_mlx_lm"}
# Options that choose some tests, or that want to see them in this process.
HERE = "keyword", "lf", "failedfirst", "usepdb", "trace", "collectonly"


def pytest_addoption(parser):
    parser.addoption(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="use mx.compile in every test, which is the default on a GPU, or only in "
        "the tests that need it, which is the default on a CPU",
    )


def compiles_everything(config):
    chosen = config.getoption("--compile")
    return mx.default_device() == mx.Device(mx.gpu) if chosen is None else chosen


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share the whole suite out among processes, if pytest-xdist is there.

    A few files start faster in one. `-n` decides otherwise.
    """
    options = config.option
    whole = config.args_source == config.ArgsSource.TESTPATHS
    if (
        config.pluginmanager.hasplugin("xdist")
        and options.numprocesses is None
        and not hasattr(config, "workerinput")
        and (whole or options.markexpr or len(config.args) > 4)
        and not any(getattr(options, name, None) for name in HERE)
        and options.capture != "no"
    ):
        # More would compete for memory, or for the one GPU.
        options.numprocesses = min(4, os.cpu_count() or 1)
        # The tests of a file share models and kernels.
        options.dist = "loadfile"
        options.loadscopereorder = False


def pytest_ignore_collect(collection_path, config):
    """Look for doctests in the package alone: helpers may need PyTorch or mlx-lm."""
    whole = config.args_source == config.ArgsSource.TESTPATHS
    if whole and collection_path in APART:
        return True
    if whole and config.option.markexpr.startswith("core"):
        # The others import PyTorch and mlx-lm.
        around = {collection_path, *collection_path.parents}
        if not any(core in around or collection_path in core.parents for core in CORE):
            return True
    is_helper = not collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and is_helper else None


def pytest_collection_modifyitems(items):
    """Mark what ``pytest -m core`` runs: the core's tests and its doctests."""
    items.sort(key=lambda item: item.path.stem not in SLOW)
    for item in items:
        folders = set(item.path.parents)
        many = item.get_closest_marker("many_kernels") and not as_on_gpu.is_active()
        if CORE & folders and not many:
            item.add_marker("core")
        if APART & folders:
            item.add_marker("compiles")
        if item.path.stem in SLOW:
            item.add_marker("slow")


def pytest_configure(config):
    # Tests start hundreds of Pythons, which need not compile the package each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # MLX does not lock its folder of kernels: each worker keeps one of its own.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    checkout = zlib.crc32(str(TESTS).encode())
    name = f"mlx_gradscale_tests_{os.getuid()}_{checkout}_{worker}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    _use_compile(compiles_everything(config))


def _use_compile(on):
    """Turn mx.compile on or off, here and in the processes that a test starts."""
    if on:
        os.environ.pop("MLX_DISABLE_COMPILE", None)
        mx.enable_compile()
    else:
        os.environ["MLX_DISABLE_COMPILE"] = "1"
        mx.disable_compile()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """On a CPU, compile only where a test needs it: g++ takes a second per kernel."""
    everything = compiles_everything(item.config)
    _use_compile(everything or item.get_closest_marker("compiles") is not None)
    result = yield
    _use_compile(everything)
    return result


def pytest_make_parametrize_id(val):
    return str(val).removeprefix("mlx.core.") if isinstance(val, mx.Dtype) else None


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)
