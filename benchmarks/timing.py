"""Time variants against each other: interleaved rounds, medians, paired ratios."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The seconds of one variant, and of the baseline in the same rounds."""

    seconds: list[float]
    baseline: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios: slow rounds are slow for both."""
        return statistics.median(self._ratios())

    @property
    def added(self) -> float:
        """The median of the rounds' differences, in seconds."""
        pairs = zip(self.seconds, self.baseline, strict=True)
        return statistics.median(seconds - baseline for seconds, baseline in pairs)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the rounds' ratios."""
        low, _, high = statistics.quantiles(self._ratios(), n=4, method="inclusive")
        return low, high

    def _ratios(self) -> list[float]:
        pairs = zip(self.seconds, self.baseline, strict=True)
        return [seconds / baseline for seconds, baseline in pairs]


def interleave(
    runs: dict[str, Callable[[], None]],
    rounds: int,
    baseline: str | None = None,
    warm_up: int = 3,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Run every variant once per round and return its timing.

    Args:
        runs (dict): Each variant, a function that returns when its work is done.
        rounds (int): How many rounds; at least 2.
        baseline (str, optional): The variant that ratios are to. Default: the first.
        warm_up (int): Untimed calls of each: the first compiles, and fills MLX's
            cache of buffers.
        before (Callable): Called with the name before each timed call, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        for _ in range(warm_up):
            before(name)
            run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                before(name)
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    base = seconds[baseline or next(iter(runs))]
    return {name: Timing(values, base) for name, values in seconds.items()}


def joined(timings: list[Timing]) -> Timing:
    """Return the rounds of several measurements of one variant as one."""
    return Timing(
        [second for timing in timings for second in timing.seconds],
        [second for timing in timings for second in timing.baseline],
    )


def exponent(amounts: list[float], values: list[float]) -> float:
    """Return the slope of values over amounts on two logarithmic axes: 1 is linear."""
    x, y = ([math.log(v) for v in column] for column in (amounts, values))
    return statistics.linear_regression(x, y).slope
