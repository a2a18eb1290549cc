"""What the numbers look like: overflow reports, histograms and histories."""

from .alarm import SkipAlarm, SkippedStepsError, SkippedStepsWarning, check_skips
from .callback import LossScaleCallback
from .compute_dtypes import DtypeReport, compute_dtypes
from .explain import OverflowReport, explain_overflow
from .histogram import GradientHistogram, Shares, gradient_histogram
from .history import ScaleHistory
from .overflow import overflow_table
from .records import ScaleRecord

__all__ = [
    "DtypeReport",
    "GradientHistogram",
    "LossScaleCallback",
    "OverflowReport",
    "ScaleHistory",
    "ScaleRecord",
    "Shares",
    "SkipAlarm",
    "SkippedStepsError",
    "SkippedStepsWarning",
    "check_skips",
    "compute_dtypes",
    "explain_overflow",
    "gradient_histogram",
    "overflow_table",
]
