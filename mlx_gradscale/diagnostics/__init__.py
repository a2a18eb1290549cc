"""Diagnose a training run: overflows, gradients, dtypes and the loss scale over time.

Training does not slow down unless you call a function of this package.
"""

from .calibrate import calibrate
from .callback import LossScaleCallback
from .compute_dtypes import DtypeReport, LayerDtypes, compute_dtypes
from .explain import OverflowReport, explain_overflow
from .histogram import GradientHistogram, Shares, gradient_histogram
from .history import ScaleHistory, ScaleRecord
from .lost_updates import LostUpdates, lost_updates

__all__ = [
    "DtypeReport",
    "GradientHistogram",
    "LayerDtypes",
    "LossScaleCallback",
    "LostUpdates",
    "OverflowReport",
    "ScaleHistory",
    "ScaleRecord",
    "Shares",
    "calibrate",
    "compute_dtypes",
    "explain_overflow",
    "gradient_histogram",
    "lost_updates",
]
