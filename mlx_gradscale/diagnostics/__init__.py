"""Inspect a run: overflows, gradients, dtypes, and the history of the scale.

Nothing in this package adds any cost unless you call it.
"""

from .calibrate import calibrate
from .callback import LossScaleCallback
from .compute_dtypes import DtypeReport, LayerDtypes, compute_dtypes
from .explain import OverflowReport, explain_overflow
from .histogram import GradientHistogram, Shares, gradient_histogram
from .history import ScaleHistory, ScaleRecord

__all__ = [
    "DtypeReport",
    "GradientHistogram",
    "LayerDtypes",
    "LossScaleCallback",
    "OverflowReport",
    "ScaleHistory",
    "ScaleRecord",
    "Shares",
    "calibrate",
    "compute_dtypes",
    "explain_overflow",
    "gradient_histogram",
]
