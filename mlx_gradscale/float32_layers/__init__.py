"""Find and set the layers of a half-precision model that compute in float32."""

from .layers import Float32Layers, float32_layers, list_float32_layers
from .report import Float32Search, Row
from .search import find_float32_layers
from .where import load_float32_layers, save_float32_layers

__all__ = [
    "Float32Layers",
    "Float32Search",
    "Row",
    "find_float32_layers",
    "float32_layers",
    "list_float32_layers",
    "load_float32_layers",
    "save_float32_layers",
]
