"""The same step in PyTorch, where it is installed: bare, and with its GradScaler."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from . import variants
from .rows import Figure, Row, rows_of
from .timing import Timing, interleave
from .trees import Shapes, size
from .variants import SCALE

# Timed by itself: the for-loop and foreach steps vary by 15 ms, as their temporaries
# do or do not fault pages in, and what the scaler adds to them is 3 ms.
ALONE = "torch, unscale_ and update alone"
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def available() -> bool:
    """Tell whether PyTorch is there; nothing is imported."""
    return find_spec("torch") is not None


class _Peer:
    def __init__(self, torch: Any, shapes: Shapes, kind: dict, scaled: bool):
        self.parameters = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
        factor = 0.01 * (SCALE if scaled else 1.0)
        self.gradients = [torch.randn(s) * factor for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, **kind)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaled else None
        if scaled:
            self.scaler.scale(torch.ones(()))
        for p in self.parameters:
            p.grad = torch.empty_like(p)

    def refill(self) -> None:
        """Write the gradients again: PyTorch unscales them in place."""
        for p, g in zip(self.parameters, self.gradients, strict=True):
            p.grad.copy_(g)

    def run_scaler_alone(self) -> None:
        """What GradScaler does around a step that is not fused; ends in a sync."""
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        self.scaler.get_scale()

    def run(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def measure(rounds: int, shapes: Shapes) -> tuple[list[Row], list[Figure]]:
    """Time PyTorch's scaler and this one, and what each adds to a bare step.

    One thread, as MLX's CPU backend uses.
    """
    if not available():
        return [], []
    import torch

    torch.set_num_threads(1)
    make = variants.OPTIMIZERS["AdamW"]
    pairs: dict[str, tuple[Any, Any]] = {
        "this package": (variants.bare(make, shapes), variants.scaler(make, shapes)),
    }
    for name, kind in KINDS.items():
        pairs[f"torch {name}"] = tuple(
            _Peer(torch, shapes, kind, scaled) for scaled in (False, True)
        )
    runs: dict[str, Callable] = {}
    refill: dict[str, Callable] = {}
    for name, (bare, scaled) in pairs.items():
        runs |= {f"{name}, bare": bare.run, f"{name}, scaled": scaled.run}
        if name != "this package":
            refill |= {f"{name}, bare": bare.refill, f"{name}, scaled": scaled.refill}
    alone = _Peer(torch, shapes, KINDS["for-loop"], scaled=True)
    runs[ALONE], refill[ALONE] = alone.run_scaler_alone, alone.refill
    # 64 MB, because gradients that were just refilled are in the cache, where
    # unscaling costs next to nothing, as it never does after a backward pass.
    other = torch.zeros(2**24)

    def prepare(name: str) -> None:
        refill.get(name, lambda: None)()
        other.add_(1)

    timings = interleave(runs, rounds, before=prepare)
    rows = rows_of("PyTorch", f"AdamW, {len(shapes)} leaves", timings)
    return rows, _figures(timings, size(shapes) / 1e6)


def _figures(timings: dict[str, Timing], millions: float) -> list[Figure]:
    # Of the best rounds: a difference of medians is mostly noise where the rounds
    # of one variant differ by more than what the scaler adds.
    def added(name: str) -> float:
        difference = timings[f"{name}, scaled"].best - timings[f"{name}, bare"].best
        return difference * 1e3 / millions

    ours = added("this package")
    default = timings[ALONE].best * 1e3 / millions
    unit = "ms per M parameters"
    return [
        Figure("added by this package", ours, unit),
        Figure("added by torch, for-loop or foreach", default, unit),
        Figure("added by torch, fused", added("torch fused"), unit),
        Figure("added / added by torch's default", ours / default, bar=1.0),
    ]
