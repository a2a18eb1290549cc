"""The core imports nothing of the package outside of it, and trains alone."""

import ast
import subprocess
import sys
from pathlib import Path

import mlx_gradscale.core

CORE = Path(mlx_gradscale.core.__file__).parent
ROOT = CORE.parents[1]


def imported(path):
    """The modules of the package that a file imports when it is imported."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *filter(None, (node.module or "").split(".")))
            if base[:1] == ("mlx_gradscale",):
                yield from (base, *((*base, alias.name) for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)


def closure(*start):
    found, waiting = set(), list(start)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in imported(path):
            place = ROOT.joinpath(*name)
            files = place.with_suffix(".py"), place / "__init__.py"
            waiting += [file for file in files if file.exists()]
    return {path.relative_to(ROOT / "mlx_gradscale").as_posix() for path in found}


def test_scaler_and_optimizer_import_the_core_files_and_nothing_else():
    found = closure(CORE / "scaler.py", CORE / "optimizer.py")
    there = {f"core/{path.name}" for path in CORE.glob("*.py")}
    assert found - {"core/__init__.py"} == there - {"core/__init__.py"}


def test_the_core_imports_in_one_direction():
    order = [
        "notices",
        "trees",
        "scale",
        "finite",
        "masters",
        "gradients",
        "optimizers",
        "ranks",
        "guard",
        "scaler",
        "optimizer",
    ]
    for path in sorted(CORE.glob("*.py")):
        if path.stem == "__init__":
            continue
        below = order[: order.index(path.stem)]
        names = [name for name in imported(path) if name[:2] == CORE.parts[-2:]]
        own = {name[2] for name in names if len(name) > 2}
        own &= {other.stem for other in CORE.glob("*.py")}
        assert own <= set(below), path.name


TRAIN_ALONE = """
import sys, types, importlib.abc
root = sys.argv[1]

class OnlyCore(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("mlx_gradscale.") and not name.startswith(
            "mlx_gradscale.core"
        ):
            raise ImportError(name)

sys.meta_path.insert(0, OnlyCore())
package = types.ModuleType("mlx_gradscale")
package.__path__ = [root + "/mlx_gradscale"]
sys.modules["mlx_gradscale"] = package

import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
mx.disable_compile()
from mlx_gradscale.core.optimizer import LossScaleOptimizer
from mlx_gradscale.core.scaler import GradScaler

model = nn.Linear(4, 1)
model.set_dtype(mx.float16)
optimizer = LossScaleOptimizer(optim.AdamW(1e-2), GradScaler(2.0**30))
loss_and_grad = optimizer.value_and_grad(
    model, lambda x: mx.square(model(x).astype(mx.float32)).mean()
)
for _ in range(20):
    loss, grads = loss_and_grad(mx.ones((8, 4), mx.float16))
    optimizer.update(model, grads)
scaler = optimizer.scaler
assert scaler.skipped_steps.item() > 0 and scaler.last_step_applied.item()
scaler.load_state_dict(scaler.state_dict())
print(sorted(name for name in sys.modules if name.startswith("mlx_gradscale.")))
"""


def test_the_core_trains_with_the_rest_of_the_package_removed():
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAIN_ALONE, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert all(".core" in name for name in ast.literal_eval(ended.stdout))
