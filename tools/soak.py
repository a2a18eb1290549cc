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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.reference import Reference

from mlx_gradscale import GradScaler, LossScaleOptimizer

# One step in ten overflows. The scale stays low enough that no other step does.
FAULTS = [0.0] * 9 + [1e30]
MAX_SCALE = 1024.0
SUFFIXES = (".json", ".pt", ".safetensors", ".json.gz")
CHANGES: list[tuple[str, tuple[Any, ...]]] = [
    ("growth_interval", (1, 3, 9)),
    ("growth_factor", (2.0, 1.5)),
    ("backoff_factor", (0.5, 0.75)),
    ("scale", (64.0, 256.0)),
]


@dataclass(frozen=True)
class Memory:
    """MLX's active memory, and the number of Python objects and memory blocks."""

    active: int
    objects: int
    blocks: int

    @classmethod
    def now(cls) -> "Memory":
        """Collect garbage, then measure the memory in use."""
        gc.collect()
        objects = len(gc.get_objects())
        return cls(mx.get_active_memory(), objects, sys.getallocatedblocks())


class Soak:
    """A float16 training run, and the reference to compare it with."""

    def __init__(self, compiled: bool, seed: int, folder: Path):
        self.compiled, self.folder, self.random = compiled, folder, Random(seed)
        mx.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.model.set_dtype(mx.float16)
        self.scaler = GradScaler(256.0, growth_interval=3, max_scale=MAX_SCALE)
        self.optimizer: Any = optim.AdamW(1e-3)
        if compiled:
            self.optimizer = LossScaleOptimizer(self.optimizer, self.scaler)
        self.optimizer.init(self.model.trainable_parameters())
        scaling = self.optimizer if compiled else self.scaler
        self.loss_and_grad = scaling.value_and_grad(self.model, self._loss)
        self.reference = Reference(256.0, growth_interval=3, max_scale=MAX_SCALE)
        self.saved: tuple[Reference, str] | None = None
        self.changes = self.loads = self.traces = 0
        self.step: Callable[..., mx.array] = self._step
        if compiled:
            state = [self.model.state, self.optimizer.state]
            self.step = mx.compile(self._step, inputs=state, outputs=state)

    def _loss(self, x: mx.array, push: mx.array) -> mx.array:
        error = self.model(x).astype(mx.float32) - x.sum(axis=1, keepdims=True)
        bias = self.model.layers[0].bias.astype(mx.float32)
        return mx.mean(mx.square(error)) + mx.sum(bias) * push

    def _step(self, x: mx.array, push: mx.array) -> mx.array:
        self.traces += 1
        loss, grads = self.loss_and_grad(x, push)
        if self.compiled:
            self.optimizer.update(self.model, grads)
        else:
            self.scaler.minimize(self.optimizer, self.model, grads)
        return loss

    def state(self) -> list[Any]:
        """Return everything that a step changes."""
        return [self.model.state, self.optimizer.state, self.scaler.state]

    def run(self, steps: int) -> list[Memory]:
        """Train and check; return the memory after 10% of the steps and at the end."""
        for suffix in SUFFIXES:
            # Import modules for file access now, so that they do not count as growth.
            self._save(suffix)
            self._load(whole=False)
        found = []
        batches = [mx.random.normal((4, 8)).astype(mx.float16) for _ in range(8)]
        for i in range(steps + 1):
            if i % 100 == 0:
                self.check()
            if i in (steps // 10, steps):
                found.append(Memory.now())
            push = self.random.choice(FAULTS)
            x = self.random.choice(batches)
            mx.eval(self.step(x, mx.array(push)), self.state())
            self.reference.count(push == 0)
            self.reference.update(push == 0)
            self._do_something_else()
        return found

    def _do_something_else(self) -> None:
        chance = self.random.random()
        if chance < 0.01:
            self._change()
        elif chance < 0.015:
            self._save(self.random.choice(SUFFIXES))
        elif chance < 0.02:
            self._load(whole=self.random.random() < 0.5)

    def _change(self) -> None:
        name, values = self.random.choice(CHANGES)
        value = self.random.choice(values)
        if name == "scale":
            self.scaler.update(value)
            self.reference.set_scale(value)
        else:
            getattr(self.scaler, f"set_{name}")(value)
            setattr(self.reference, name, value)
        self.changes += 1

    def _save(self, suffix: str) -> None:
        self.scaler.save(self.folder / f"scaler{suffix}")
        arrays = dict(tree_flatten([self.model.parameters(), self.optimizer.state]))
        mx.save_safetensors(str(self.folder / "all.safetensors"), arrays)
        self.saved = replace(self.reference), suffix

    def _load(self, whole: bool) -> None:
        assert self.saved is not None
        reference, suffix = self.saved
        self.reference = replace(reference)
        if whole:
            arrays = mx.load(str(self.folder / "all.safetensors"))
            weights, state = tree_unflatten(list(arrays.items()))
            self.model.update(weights)
            self.optimizer.state = state
            mx.eval(self.state())
        if not whole or not self.compiled:
            self.scaler.load(self.folder / f"scaler{suffix}")
        self.loads += 1

    def check(self) -> None:
        """Raise if a number differs from the reference or a weight is non-finite."""
        state = self.scaler.state
        ours = {name: state[name].item() for name in asdict(self.reference)}
        wrong = {
            name: (ours[name], value)
            for name, value in asdict(self.reference).items()
            if abs(ours[name] - value) > 1e-6 * abs(value)
        }
        assert not wrong, f"values that differ from the reference: {wrong}"
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
        f"{steps} {'compiled' if compiled else 'eager'} steps, {run.changes} changed "
        f"settings, {run.loads} loads, {run.reference.skipped_steps} skipped since the "
        f"last load, active memory {start.active} to {end.active} bytes, objects "
        f"{start.objects} to {end.objects}, blocks {start.blocks} to {end.blocks}"
    )
    assert not compiled or run.traces == 1, f"traced {run.traces} times: {numbers}"
    # Memory grows a little: after a load, scalars no longer share buffers.
    assert end.active - start.active < 1024, numbers
    room = 100 + steps // 100
    assert end.objects - start.objects < room, numbers
    assert end.blocks - start.blocks < room, numbers
    return numbers


def main(arguments: list[str] | None = None) -> int:
    """Train compiled and eager, and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiled", type=int, default=100_000, metavar="STEPS")
    parser.add_argument("--eager", type=int, default=20_000, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    print(soak(options.compiled, True, options.seed), flush=True)
    print(soak(options.eager, False, options.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
