"""Half-precision training for MLX: master weights, loss scaling, PyTorch runs."""

import importlib
from types import ModuleType

try:
    import mlx.core  # noqa: F401
except ImportError as error:
    # On Linux, the plain mlx wheel does not include a backend.
    raise ImportError(
        f'Cannot import MLX ({error}). On a Mac, run "pip install mlx". On Linux, '
        "choose a backend: pip install 'mlx[cpu]' (or [cuda12], [cuda13])."
    ) from error

from ._version import __version__
from .checkpoint import restore_checkpoint, save_checkpoint
from .compile_step import compile_step
from .core.finite import all_finite
from .core.optimizer import LossScaleOptimizer, MasterWeightOptimizer
from .core.scaler import GradScaler
from .float32 import find_float32_layers, float32_layers
from .grad_checkpoint import grad_checkpoint

__all__ = [
    "GradScaler",
    "LossScaleOptimizer",
    "MasterWeightOptimizer",
    "__version__",
    "all_finite",
    "compile_step",
    "find_float32_layers",
    "float32_layers",
    "grad_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
]

# Imported on first use, so that ``import mlx_gradscale`` stays fast.
_MODULES = {
    *("convert", "diagnostics", "distributed"),
    *("ema", "plot", "torch_checkpoint"),
}


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
