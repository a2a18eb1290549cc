"""Time variants against each other: interleaved rounds, medians, paired ratios."""

import gc
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
    def best_ratio(self) -> float:
        return min(self.seconds) / min(self.baseline)

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


def slope(amounts: list[float], values: list[float]) -> tuple[float, float]:
    """Return the slope of a straight line through the points, and its R squared.

    Points are weighted by 1/amount**2, so that relative errors count: a plain fit
    over 1 to 256 sees only the last point.
    """
    weights = [1 / a**2 for a in amounts]
    total = sum(weights)
    mean_a = sum(w * a for w, a in zip(weights, amounts, strict=True)) / total
    mean_v = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    points = list(zip(weights, amounts, values, strict=True))
    covariance = sum(w * (a - mean_a) * (v - mean_v) for w, a, v in points)
    variance = sum(w * (a - mean_a) ** 2 for w, a, _ in points)
    spread = sum(w * (v - mean_v) ** 2 for w, _, v in points)
    found = covariance / variance
    return found, covariance**2 / (variance * spread) if spread else 1.0
