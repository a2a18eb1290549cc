"""What every test starts from."""

import os
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import settings

# Times are no part of any test here, and the machine may be busy.
settings.register_profile("mlx", deadline=None)
settings.load_profile("mlx")

TESTS = Path(__file__).parent
CORE = {TESTS / "core", TESTS.parent / "mlx_gradscale" / "core"}
# Options that choose some tests, or that want to see them in this process.
HERE = "keyword", "lf", "failedfirst", "usepdb", "trace", "collectonly"


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
        # The tests of a file share models and kernels. As they are ordered, the short
        # files are last, so that nobody waits long for the other.
        options.dist = "loadfile"
        options.loadscopereorder = False


def pytest_ignore_collect(collection_path, config):
    """Look for doctests in the package alone: helpers may need PyTorch or mlx-lm.

    Tests of what MLX's compiler makes of a step run only where they are named.
    """
    whole = config.args_source == config.ArgsSource.TESTPATHS
    if whole and collection_path == TESTS / "performance":
        return True
    is_helper = not collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and is_helper else None


def pytest_collection_modifyitems(items):
    """Mark what ``pytest -m core`` runs: the core's tests and its doctests."""
    for item in items:
        many = item.get_closest_marker("many_kernels")
        if CORE & set(item.path.parents) and not many:
            item.add_marker("core")


def pytest_configure():
    # Tests start hundreds of Pythons, which need not compile the package each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # MLX does not lock its folder of kernels: each worker keeps one of its own.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    checkout = zlib.crc32(str(TESTS).encode())
    name = f"mlx_gradscale_tests_{os.getuid()}_{checkout}_{worker}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)


@pytest.fixture
def without_compile():
    """Run without ``mx.compile``: compiling a kernel takes most of a second."""
    mx.disable_compile()
    yield
    mx.enable_compile()
