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


def pytest_ignore_collect(collection_path):
    """Look for doctests in the package alone: helpers may need PyTorch or mlx-lm."""
    is_helper = not collection_path.name.startswith("test_")
    return True if collection_path.suffix == ".py" and is_helper else None


def pytest_configure(config):
    # Tests start many Pythons: not each is to compile the package again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # MLX's CPU backend keeps compiled kernels in the temporary folder and locks
    # nothing, so each process gets a folder of its own, which stays for the next run.
    checkout = zlib.crc32(str(config.rootpath).encode())
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    shared = os.environ.setdefault("TEST_KERNELS", tempfile.gettempdir())
    folder = Path(shared) / f"mlx_gradscale_kernels_{checkout}" / worker
    folder.mkdir(parents=True, exist_ok=True)
    # Python's own temporary folder is the one that it found above.
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
