"""Train for many steps, and check memory, retracing and the scaler's state.

    python tools/soak.py [--compiled STEPS] [--eager STEPS] [--seed SEED]

Overflows, changed settings, saves and loads occur at random. The state of the scaler is
compared with an implementation of the loss scale rule in plain Python.
"""

import argparse
import gc
import sys
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.helpers import INF, Mlp, Traced, batch
from support.optimizer_helpers import loop_of
from support.reference import Reference

from mlx_gradscale import GradScaler

# The scale stays low enough that only the poisoned steps, one in ten, overflow.
SETTINGS = {"growth_interval": 3, "max_scale": 1024.0}
SUFFIXES = (".json", ".pt", ".safetensors", ".json.gz")
CHANGES = {
    "growth_interval": (1, 3, 9),
    "growth_factor": (2.0, 1.5),
    "backoff_factor": (0.5, 0.75),
    "scale": (64.0, 256.0),
}


def measure() -> tuple[int, int, int]:
    """Return MLX's active memory, and the number of Python objects and blocks."""
    gc.collect()
    objects = len(gc.get_objects())
    return mx.get_active_memory(), objects, sys.getallocatedblocks()


class Soak:
    """A float16 training run, and the reference to compare it with."""

    def __init__(self, compiled: bool, seed: int, folder: Path):
        self.folder, self.random = folder, Random(seed)
        mx.random.seed(seed)
        self.model = Mlp(dtype=mx.float16)
        self.scaler = GradScaler(256.0, **SETTINGS)
        self.reference = Reference(256.0, **SETTINGS)
        self.optimizer, gradient, update = loop_of(
            "wrapper" if compiled else "scaler",
            self.model,
            optim.AdamW(1e-3),
            self.scaler,
        )
        self.optimizer.init(self.model.trainable_parameters())
        self.state = [self.model.state, self.optimizer.state, self.scaler.state]
        self.traced = Traced(lambda x, y: update(self.model, gradient(x, y)[1]))
        self.step = self.traced
        if compiled:
            self.step = mx.compile(self.traced, inputs=self.state, outputs=self.state)
        self.n_changes = self.n_loads = 0

    def run(self, steps: int) -> list[tuple[int, int, int]]:
        """Train and check; return the memory after 10% of the steps and at the end."""
        for suffix in SUFFIXES:  # import modules now, not between the measurements
            self.save(suffix)
            self.load()
        found = []
        batches = [batch(seed, 4, mx.float16) for seed in range(8)]
        for i in range(steps + 1):
            if i % 100 == 0:
                self.check()
            if i in (steps // 10, steps):
                found.append(measure())
            (x, y), is_bad = self.random.choice(batches), self.random.random() < 0.1
            self.step(x * (INF if is_bad else 1), y)
            mx.eval(self.state)
            self.reference.count(not is_bad)
            self.reference.update(not is_bad)
            chance = self.random.random()
            if chance < 0.01:
                self.change()
            elif chance < 0.015:
                self.save(self.random.choice(SUFFIXES))
            elif chance < 0.02:
                self.load()
        return found

    def change(self) -> None:
        name = self.random.choice(list(CHANGES))
        value = self.random.choice(CHANGES[name])
        if name == "scale":
            self.scaler.update(value)
            self.reference.set_scale(value)
        else:
            getattr(self.scaler, f"set_{name}")(value)
            setattr(self.reference, name, value)
        self.n_changes += 1

    def save(self, suffix: str) -> None:
        self.scaler.save(self.folder / f"scaler{suffix}")
        arrays = dict(tree_flatten([self.model.parameters(), self.optimizer.state]))
        mx.save_safetensors(str(self.folder / "all.safetensors"), arrays)
        self.saved = replace(self.reference), suffix

    def load(self) -> None:
        reference, suffix = self.saved
        self.reference = replace(reference)
        arrays = mx.load(str(self.folder / "all.safetensors"))
        weights, state = tree_unflatten(list(arrays.items()))
        self.model.update(weights)
        self.optimizer.state = state
        self.state[1] = self.optimizer.state
        self.scaler.load(self.folder / f"scaler{suffix}")
        self.n_loads += 1

    def check(self) -> None:
        """Raise if a number differs from the reference or a weight is non-finite."""
        for name, value in asdict(self.reference).items():
            ours = self.scaler.state[name].item()
            assert abs(ours - value) <= 1e-6 * abs(value), (name, ours, value)
        for path, x in tree_flatten([self.model.parameters(), self.optimizer.state]):
            # max_grad_norm is inf if gradients are not clipped.
            finite = mx.all(mx.isfinite(x)).item() or path.endswith("max_grad_norm")
            assert finite, f"{path} is not finite"


def soak(steps: int, compiled: bool, seed: int = 0) -> str:
    """Train and return the measurements; raise if memory grew or a step retraced."""
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(compiled, seed, Path(folder))
        start, end = run.run(steps)
    numbers = (
        f"{steps} {'compiled' if compiled else 'eager'} steps, {run.n_changes} changed "
        f"settings, {run.n_loads} loads, {run.reference.skipped_steps} skipped since "
        f"the last load, active memory, objects and blocks {start} to {end}"
    )
    assert not compiled or run.traced.count == 1, (
        f"{run.traced.count} traces: {numbers}"
    )
    # Memory grows a little: after a load, scalars no longer share buffers.
    room = 100 + steps // 100
    for before, after, more in zip(start, end, (1024, room, room), strict=True):
        assert after - before < more, numbers
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiled", type=int, default=100_000, metavar="STEPS")
    parser.add_argument("--eager", type=int, default=20_000, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    print(soak(options.compiled, True, options.seed), flush=True)
    print(soak(options.eager, False, options.seed), flush=True)
