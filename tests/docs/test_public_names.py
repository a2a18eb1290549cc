"""The public names have docstrings, and importing them needs nothing optional."""

import subprocess
import sys
from importlib import import_module

import pytest

MODULES = (
    *("convert", "diagnostics", "distributed", "ema", "float32_layers", "formats"),
    *("plot", "torch_checkpoint"),
)


@pytest.mark.parametrize("module", ["mlx_gradscale", *MODULES])
def test_public_names_have_docstrings(module):
    if module != "mlx_gradscale":
        module = f"mlx_gradscale.{module}"
    found = import_module(module)
    for name in getattr(found, "__all__", ["EMA"]):
        value = getattr(found, name)
        assert name.startswith("__") or not callable(value) or value.__doc__, name


def test_importing_the_package_imports_nothing_optional():
    modules = ", ".join(f"mlx_gradscale.{name}" for name in MODULES)
    optional = ("torch", "matplotlib", "tqdm", "mlx_lm")
    code = f"import sys, {modules}; print([m for m in {optional} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert out.stdout.decode().strip() == "[]"
