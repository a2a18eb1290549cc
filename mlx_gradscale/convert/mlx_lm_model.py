"""The model of mlx-lm that a ``config.json`` describes, without its weights."""

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..files.locks import open_file

_LARGEST_CONFIG = 2**22


def mlx_lm_model(path: Path) -> nn.Module:
    """Make the model of mlx-lm, whose ``sanitize`` gives names and layouts.

    Nothing in the folder is executed: a ``model_file`` of its own is refused.

    Args:
        path (Path): A model's folder, or its ``config.json``.
    """
    config = _read(path / "config.json" if path.is_dir() else path)
    kind = config.get("model_type")
    if "model_file" in config or not (isinstance(kind, str) and _is_plain(kind)):
        raise ValueError(
            f"{path} needs code of its own, or names no model_type: give the model as "
            "MODULE:NAME."
        )
    try:
        from mlx_lm.utils import _get_classes
    except ImportError as error:
        raise ImportError(
            "A model by its config needs mlx-lm: pip install mlx-lm."
        ) from error
    try:
        model_class, arguments_class = _get_classes(config)
        model: nn.Module = model_class(arguments_class.from_dict(config))
        return model
    except Exception as error:  # a config may be wrong in any way
        kind = type(error).__name__
        raise ValueError(f"--model {path}: mlx-lm raised {kind}: {error}") from error


def _is_plain(name: str) -> bool:
    return name.replace("-", "_").replace(".", "_").isidentifier() and ".." not in name


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"--model: there is no {path}.")
    try:
        with open(path, "rb", opener=open_file) as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model: {path} is no model's config.")
    return config
