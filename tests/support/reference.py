"""The rule once more, independently, in plain Python over numpy's float32."""

from dataclasses import dataclass

import numpy as np

F = np.float32


@dataclass
class Reference:
    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    backoff_interval: int = 1
    hysteresis: int = 1
    dynamic: bool = True
    min_scale: float = 2.0**-64
    max_scale: float = 2.0**64
    growth_tracker: int = 0
    backoff_tracker: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    skips_since_update: int = 0
    last_step_applied: bool = True

    def count(self, applied: bool) -> None:
        self.last_step_applied = applied
        self.skipped_steps += not applied
        self.skips_since_update += not applied

    def update(self, finite: bool) -> None:
        self.consecutive_skips = 0 if finite else self.consecutive_skips + 1
        self.skips_since_update = 0
        if not self.dynamic:
            return
        budget = self.hysteresis > 1
        if finite:
            if not budget:
                self.backoff_tracker = 0
            self.growth_tracker += 1
            if self.growth_tracker >= self.growth_interval:
                self.growth_tracker = self.backoff_tracker = 0
                with np.errstate(over="ignore"):
                    grown = F(self.scale) * F(self.growth_factor)
                if np.isfinite(grown) and grown <= F(self.max_scale):
                    self.scale = float(grown)
        else:
            self.growth_tracker = 0
            allowed = max(self.backoff_interval, self.hysteresis)
            self.backoff_tracker += 1
            if self.backoff_tracker >= allowed:
                if not budget:
                    self.backoff_tracker = 0
                with np.errstate(under="ignore"):
                    smaller = F(self.scale) * F(self.backoff_factor)
                self.scale = float(max(smaller, F(self.min_scale)))

    def set_scale(self, value: float) -> None:
        self.scale = float(np.clip(F(value), F(self.min_scale), F(self.max_scale)))
        self.skips_since_update = 0
