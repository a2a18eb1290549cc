"""Show the progress of a diagnostic that runs a batch many times."""

import logging
import sys
import time

_logger = logging.getLogger("mlx_gradscale")
# Seconds before progress is printed: shorter work ends before anyone wonders.
_DELAY = 3.0


class Progress:
    """Count the trial runs of a diagnostic, and report each one.

    Runs are logged at level INFO. If this level is not enabled, they are printed to
    stderr as soon as the diagnostic has taken three seconds.
    """

    def __init__(self, name: str):
        self._name, self._count, self._start = name, 0, time.monotonic()

    def show(self, run: str) -> None:
        """Report the run that is about to start."""
        self._count += 1
        text = f"{self._name}, run {self._count}: {run}"
        if _logger.isEnabledFor(logging.INFO):
            _logger.info(text)
        elif time.monotonic() - self._start >= _DELAY:
            print(text, file=sys.stderr, flush=True)
