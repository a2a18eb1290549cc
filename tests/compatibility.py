"""The compatibility matrix: which ways of training are tried, and the page about them.

python tests/compatibility.py [--write]

Runs every combination, some minutes, and compares docs/compatibility.md with what was
found, or writes it. test_compatibility.py runs a part of them that has every pair.
"""

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from helpers import INF, NAN, OPTIMIZERS, bits
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
SHAPE = (4, 6)
MAX_NORM = 2.0
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# How far a value may be from the bare optimizer's: in float32, and for what is
# rounded to a half dtype one unit in the last place.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ONE_UNIT = {mx.float32: 1e-5, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class Combination(NamedTuple):
    """One way of training."""

    optimizer: str
    dtype: str
    api: str
    mode: str
    clip: str
    gradients: str
    accumulation: str


DIMENSIONS = Combination(
    optimizer=tuple(OPTIMIZERS),
    dtype=tuple(DTYPES),
    api=("GradScaler", "LossScaleOptimizer", "with remainders"),
    mode=("eager", "compiled"),
    clip=("no clipping", "clipped"),
    gradients=("true", "scaled"),
    accumulation=("one batch", "two batches"),
)


def everything() -> list[Combination]:
    return [Combination(*values) for values in itertools.product(*DIMENSIONS)]


class Model(nn.Module):
    """Two weights whose gradients are what the loss is given, exactly."""

    def __init__(self, dtype: mx.Dtype):
        super().__init__()
        keys = mx.random.split(mx.random.key(7), 2)
        self.layers = [{"weight": mx.random.normal(SHAPE, key=key)} for key in keys]
        self.set_dtype(dtype)

    def loss(self, wanted: list[mx.array]) -> mx.array:
        products = [
            layer["weight"].astype(mx.float32) * gradient
            for layer, gradient in zip(self.layers, wanted, strict=True)
        ]
        return sum(map(mx.sum, products))


def batches(step: int, count: int) -> list[list[mx.array]]:
    """Gradients of few bits: they, their mean and their scaled values are exact."""
    numbers = np.random.default_rng(step).integers(1, 32, (count, 2, *SHAPE))
    signs = np.random.default_rng(-step % 100).choice([-1, 1], numbers.shape)
    return [list(map(mx.array, x)) for x in (numbers * signs / 16).astype(np.float32)]


def mean(trees: list) -> dict:
    return tree_map(lambda *x: sum(x) / len(x), *trees)


class Ours:
    """A model, its optimizer and its step, as the combination says."""

    def __init__(self, how: Combination):
        self.how, self.model = how, Model(DTYPES[how.dtype])
        # It grows in between, so that gradients of several scales are stepped.
        self.scaler = GradScaler(1024.0, growth_interval=2)
        self.inner = self.optimizer = OPTIMIZERS[how.optimizer]()
        self.wrapped = how.api != "GradScaler"
        self.clips, scaled = how.clip == "clipped", how.gradients == "scaled"
        if self.wrapped:
            self.optimizer = LossScaleOptimizer(
                self.inner,
                self.scaler,
                max_grad_norm=MAX_NORM if self.clips else None,
                masters="remainder" if how.api == "with remainders" else "float32",
            )
        self.optimizer.init(self.model.trainable_parameters())
        loss_fn = self.model.loss
        if not scaled:
            scaling = self.optimizer if self.wrapped else self.scaler
            self.gradients = scaling.value_and_grad(self.model, loss_fn)
        elif self.wrapped:
            loss_fn = self.optimizer.scale_loss(loss_fn, unscale=False)
            self.gradients = nn.value_and_grad(self.model, loss_fn)
        else:
            self.gradients = nn.value_and_grad(
                self.model, lambda wanted: self.scaler.scale(loss_fn(wanted))
            )
        self.step = self._step
        if how.mode == "compiled":
            state = [self.model.state, self.optimizer.state, self.scaler.state]
            self.step = mx.compile(self._step, inputs=state, outputs=state)

    def _step(self, given: list[list[mx.array]]) -> mx.array:
        gradients = mean([self.gradients(wanted)[1] for wanted in given])
        if self.wrapped:
            self.optimizer.update(self.model, gradients)
            return self.scaler.last_step_applied
        if self.how.gradients == "scaled":
            gradients = self.scaler.unscale_(self.optimizer, gradients)
        if self.clips:
            gradients, _ = optim.clip_grad_norm(gradients, MAX_NORM)
        return self.scaler.minimize(self.optimizer, self.model, gradients)

    def kept(self) -> dict:
        """The bits that a skipped step must not change."""
        kept = [self.model.parameters(), self.inner.state]
        if self.wrapped:
            # All that the wrapper holds but the scale, the tallies and the last norm.
            state = dict(self.optimizer.state)
            del state["scaler"], state["grad_norm"]
            kept += [state, self.optimizer.masters(self.model.parameters())]
        return bits(kept)


class Bare:
    """The same with the optimizer alone, in float32, on gradients that are given."""

    def __init__(self, how: Combination):
        self.how, dtype = how, DTYPES[how.dtype]
        self.dtype, self.optimizer = dtype, OPTIMIZERS[how.optimizer]()
        model = Model(dtype)
        self.weights = tree_map(lambda x: x.astype(mx.float32), model.parameters())
        self.optimizer.init(self.weights)

    def step(self, given: list[list[mx.array]]) -> None:
        trees = [{"layers": [{"weight": x} for x in wanted]} for wanted in given]
        gradients = mean(trees)
        if self.how.clip == "clipped":
            gradients, _ = optim.clip_grad_norm(gradients, MAX_NORM)
        self.weights = self.optimizer.apply_gradients(gradients, self.weights)
        if self.how.api == "GradScaler":
            # No masters: what the weight's own dtype rounds away is lost.
            rounded = tree_map(lambda x: x.astype(self.dtype), self.weights)
            self.weights = tree_map(lambda x: x.astype(mx.float32), rounded)


def check(how: Combination) -> str | None:
    """Train a few steps, two of them bad; return what is wrong, or None."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some parameters are float16")
        return _check(how)


def _check(how: Combination) -> str | None:
    ours, bare = Ours(how), Bare(how)
    count = 2 if how.accumulation == "two batches" else 1
    for step, bad in enumerate([None, None, INF, None, NAN, -INF, None]):
        given, before = batches(step, count), ours.kept()
        if bad is None:
            bare.step(given)
        else:
            # In one element of one of the weights, in the last batch.
            given[-1][step % 2] = given[-1][step % 2] * mx.where(
                mx.arange(SHAPE[1]) == step, bad, 1.0
            )
        applied = ours.step(given).item()
        if applied != (bad is None):
            return f"step {step} was {'applied' if applied else 'skipped'}"
        if (ours.kept() == before) != (bad is not None):
            return f"step {step} changed {'something' if bad else 'nothing'}"
    return _difference(ours, bare)


def _difference(ours: Ours, bare: Bare) -> str | None:
    weights = tree_map(lambda x: x.astype(bare.dtype), bare.weights)
    trees = [("weights", ours.model.parameters(), weights, ONE_UNIT[bare.dtype])]
    trees += [("state", ours.inner.state, bare.optimizer.state, CLOSE["rtol"])]
    if ours.wrapped:
        masters = ours.optimizer.masters(ours.model.parameters())
        trees += [("masters", masters, bare.weights, CLOSE["rtol"])]
    for name, our, its, rtol in trees:
        our, its = dict(tree_flatten(our)), dict(tree_flatten(its))
        if our.keys() != its.keys():
            return f"{name} has other arrays: {our.keys() ^ its.keys()}"
        for path, x in our.items():
            y = its[path]
            if x.dtype != y.dtype:
                return f"{name} {path} is {x.dtype}, not {y.dtype}"
            x, y = x.astype(mx.float32), y.astype(mx.float32)
            if not mx.allclose(x, y, rtol=rtol, atol=CLOSE["atol"]):
                return f"{name} {path} is off by {mx.max(mx.abs(x - y)).item()}"
    return None


def part() -> list[Combination]:
    """A few combinations: every optimizer class, and each two of the other values."""
    names = {type(make()): name for name, make in OPTIMIZERS.items()}
    rows = _every_pair(DIMENSIONS[1:])
    rows *= -(-len(names) // len(rows))
    return [
        Combination(name, *row) for name, row in zip(names.values(), rows, strict=False)
    ]


def _every_pair(dimensions: tuple) -> list[tuple]:
    # Greedily: of all rows the one with the most pairs that are still missing.
    rows = list(itertools.product(*dimensions))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def page(found: dict[Combination, str | None]) -> str:
    """The page about what was found: for each combination what is wrong, or None."""
    tried = Counter((how.optimizer, how.api) for how in found)
    wrong = {how: what for how, what in found.items() if what is not None}
    failed = Counter((how.optimizer, how.api) for how in wrong)

    def row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    header = ["optimizer", *DIMENSIONS.api]
    table = row(header) + row(["---"] * len(header))
    for name in DIMENSIONS.optimizer:
        keys = [(name, api) for api in DIMENSIONS.api]
        table += row([name, *(f"{tried[k] - failed[k]} of {tried[k]}" for k in keys)])
    total = f"{len(found) - len(wrong)} of {len(found)}"
    lines = [f"- {', '.join(how)}: {what}\n" for how, what in wrong.items()]
    return _TEXT.format(total=total, table=table) + "".join(lines)


_TEXT = """# Compatibility

Written by `python tests/compatibility.py --write`, which runs all combinations of the
optimizers of `mlx.optimizers` with

- parameters in float32, float16 and bfloat16,
- `GradScaler.step` on the plain optimizer, without masters; `LossScaleOptimizer`, with
  float32 masters of float16 and bfloat16 parameters; and the same with remainders in
  their place (`masters="remainder"`),
- an eager loop and a step that is compiled as a whole,
- gradients clipped to a norm, and not,
- true gradients (`value_and_grad`), and scaled ones (`scale` and `unscale_`, or
  `scale_loss(unscale=False)`),
- one batch for a step, and two whose gradients are added up.

A combination holds if steps with an inf, a -inf or a NaN in one gradient leave every
bit of parameters, optimizer state and masters as it was, and if the other steps do what
the bare optimizer does in float32: state and masters within a relative 1e-5 or an
absolute 1e-6, parameters as well, or within one unit in the last place of their dtype.

{total} hold. Each cell counts the combinations of the dtypes and the last four points:

{table}"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args(arguments)
    found = {}
    for how in everything():
        found[how] = check(how)
        if found[how]:
            print(f"{', '.join(how)}: {found[how]}", flush=True)
        if how[1:] == tuple(values[-1] for values in DIMENSIONS[1:]):
            print(f"{how.optimizer} is done", flush=True)
    print(f"{sum(what is None for what in found.values())} of {len(found)} hold")
    if options.write:
        PAGE.write_text(page(found))
    elif PAGE.read_text() != page(found):
        print(f"{PAGE.name} says otherwise: write it with --write.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
