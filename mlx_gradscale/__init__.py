"""Safe float16 training for MLX."""

from ._version import __version__

__all__ = ["__version__"]
