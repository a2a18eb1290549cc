"""Layers that compute in float32, if this version of the package has them."""

from pathlib import Path

import mlx.nn as nn

import mlx_gradscale


def compute_in_float32(model: nn.Module, path: Path | None) -> None:
    """Let the layers that a file names compute in float32.

    Args:
        model (nn.Module): Is changed in place.
        path (Path, optional): The ``.json`` file; None changes nothing.

    Raises:
        ImportError: This version has no ``float32_layers``.
    """
    if path is None:
        return
    float32_layers = getattr(mlx_gradscale, "float32_layers", None)
    if float32_layers is None:
        raise ImportError(
            f"mlx_gradscale {mlx_gradscale.__version__} has no float32_layers: update "
            "it, or leave out --float32-layers."
        )
    float32_layers(model, path)
