"""Importing the public modules imports nothing optional."""

import subprocess
import sys

MODULES = (
    *("convert", "diagnostics", "distributed", "ema", "float32", "formats"),
    *("plot", "torch_checkpoint"),
)


def test_importing_the_package_imports_nothing_optional():
    modules = ", ".join(f"mlx_gradscale.{name}" for name in MODULES)
    optional = ("torch", "matplotlib", "tqdm", "mlx_lm")
    code = f"import sys, {modules}; print([m for m in {optional} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert out.stdout.decode().strip() == "[]"
