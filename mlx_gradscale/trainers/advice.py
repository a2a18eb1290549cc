"""Find the first loss scale of a trainer, and describe runs that do not train."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..core.notices import LOW_SCALE
from ..core.scaler import GradScaler
from ..diagnostics.calibrate import NoScaleFits, calibrate
from ..files.text import plural

EXPLAIN = "To find the cause, call mlx_gradscale.diagnostics.explain_overflow()."


def find_first_scale(
    scaler: GradScaler,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Any,
    remedy: str,
    dtype: mx.Dtype | None = None,
) -> str:
    """Find a loss scale of at most 65536 on the first batch, to skip fewer steps.

    One run of 42 steps skipped 13 when it started from a scale of 65536. If the loss or
    the gradients are non-finite at every scale, the scale does not change, and the
    returned warning ends with ``remedy``. Without a problem, return "".
    """
    try:
        # Leave room for gradients to grow by a factor of 64. With a factor of four,
        # normalizing_flow of mlx-examples skipped its steepest steps and diverged:
        # after 100 steps, its loss was 11 percent above float32, not 0.2 percent.
        scale = calibrate(
            scaler, model, loss_fn, *batch, compute_dtype=dtype, headroom=6
        )
    except NoScaleFits:
        return (
            "The loss or the gradients of the first batch are non-finite at every loss "
            f"scale. {remedy}"
        )
    except ValueError:
        return ""  # The loss function fails, so the trainer's own call will, too.
    scaler.update(min(scale, 2.0**16))
    if scale >= LOW_SCALE:
        return ""
    return (
        "With a safety margin, the gradients of the first batch fit into float16 only "
        f"at a loss scale of {scale:.2g}, where small gradients underflow to zero. "
        "Compute in bfloat16 or float32 instead."
    )


def describe_skips(name: str, n_applied: Any, scaler: GradScaler) -> str:
    """Describe a run that skipped most or the last ten of its steps, or return ""."""
    counts = n_applied, scaler.skipped_steps, scaler.consecutive_skips
    applied, skipped, in_a_row = map(int, counts)
    if skipped <= applied and in_a_row < 10:
        return ""
    start = "" if applied else "The model was not trained: "
    last = f", including the last {in_a_row}," if in_a_row and applied else ""
    total = plural(applied + skipped, "step")
    return (
        f"{start}{name} skipped {skipped:,} of {total}{last} because of non-finite "
        "gradients."
    )
