"""Float32 islands: layers of a half-precision model that compute in float32."""

from .calls import float32_gradients
from .file import load_float32_layers, save_float32_layers
from .layers import (
    Float32Layers,
    float32_layers,
    kept_in_float32,
    list_float32_layers,
    remove_float32_layers,
)

__all__ = [
    "Float32Layers",
    "float32_gradients",
    "float32_layers",
    "kept_in_float32",
    "list_float32_layers",
    "load_float32_layers",
    "remove_float32_layers",
    "save_float32_layers",
]
