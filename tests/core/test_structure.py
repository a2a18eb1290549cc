"""The core stands alone, imports in one direction, and knows MLX in one place."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import mlx.optimizers as optim
import pytest

import mlx_gradscale.core
from mlx_gradscale import GradScaler
from mlx_gradscale.core import optimizers

CORE = Path(mlx_gradscale.core.__file__).parent
FILES = sorted(path for path in CORE.glob("*.py") if path.stem != "__init__")
# Attributes of MLX's optimizers that MLX does not document.
PRIVATE = {"_schedulers", "_initialized", "_split_dictionary"}
ORDER = (
    *("trees", "fusion", "masters", "eight_bit"),
    *("notices", "scale", "finite"),
    *("intercept", "forward"),
    *("gradients", "optimizers", "ranks", "guard", "scaler", "state"),
    "optimizer",
)
# The only imports from outside the core. They are inside GradScaler.save and load.
OUTSIDE = {
    "scaler": {
        ("save", "mlx_gradscale.state_files.save_state"),
        ("load", "mlx_gradscale.state_files.load_state"),
    }
}


def imports(path):
    """Yield the function, or None, and the name of each import from this package."""
    tree = ast.parse(path.read_text())
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    inside = {child: x.name for x in functions for child in ast.walk(x)}
    for node in ast.walk(tree):
        module = ""
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, "mlx_gradscale.core") + "."
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (module + alias.name).split(".")[0] == "mlx_gradscale":
                    yield inside.get(node), module + alias.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_core_imports_in_one_direction_and_nothing_from_outside(path):
    below = [["mlx_gradscale", "core", x] for x in ORDER[: ORDER.index(path.stem)]]
    found = {x for x in imports(path) if x[1].split(".")[:3] not in below}
    assert found == OUTSIDE.get(path.stem, set())


IMPORT_ALONE = """
import sys, types
package = sys.modules["mlx_gradscale"] = types.ModuleType("mlx_gradscale")
package.__path__ = [sys.argv[1]]
import mlx_gradscale.core.optimizer, mlx_gradscale.core.scaler
print(*(name for name in sys.modules if name.startswith("mlx_gradscale.")))
"""


def test_importing_the_core_alone_imports_every_file_of_it_and_no_other():
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALONE, str(CORE.parent)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    core = "mlx_gradscale.core"
    assert {*ended.stdout.split()} == {core, *(f"{core}.{x.stem}" for x in FILES)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_optimizers_py_uses_private_attributes_of_mlx(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            # A LossScaleOptimizer is an Optimizer and sets its own attributes.
            if not (path.name == "optimizer.py" and of_self):
                found.add(node.attr)
    assert found & PRIVATE == (PRIVATE if path.name == "optimizers.py" else set())


def test_installed_mlx_has_the_private_attributes_that_optimizers_py_uses():
    private = {name for name in vars(optim.AdamW(1e-3)) if name.startswith("_")}
    assert private == set(optimizers._NOT_SETTINGS)
    assert PRIVATE - {"_split_dictionary"} <= private
    assert hasattr(optim.MultiOptimizer, "_split_dictionary")


def test_scaler_has_about_thirty_public_names_with_docstrings():
    names = [name for name in dir(GradScaler) if not name.startswith("_")]
    assert len(names) <= 32
    assert all(getattr(GradScaler, name).__doc__ for name in names)
