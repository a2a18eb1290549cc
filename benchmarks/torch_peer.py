"""The same step in PyTorch, where it is installed: bare, and with its GradScaler."""

from importlib.util import find_spec
from typing import Any

from . import variants
from .rows import Figure, Row, rows_of
from .timing import Timing, interleave
from .trees import Shapes, size
from .variants import SCALE

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
    runs, refill = {}, {}
    for name, (bare, scaled) in pairs.items():
        runs |= {f"{name}, bare": bare.run, f"{name}, scaled": scaled.run}
        if name != "this package":
            refill |= {f"{name}, bare": bare.refill, f"{name}, scaled": scaled.refill}
    timings = interleave(
        runs, rounds, before=lambda name: refill.get(name, lambda: None)()
    )
    added = {
        name: _added(timings[f"{name}, scaled"], timings[f"{name}, bare"], shapes)
        for name in pairs
    }
    return rows_of("PyTorch", f"AdamW, {len(shapes)} leaves", timings), _figures(added)


def _added(scaled: Timing, bare: Timing, shapes: Shapes) -> float:
    # Of the best rounds: a difference of medians is mostly noise where the rounds
    # of one variant differ by more than what the scaler adds.
    return (scaled.best - bare.best) * 1e3 / (size(shapes) / 1e6)


def _figures(added: dict[str, float]) -> list[Figure]:
    found = [
        Figure(f"added by {name}", value, "ms per M parameters")
        for name, value in added.items()
    ]
    # The for-loop is PyTorch's default for tensors on the CPU.
    default, ours = added["torch for-loop"], added["this package"]
    if default > 0:
        note = "PyTorch's default on the CPU"
        ratio = ours / default
        found.append(
            Figure("added / added by torch for-loop", ratio, bar=1.0, note=note)
        )
    return found
