"""Diagnose a training run: overflows, gradients, dtypes and the loss scale over time.

Training does not slow down unless you call a function of this package.
"""

from .calibrate import calibrate
from .callback import LossScaleCallback
from .compute_dtypes import compute_dtypes
from .explain import explain_overflow
from .histogram import gradient_histogram
from .history import ScaleHistory
from .nonfinite_leaves import nonfinite
from .rounding import lost_updates

__all__ = [
    "LossScaleCallback",
    "ScaleHistory",
    "calibrate",
    "compute_dtypes",
    "explain_overflow",
    "gradient_histogram",
    "lost_updates",
    "nonfinite",
]
