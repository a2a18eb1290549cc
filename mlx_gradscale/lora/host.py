"""mlx-lm, as far as ``mlx_gradscale.lora`` relies on it, or a clear sentence."""

import importlib
import inspect
from importlib import metadata
from types import ModuleType

#: The versions that the tests ran with.
TESTED = ("0.32.2",)

_INSTALL = f"pip install mlx-lm=={TESTED[-1]}"
CHANGED = (
    "This mlx-lm has changed too much for mlx_gradscale.lora, which was tested with "
    f"{', '.join(TESTED)}: {_INSTALL}"
)
_COMMAND = ("main", "build_parser", "run", "load", "train", "evaluate")
_TRAIN = {
    "model",
    "optimizer",
    "train_dataset",
    "val_dataset",
    "args",
    "loss",
    "iterate_batches",
    "training_callback",
}
_BATCHES = {"dataset", "batch_size", "max_seq_length", "loop", "comm_group"}


def command() -> ModuleType:
    """Return ``mlx_lm.lora``, or raise an ``ImportError`` that says what to install."""
    module = _import("mlx_lm.lora")
    lacking = [name for name in _COMMAND if not callable(getattr(module, name, None))]
    if lacking:
        raise ImportError(f"{CHANGED} (mlx_lm.lora has no {', '.join(lacking)})")
    trainer()
    return module


def trainer() -> ModuleType:
    """Return ``mlx_lm.tuner.trainer``, or raise as :func:`command`."""
    module = _import("mlx_lm.tuner.trainer")
    needed = {"train": _TRAIN, "iterate_batches": _BATCHES, "default_loss": set()}
    for name, arguments in needed.items():
        function = getattr(module, name, None)
        if function is None:
            raise ImportError(f"{CHANGED} (its trainer has no {name})")
        lacking = sorted(arguments - inspect.signature(function).parameters.keys())
        if lacking:
            raise ImportError(f"{CHANGED} ({name} takes no {', '.join(lacking)})")
    return module


def version() -> str:
    """Return the version that is installed."""
    return metadata.version("mlx-lm")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "mlx_lm":
            raise ImportError(
                f"There is no mlx-lm, whose trainer this runs: {_INSTALL}"
            ) from None
        if error.name and error.name.startswith("mlx_lm."):
            raise ImportError(f"{CHANGED} (there is no {error.name})") from None
        raise
