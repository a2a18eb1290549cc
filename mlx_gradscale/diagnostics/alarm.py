"""Say so when every step is skipped, where the user reads from the device anyway."""

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..files.text import power
from ..finite import NonFinite, nonfinite
from ..notices import warn_user
from ..state_tree import flatten
from ..tracing import evaluate_unless_traced
from .overflow import overflow_table
from .reading import scaler_of

_ACTIONS = ("warn", "raise")


class SkippedStepsWarning(UserWarning):
    """Many steps in a row were skipped.

    Example:
        >>> import warnings
        >>> from mlx_gradscale.diagnostics import SkipAlarm, SkippedStepsWarning
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", SkippedStepsWarning)
        ...     SkipAlarm(limit=50).check(50, scale=2.0**-34)
        >>> len(caught)
        1
    """


class SkippedStepsError(RuntimeError):
    """Many steps in a row were skipped, and the user asked for an error.

    Example:
        >>> from mlx_gradscale.diagnostics import SkipAlarm, SkippedStepsError
        >>> try:
        ...     SkipAlarm(limit=50, action="raise").check(50, scale=2.0**-34)
        ... except SkippedStepsError as error:
        ...     print(str(error).splitlines()[0].partition(":")[0])
        50 steps in a row were skipped
    """


class SkipAlarm:
    """Warn, or raise, after so many skipped steps in a row.

    A scaler has one as its ``skip_alarm``: set another, or None for silence. It is
    looked at only where numbers are read anyway, never by the training step.

    Args:
        limit (int): How many skipped steps in a row are too many. Default: ``50``.
        action (str): ``"warn"`` or ``"raise"``. A warning comes again each time
            the number of skipped steps has doubled. Default: ``"warn"``.
        explain (Callable, optional): Is called, without arguments, only when the
            alarm goes off; what it returns ends the message. Use it to rerun a
            batch with :func:`explain_overflow`. A copy of the alarm is without it.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import SkipAlarm, check_skips
        >>> scaler = GradScaler()
        >>> scaler.skip_alarm = SkipAlarm(limit=10, action="raise")
        >>> check_skips(scaler)
        0
    """

    def __init__(
        self,
        limit: int = 50,
        action: str = "warn",
        explain: Callable[[], Any] | None = None,
    ):
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(
                f"limit must be a positive integer, got {limit!r}. To turn the alarm "
                "off set the scaler's skip_alarm to None."
            )
        if action not in _ACTIONS:
            raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
        self.limit = limit
        self.action = action
        self.explain = explain
        self._warned_at = 0
        self._remembered: list[tuple[str, weakref.ref[Any]]] = []

    def remember(self, grads: Any) -> None:
        """Note gradients for the table, without keeping them alive."""
        leaves = flatten(grads)
        self._remembered = [
            (path, weakref.ref(x)) for path, x in leaves if isinstance(x, mx.array)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Most often a lambda around a model and a batch: not to be pickled or copied.
        return vars(self) | {"_remembered": [], "explain": None}

    def check(
        self, skips: int, scale: float, grads: Any = None, *, since_update: int = 0
    ) -> None:
        """Go off if ``skips``, a number of skipped steps in a row, is too many.

        Or if ``since_update`` is, the number of steps that were skipped since the last
        ``update()``.
        """
        forgotten = since_update >= self.limit
        skips = max(skips, since_update)
        if skips < self.limit:
            self._warned_at = 0
            return
        if self.action == "warn" and skips < 2 * self._warned_at:
            return
        self._warned_at = skips
        message = self._message(skips, scale, grads, forgotten)
        if self.action == "raise":
            raise SkippedStepsError(message)
        warn_user(message, SkippedStepsWarning)

    def _message(self, skips: int, scale: float, grads: Any, forgotten: bool) -> str:
        paragraphs = [
            f"{skips} steps in a row were skipped: their gradients were not finite. "
            f"Nothing was trained in them. The loss scale is {power(scale)} now."
        ]
        if forgotten:
            paragraphs.append(
                "update() was not called in all that time, so that the scale did not "
                "move: call it once after each step, in the same compiled function."
            )
        leaves = self._nonfinite_remembered() if grads is None else nonfinite(grads)
        if leaves:
            paragraphs.append(overflow_table(leaves))
        if self.explain is not None:
            paragraphs.append(str(self.explain()))
        else:
            paragraphs.append(
                "explain_overflow(model, loss_fn, *batch, scale=scaler, "
                "compute_dtype=...) of mlx_gradscale.diagnostics finds where it "
                "begins; compute_dtype= is that of value_and_grad, if it has one."
            )
        return "\n".join(paragraphs)

    def _nonfinite_remembered(self) -> list[NonFinite]:
        alive = {path: x() for path, x in self._remembered if x() is not None}
        # Those of a compiled step that was traced have no values.
        return nonfinite(alive) if evaluate_unless_traced(alive) else []


def check_skips(source: Any, grads: Any = None) -> int:
    """Read how many steps in a row were skipped; let the scaler's alarm check it.

    Args:
        source (GradScaler or LossScaleOptimizer): Whose steps. If its
            ``skip_alarm`` is None there is no alarm.
        grads (Any, optional): The latest gradients, scaled or not, for the table
            of those that overflow.

    Returns:
        int: How many of the latest steps in a row changed nothing.

    Example:
        >>> from mlx_gradscale import GradScaler
        >>> from mlx_gradscale.diagnostics import check_skips
        >>> check_skips(GradScaler())
        0
    """
    scaler = scaler_of(source)
    names = ("consecutive_skips", "scale", "skips_since_update")
    skips, scale, since_update = (scaler.state[name].item() for name in names)
    if scaler.skip_alarm is not None:
        scaler.skip_alarm.check(skips, scale, grads, since_update=since_update)
    return int(skips)


def alarm_of(source: Any) -> SkipAlarm | None:
    """Return the alarm of a scaler, None if it has none."""
    alarm: SkipAlarm | None = scaler_of(source).skip_alarm
    return alarm
