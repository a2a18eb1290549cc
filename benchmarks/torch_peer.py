"""The same step in PyTorch, where it is installed: bare, and with its GradScaler."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from .rows import Figure, Row, rows_of
from .timing import interleave
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


def measure(rounds: int, shapes: Shapes) -> tuple[list[Row], dict[str, float]]:
    """Return rows, and the added seconds per million parameters of each kind.

    One thread, as MLX's CPU backend uses.
    """
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    added: dict[str, float] = {}
    for name, kind in KINDS.items():
        peers = {
            f"torch {name}": _Peer(torch, shapes, kind, scaled=False),
            f"torch {name} + GradScaler": _Peer(torch, shapes, kind, scaled=True),
        }
        runs: dict[str, Callable] = {key: peer.run for key, peer in peers.items()}
        timings = interleave(
            runs, rounds, before=lambda key, peers=peers: peers[key].refill()
        )
        bare, scaled = timings.values()
        rows += rows_of("PyTorch, AdamW", name, timings)
        added[name] = (scaled.median - bare.median) / (size(shapes) / 1e6)
    return rows, added


def figures(added: dict[str, float], ours: float) -> list[Figure]:
    """The added time per million parameters, ours beside PyTorch's.

    The for-loop is PyTorch's default for tensors on the CPU.
    """
    found = [Figure("added by this package", ours * 1e3, "ms per M parameters")]
    for name, seconds in added.items():
        found.append(
            Figure(f"added by PyTorch, {name}", seconds * 1e3, "ms per M parameters")
        )
    default = added["for-loop"]
    if default > 0:
        found.append(
            Figure("added / added by PyTorch's default", ours / default, bar=1.0)
        )
    return found
