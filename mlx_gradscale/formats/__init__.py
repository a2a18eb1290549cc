"""Scaler states of other frameworks, as one table of keys.

Every format is read into PyTorch's five keys, plus this package's own keys
(``backoff_interval``, ``dynamic``, ``min_scale`` and so on) where the format has
more to say. What a format cannot carry is named in a :class:`FormatWarning`,
never lost silently.
"""

from ..scale import TORCH_KEYS
from .flodl import load_flodl, save_flodl
from .state import FormatWarning, read_state, recognise, write_state
from .table import FORMATS, OWN_DEFAULTS, Format

__all__ = [
    "FORMATS",
    "OWN_DEFAULTS",
    "TORCH_KEYS",
    "Format",
    "FormatWarning",
    "load_flodl",
    "read_state",
    "recognise",
    "save_flodl",
    "write_state",
]
