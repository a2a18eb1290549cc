"""What stands in for g++ while tests run makes the same kernels (kernel_store.py)."""

import os
import platform
import subprocess
from pathlib import Path

import kernel_store
import pytest

FRONT = kernel_store.FRONT / "g++"
# As MLX calls it.
FLAGS = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-shared"]
VECTORS = ["-mavx2", "-mfma", "-mf16c"] if platform.machine() == "x86_64" else []
KERNEL = """#include "mlx/backend/cpu/compiled_preamble.h"
using namespace mlx::core;
using namespace mlx::core::detail;
extern "C" void kernel(int size, float16_t* x, float* y) {
  for (int i = 0; i < size; ++i) {
    y[i] = Add()(Sigmoid()(static_cast<float>(x[i])), 1.0f);
  }
}
"""

pytestmark = pytest.mark.skipif(
    "KERNEL_STORE" not in os.environ,
    reason="MLX compiles its kernels for itself on this machine.",
)


@pytest.fixture
def compile_kernel(tmp_path):
    """A function that has a source compiled, with an empty store of kernels."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "headers").symlink_to(Path(os.environ["KERNEL_STORE"], "headers"))
    (tmp_path / "kernel.cpp").write_text(KERNEL)

    def compile_with(compiler, output, flags=FLAGS, **environment):
        headers = ["-I", os.environ["KERNEL_HEADERS"]]
        files = [tmp_path / "kernel.cpp", "-o", tmp_path / output]
        code = subprocess.run(
            [compiler, *flags, *headers, *VECTORS, *files],
            env={**os.environ, "KERNEL_STORE": str(store), **environment},
            stderr=subprocess.DEVNULL,
        ).returncode
        kept = len([path for path in store.iterdir() if path.name != "headers"])
        return code, kept

    return compile_with


def test_a_kernel_is_that_of_the_compiler_byte_for_byte(compile_kernel, tmp_path):
    assert compile_kernel(os.environ["KERNEL_COMPILER"], "theirs.so") == (0, 0)
    assert compile_kernel(FRONT, "ours.so") == (0, 1)
    ours = (tmp_path / "ours.so").read_bytes()
    assert ours == (tmp_path / "theirs.so").read_bytes()

    # A second time without a compiler.
    assert compile_kernel(FRONT, "again.so", KERNEL_COMPILER="false") == (0, 1)
    assert (tmp_path / "again.so").read_bytes() == ours
    # Other flags or another source are another kernel.
    fewer = [flag for flag in FLAGS if flag != "-O3"]
    assert compile_kernel(FRONT, "b.so", fewer, KERNEL_COMPILER="false") == (1, 1)
    (tmp_path / "kernel.cpp").write_text(KERNEL.replace("1.0f", "2.0f"))
    assert compile_kernel(FRONT, "c.so", KERNEL_COMPILER="false") == (1, 1)
    assert not (tmp_path / "b.so").exists()
    assert not (tmp_path / "c.so").exists()


def test_a_kernel_with_its_headers_in_it_is_kept_too(tmp_path):
    # As MLX before 0.32 writes it, where no folder of headers is named.
    folder, store = tmp_path / "mlx" / "0.31.2" / "cpu", tmp_path / "store"
    folder.mkdir(parents=True)
    store.mkdir()
    (folder / "kernel.cpp").write_text('extern "C" int kernel(int x) { return x; }')

    def compile_to(compiler, name, **environment):
        files = [folder / "kernel.cpp", "-o", folder / name]
        return subprocess.run(
            [compiler, *FLAGS, *files],
            env={**os.environ, "KERNEL_STORE": str(store), **environment},
        ).returncode

    assert compile_to(os.environ["KERNEL_COMPILER"], "theirs.so") == 0
    assert compile_to(FRONT, "ours.so") == 0
    assert compile_to(FRONT, "again.so", KERNEL_COMPILER="false") == 0
    for name in ("ours.so", "again.so"):
        assert (folder / name).read_bytes() == (folder / "theirs.so").read_bytes()
    assert len(list(store.iterdir())) == 1


def test_a_kernel_that_does_not_compile_is_an_error_and_leaves_nothing(
    compile_kernel, tmp_path
):
    (tmp_path / "kernel.cpp").write_text(KERNEL.replace("Sigmoid", "Missing"))
    assert compile_kernel(FRONT, "kernel.so") == (1, 0)
    assert not (tmp_path / "kernel.so").exists()


def test_what_is_no_kernel_of_this_mlx_goes_to_the_compiler(compile_kernel, tmp_path):
    arguments = ["-c", "other.cpp", "-o", "other.o"]
    echoed = subprocess.run(
        [FRONT, *arguments],
        env={**os.environ, "KERNEL_COMPILER": "echo"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    assert echoed.split() == arguments
    assert compile_kernel(FRONT, "d.so", KERNEL_HEADERS=str(tmp_path)) == (0, 0)
    assert (tmp_path / "d.so").exists()
