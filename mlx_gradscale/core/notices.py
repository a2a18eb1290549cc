"""Show warnings at the user's own line, and warn about runs that do not train."""

import sys
import warnings

import mlx.core as mx

# Packages whose frames may come between the user's line and a warning.
_BETWEEN = ("mlx_gradscale.", "mlx.", "functools.", "contextlib.")
# A run that skips this many steps in a row is not training.
SKIPS_TO_WARN = 50
# At this scale a gradient of 1e-3 is the smallest that float16 can represent.
LOW_SCALE = 2.0**-14


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, pointing to the nearest caller outside this package and MLX."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


class WarnOnce:
    """Warn once per key."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, key: str, message: str) -> None:
        """Warn at the user's line unless there was a warning with this key."""
        if key not in self._warned:
            self._warned.add(key)
            warn_user(message)


class SkipWatch:
    """Warn about 50 skipped steps in a row, or about a very small scale.

    The watch reads only values that are at least 50 updates old. MLX has normally
    evaluated them by then, so nothing waits for the device.
    """

    def __init__(self) -> None:
        self._earlier: list[mx.array] = []
        self._latest: list[mx.array] = []

    def look(self, state: dict[str, mx.array], warn_once: WarnOnce) -> None:
        """Record the skip counter and, every 50 updates, check earlier values."""
        self._latest.append(state["consecutive_skips"])
        if len(self._latest) < SKIPS_TO_WARN:
            return
        earlier, self._earlier = self._earlier, [*self._latest, state["scale"]]
        self._latest = []
        try:
            *counts, scale = [float(x) for x in earlier] or [0.0, 1.0]
        except (RuntimeError, ValueError):  # a tracer from mx.compile
            return
        if max(counts) >= SKIPS_TO_WARN:
            warn_once(
                "skips",
                f"At least {SKIPS_TO_WARN} steps in a row were skipped because of "
                "non-finite gradients, so the model is not training. To find the "
                "cause, call mlx_gradscale.diagnostics.explain_overflow(model, "
                "loss_fn, *batch), with the same compute_dtype as in training.",
            )
        elif scale < LOW_SCALE:
            warn_once(
                "low scale",
                f"At a loss scale of {scale:.2g}, gradients below "
                f"{2.0**-25 / scale:.1g} underflow to zero in float16. If the loss "
                "itself is inf or NaN at times, a smaller scale does not help: filter "
                "out batches with NaN, or call explain_overflow() from mlx_gradscale."
                "diagnostics. GradScaler(min_scale=1.0) keeps the scale from falling "
                "this far, and scaler.update(65536.0) resets it.",
            )
