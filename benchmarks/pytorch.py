"""How much time does a GradScaler add to the optimizer, in PyTorch and here?

AdamW updates 8 M float32 parameters, and all variants take turns in one process. Both
libraries run on the CPU, even on a Mac. PyTorch uses one thread, as MLX does on a CPU.
PyTorch unscales gradients in place, so they are rewritten before each step. Then 64 MB
are touched, because a real backward pass would also push gradients out of the cache.
"""

from importlib.util import find_spec
from typing import Any

import mlx.core as mx

from . import steps
from .harness import NO_TORCH, Rows, release_memory, take_turns

KINDS: dict[str, dict[str, bool]] = {
    "PyTorch, for-loop": {"foreach": False, "fused": False},
    "PyTorch, foreach": {"foreach": True},
    "PyTorch, fused": {"fused": True},
}


class TorchStep:
    """A step of PyTorch's AdamW, bare or with PyTorch's ``GradScaler``."""

    def __init__(
        self, torch: Any, shapes: steps.Shapes, kind: dict[str, bool], scaled: bool
    ):
        self.parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.gradients = [torch.randn(shape) for shape in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, **kind)
        self.scaler = None
        if scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=steps.SCALE)
            self.scaler.scale(torch.ones(()))
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)

    def refill(self) -> None:
        """Rewrite the gradients, which a scaled step unscales in place."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad.copy_(gradient)

    def run(self) -> None:
        """Run one optimizer step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def measure(quick: bool = False) -> Rows:
    """Time all variants; without PyTorch, return only a note."""
    if find_spec("torch") is None:
        return NO_TORCH
    import torch

    release_memory()
    threads, device = torch.get_num_threads(), mx.default_device()
    torch.set_num_threads(1)
    mx.set_default_device(mx.cpu)
    try:
        return _compare(torch, rounds=5 if quick else 24)
    finally:
        torch.set_num_threads(threads)
        mx.set_default_device(device)


def _compare(torch: Any, rounds: int) -> Rows:
    shapes, case = steps.shapes_of(8), steps.CASES["AdamW, float32"]
    gradients = case.gradients(shapes)
    found: dict[tuple[str, str], Any] = {
        ("MLX, compiled", "bare"): steps.bare_step(case, gradients),
        ("MLX, compiled", "scaled"): steps.scaled_step(case, gradients),
    }
    for name, kind in KINDS.items():
        for variant in ("bare", "scaled"):
            step = TorchStep(torch, shapes, kind, variant == "scaled")
            found[name, variant] = step
    other_memory = torch.zeros(2**24)

    def prepare(key: Any) -> None:
        if isinstance(found[key], TorchStep):
            found[key].refill()
        other_memory.add_(1)

    runs: dict[Any, Any] = {key: step.run for key, step in found.items()}
    seconds: dict[Any, float] = take_turns(runs, rounds, before=prepare)
    rows = []
    for name in ("MLX, compiled", *KINDS):
        bare, scaled = seconds[name, "bare"], seconds[name, "scaled"]
        rows.append(
            {
                "AdamW of": name,
                "bare ms": round(1e3 * bare, 1),
                "scaled ms": round(1e3 * scaled, 1),
                "scaler adds ms": round(1e3 * (scaled - bare), 1),
                "ratio": round(scaled / bare, 2),
            }
        )
    return rows
