"""Train for very long: memory stays, nothing is traced again, every count is right.

python tests/soak.py [--compiled STEPS] [--eager STEPS] [--seed SEED]

Overflows, losses that are NaN, settings that change, saves and loads come at random,
beside the rule in plain Python of reference.py.
"""

import argparse
import copy
import gc
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from helpers import NAN, Mlp, Traced, batch
from mlx.utils import tree_flatten, tree_unflatten
from reference import Reference

from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.scale import read

# Each fault with how often it comes, what it does to the input and the gradient.
GOOD, BAD_GRADIENT, BAD_LOSS = (1.0, 0.0), (1.0, 1e30), (NAN, 0.0)
FAULTS = [GOOD] * 18 + [BAD_GRADIENT] * 2 + [BAD_LOSS]
# Low enough for float16 never to overflow by itself: all skips are ours.
SETTINGS = {"init_scale": 256.0, "growth_interval": 3, "max_scale": 1024.0}
SUFFIXES = (".json", ".pt", ".safetensors", ".json.gz")


@dataclass
class Memory:
    """What is in use at one moment, without what Python can give back."""

    active: int
    objects: int
    blocks: int
    resident: int

    @classmethod
    def now(cls) -> "Memory":
        gc.collect()
        # Before the other counts, of which this list is a part.
        objects = len(gc.get_objects())
        return cls(mx.get_active_memory(), objects, sys.getallocatedblocks(), _rss())


def _rss() -> int:
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass
class Soak:
    """A float16 model in training, and the reference beside it."""

    compiled: bool
    seed: int
    folder: Path
    reference: Reference = field(init=False)
    saved: Reference | None = None
    suffix: str = ""
    changes: int = 0
    loads: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        mx.random.seed(self.seed)
        self.model = Mlp(dtype=mx.float16)
        self.scaler = GradScaler(**SETTINGS)
        self.optimizer: Any = optim.AdamW(1e-3)
        self.reference = Reference(256.0, growth_interval=3, max_scale=1024.0)
        if self.compiled:
            self.optimizer = LossScaleOptimizer(self.optimizer, self.scaler)
        self.optimizer.init(self.model.trainable_parameters())
        owner = self.optimizer if self.compiled else self.scaler
        self.loss_and_grad = owner.value_and_grad(self.model, self._loss)
        self.batches = [batch(i, 4, mx.float16) for i in range(8)]
        self.traced = self.step = Traced(self._step)
        if self.compiled:
            state = [self.model.state, self.optimizer.state]
            self.step = mx.compile(self.traced, inputs=state, outputs=state)

    def _loss(self, x: mx.array, y: mx.array, factor: mx.array, push: mx.array):
        error = self.model(x * factor.astype(x.dtype)).astype(mx.float32) - y
        bias = self.model.layers[1].bias.astype(mx.float32)
        return mx.mean(mx.square(error)) + mx.sum(bias) * push

    def _step(self, *arguments: mx.array) -> mx.array:
        loss, gradients = self.loss_and_grad(*arguments)
        if self.compiled:
            self.optimizer.update(self.model, gradients)
            return loss
        self.scaler.minimize(self.optimizer, self.model, gradients)
        return loss

    def run(self, steps: int, each_step: Callable[[], object]) -> list[Memory]:
        """Train, checking along the way; return the memory after a tenth, and last."""
        for self.suffix in SUFFIXES:
            # What is imported for a file is not taken for growth.
            self.scaler.save(path := self.folder / f"scaler{self.suffix}")
            self.scaler.load(path)
        found = []
        for i in range(steps + 1):
            if i % 100 == 0:
                self.check()
            if i in (steps // 10, steps):
                found.append(Memory.now())
            each_step()
            fault = self.random.choice(FAULTS)
            x, y = self.random.choice(self.batches)
            mx.eval(self.step(x, y, *map(mx.array, fault)), self.state())
            self.reference.loss_finite = fault is not BAD_LOSS
            self.reference.count(fault is GOOD)
            self.reference.update(fault is GOOD)
            self._something_else()
        return found

    def state(self) -> list:
        return [self.model.state, self.optimizer.state, self.scaler.state]

    def _something_else(self) -> None:
        chance = self.random.random()
        if chance < 0.01:
            self._change()
        elif chance < 0.015:
            self._save()
        elif chance < 0.02 and self.saved is not None:
            self._load()

    def _change(self) -> None:
        name, values = self.random.choice(
            [
                ("growth_interval", (1, 3, 9)),
                ("growth_factor", (2.0, 1.5)),
                ("backoff_factor", (0.5, 0.75)),
                ("dynamic", (True, True, False)),
                ("scale", (64.0, 256.0)),
            ]
        )
        value = self.random.choice(values)
        if name == "scale":
            self.scaler.update(value)
        else:
            getattr(self.scaler, f"set_{name}")(value)
        setattr(self.reference, name, value)
        self.changes += 1

    def _save(self) -> None:
        self.suffix = self.random.choice(SUFFIXES)
        self.scaler.save(self.folder / f"scaler{self.suffix}")
        arrays = dict(tree_flatten([self.model.parameters(), self.optimizer.state]))
        mx.save_safetensors(str(self.folder / "all.safetensors"), arrays)
        self.saved = copy.copy(self.reference)

    def _load(self) -> None:
        now, self.reference = self.reference, copy.copy(self.saved)
        if whole := self.random.random() < 0.5:
            arrays = mx.load(str(self.folder / "all.safetensors"))
            weights, state = tree_unflatten(list(arrays.items()))
            self.model.update(weights)
            self.optimizer.state = state
            mx.eval(self.state())
        if not whole or not self.compiled:
            self.scaler.load(self.folder / f"scaler{self.suffix}")
            # A file is silent about what PyTorch has not and is at its default: then
            # the setting stays.
            self.reference.dynamic &= now.dynamic
        self.loads += 1

    def check(self) -> None:
        """Raise if a number is not the reference's, or a weight is not finite."""
        ours, expected = read(self.scaler.state), asdict(self.reference)
        wrong = {k: (ours[k], x) for k, x in expected.items() if ours[k] != x}
        assert not wrong, f"(ours, the reference's): {wrong}"
        for path, x in tree_flatten([self.model.parameters(), self.optimizer.state]):
            # The norm to clip to, inf where there is none, is no number of a step.
            finite = mx.all(mx.isfinite(x)).item() or path.endswith("max_grad_norm")
            assert finite, f"{path} is not finite"


def soak(
    steps: int,
    compiled: bool,
    seed: int = 0,
    each_step: Callable[[], object] = lambda: None,
) -> str:
    """Train that many steps and return the figures; raise if something grew."""
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(compiled, seed, Path(folder))
        start, end = run.run(steps, each_step)
    skipped = run.reference.skipped_steps
    figures = (
        f"{steps} {'compiled' if compiled else 'eager'} steps, {run.changes} changed "
        f"settings, {run.loads} loads, {skipped} skipped since the last load, traced "
        f"{run.traced.count if compiled else 0} times: active memory "
        f"{start.active} to {end.active} bytes, Python objects {start.objects} to "
        f"{end.objects}, blocks {start.blocks} to {end.blocks}, resident "
        f"{start.resident / 2**20:.1f} to {end.resident / 2**20:.1f} MiB"
    )
    assert not compiled or run.traced.count == 1, figures
    assert min(run.changes, run.loads, skipped) > 0, figures
    # It moves a little: after a load numbers that shared their memory do not. But not
    # with the number of steps.
    assert end.active - start.active < 1024, figures
    room = 100 + steps // 100
    assert end.objects - start.objects < room, figures
    assert end.blocks - start.blocks < room, figures
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiled", type=int, default=100_000, metavar="STEPS")
    parser.add_argument("--eager", type=int, default=20_000, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(soak(options.compiled, True, options.seed), flush=True)
    print(soak(options.eager, False, options.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
