"""PyTorch's GradScaler and this one, alike: what each adds to its own bare step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from . import machine, trees, variants
from .comparison import say
from .rows import Figure, Row, Section, rows_of
from .timing import Timing, interleave
from .trees import Shapes
from .variants import SCALE

BARE, SCALED = "bare", "with its scaler"
OURS = "MLX, compiled"
FUSED = "PyTorch, fused"
KINDS: dict[str, dict[str, bool]] = {
    "PyTorch, for-loop": {"foreach": False, "fused": False},
    "PyTorch, foreach": {"foreach": True},
    FUSED: {"fused": True},
}
MISSING = "PyTorch is left out: pip install 'mlx_gradscale[torch]' to compare with it."


def available() -> bool:
    """Tell whether PyTorch is there; nothing is imported."""
    return find_spec("torch") is not None


class _Peer:
    """PyTorch's optimizer phase, as :class:`variants.Phase` is MLX's."""

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
        """Do one step."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def measure(rounds: int, shapes: Shapes | None = None) -> Section:
    """Time the optimizer phase with and without a scaler, on both sides.

    The same trees, the same number of threads, all by turns. Before each call the
    gradients are written anew and 64 MB are touched: after a backward pass they are
    not in the cache either.
    """
    if not available():
        print(MISSING)
        return Section()
    import torch

    pairs = _pairs(torch, shapes or trees.shapes_of(trees.MAIN))
    say("PyTorch and MLX, each bare and with its scaler")
    # Twice as many rounds: of two steps that vary, the difference is asked for.
    with _as_many_threads_as_mlx(torch):
        timings = _by_turns(torch, pairs, 2 * rounds)
        busy = {n: _busy_threads(pair[SCALED].run) for n, pair in pairs.items()}
    rows: list[Row] = []
    for name in pairs:
        bare = timings[name, BARE].seconds
        pair = {v: Timing(timings[name, v].seconds, bare) for v in (BARE, SCALED)}
        rows += rows_of(name, pair)
    return Section(rows, figures(Section(rows), busy))


def _by_turns(torch: Any, pairs: dict, rounds: int) -> dict[tuple[str, str], Timing]:
    phases = {(n, v): p for n, pair in pairs.items() for v, p in pair.items()}
    other = torch.zeros(2**24)

    def prepare(key: tuple[str, str]) -> None:
        if isinstance(phases[key], _Peer):
            phases[key].refill()
        other.add_(1)

    runs = {key: phase.run for key, phase in phases.items()}
    return interleave(runs, rounds, before=prepare)


@contextlib.contextmanager
def _as_many_threads_as_mlx(torch: Any) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(machine.THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pairs(torch: Any, shapes: Shapes) -> dict[str, dict[str, Any]]:
    make = variants.OPTIMIZERS["AdamW"]
    found: dict[str, dict[str, Any]] = {
        OURS: {
            BARE: variants.bare(make, shapes),
            SCALED: variants.scaler(make, shapes),
        }
    }
    for name, kind in KINDS.items():
        found[name] = {
            variant: _Peer(torch, shapes, kind, variant == SCALED)
            for variant in (BARE, SCALED)
        }
    return found


def _busy_threads(run: Callable[[], None], repeats: int = 3) -> float:
    """Return how many threads were at work: processor seconds per second."""
    start, used = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - used) / (time.perf_counter() - start)


def figures(section: Section, busy: dict[str, float]) -> list[Figure]:
    """What each scaler adds in milliseconds and in percent; ours against fused."""
    found, percents = [], {}
    for name, (bare, scaled) in section.cases().items():
        percents[name] = 100 * (scaled.ratio - 1)
        note = f"to {bare.milliseconds:.1f} ms, {busy[name]:.1f} threads at work"
        found += [
            Figure(f"{name}: scaler adds", scaled.added, "ms", note=note),
            Figure(f"{name}: scaler adds", percents[name], "%"),
        ]
    ours, fused = percents[OURS], percents[FUSED]
    return [*found, Figure("percent added / PyTorch fused's", ours / fused, bar=1.0)]
