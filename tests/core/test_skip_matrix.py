"""A skipped step changes no bit, and a saved state resumes, in every combination."""

from functools import partial

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import (
    BAD_VALUES,
    INF,
    NAN,
    OPTIMIZERS,
    Traced,
    bits,
    dtypes,
    gradients_like,
    parameters,
    poison,
    same,
)
from support.optimizer_helpers import HALVES, assert_near, moments_of
from support.scaler_helpers import used

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from mlx_gradscale.core.eight_bit import decode, encode
from mlx_gradscale.core.masters import to_float32
from mlx_gradscale.core.state import STORAGES

# What each step is given: three finite gradients among skips, the first step included.
SCRIPT = [-INF, None, None, NAN, INF, -INF, None]


def without_empty(state):
    """Return a state without an empty parameter's, where Adafactor's becomes NaN."""
    return {p: x for p, x in tree_flatten(state) if "empty" not in p}


def same_but_empty(ours, bare):
    found = [without_empty(state) for state in (ours, bare)]
    assert len(found[0]) == len(found[1]) > 1
    return same(*found)


def compiled_parameters(dtype):
    """Fewer shapes, because Adafactor compiles a dozen kernels for each."""
    tree = parameters(dtype)
    return {"layers": tree["layers"], "frozen": tree["frozen"][:1]}


class Run:
    """One optimizer in a wrapper or, without ``state_bits``, behind a scaler."""

    def __init__(self, make, dtype, compiled, state_bits):
        self.scaler = used(GradScaler(1024.0))
        self.box = [compiled_parameters(dtype) if compiled else parameters(dtype)]
        self.inner = self.optimizer = make()
        if state_bits is None:
            self.inner.init(tree_map(to_float32, self.box[0]))
        else:
            self.optimizer = LossScaleOptimizer(
                self.inner, self.scaler, state_bits=state_bits
            )
            self.optimizer.init(self.box[0])
        self.traced = self.step = Traced(self._step)
        if compiled:
            state = [self.box, self.optimizer.state, self.scaler.state]
            self.step = mx.compile(self.traced, inputs=state, outputs=state)

    def _step(self, gradients):
        self.box[0] = self.scaler.apply_gradients(
            self.optimizer, gradients, self.box[0]
        )
        self.scaler.update()

    def masters(self):
        wrapped = self.optimizer is not self.inner
        return self.optimizer.masters(self.box[0]) if wrapped else self.box[0]

    def step_and_go_back(self, gradients):
        """Take a step, then load weights and state from before it."""
        state = dict(tree_flatten(self.optimizer.state))
        weights = tree_map(lambda x: x, self.box[0])  # mx.compile replaces its arrays
        self.step(gradients)
        self.box[0] = weights
        self.optimizer.state = state

    def trained(self):
        """Everything that a skipped step must leave alone."""
        state = {k: x for k, x in self.optimizer.state.items() if k != "scaler"}
        return bits([self.box, state])


def run_script(run, make, dtype, change=lambda bare: None):
    """Run the script; return a bare optimizer and its float32 parameters beside it.

    ``change`` is called with the bare optimizer after each step.
    """
    bare, expected = make(), tree_map(to_float32, run.box[0])
    bare.init(expected)
    paths = [path for path, x in tree_flatten(run.box[0]) if x.size]
    for i, bad in enumerate(SCRIPT):
        scale = run.scaler.state["scale"].item()
        true = gradients_like(run.box[0], i, dtype=dtype)
        scaled = tree_map(lambda g, s=scale: (g * s).astype(dtype), true)
        if i == 3 and run.optimizer is not run.inner:
            run.step_and_go_back(scaled)
        if bad is None:
            run.step(scaled)
            expected = bare.apply_gradients(tree_map(to_float32, true), expected)
            change(bare)
            assert run.scaler.last_step_applied.item()
        else:
            before = run.trained()
            run.step(poison(scaled, paths[i % len(paths)], bad))
            assert run.trained() == before, f"step {i}"
            assert not run.scaler.last_step_applied.item()
    assert run.scaler.skipped_steps.item() == 4
    assert run.scaler.get_scale() == 1024.0 / 2**4
    return bare, expected


# A kernel takes most of a second to compile, so the compiled half of the matrix has one
# dtype per optimizer, and fewer optimizers for what differs little. "autocompiled" is
# an eager loop in which the package compiles the update itself.
compiles = [pytest.mark.compiles, pytest.mark.many_kernels]
SOME = ["SGD schedule", "AdamW corrected", "Muon", "MultiOptimizer"]
DTYPES = [mx.float32, *HALVES]


@pytest.mark.parametrize(
    ("name", "dtype", "mode", "state_bits"),
    [
        *[(name, mx.float32, "eager", None) for name in OPTIMIZERS],
        *[(name, dtype, "eager", 32) for name in OPTIMIZERS for dtype in DTYPES],
        *[
            pytest.param("AdamW corrected", x, "compiled", 32, marks=compiles[0])
            for x in DTYPES
        ],
        *[pytest.param(x, mx.float32, "compiled", None, marks=compiles) for x in SOME],
        *[
            pytest.param(x, mx.float16, "autocompiled", 32, marks=compiles)
            for x in SOME
        ],
        *[
            pytest.param(name, mx.float16, "compiled", 32, marks=compiles)
            for name in OPTIMIZERS
            if name != "AdamW corrected"
        ],
    ],
)
def test_skipped_step_changes_no_bit_and_others_match_bare_steps(
    name, dtype, mode, state_bits
):
    make = OPTIMIZERS[name]
    run = Run(make, dtype, mode == "compiled", state_bits)
    bare, expected = run_script(run, make, dtype)
    assert same(run.masters(), expected)
    assert same_but_empty(run.inner.state, bare.state)
    assert same(run.box[0], tree_map(lambda x: x.astype(dtype), expected))
    assert mode != "compiled" or run.traced.count == 1


def round_moments(state_bits, optimizer):
    """Round the moments of a bare optimizer as the docstrings of the kinds say."""
    for part, box in moments_of(optimizer):
        a, b = (part.step.item() * n % 2**32 for n in (2654435769, 1779033703))
        both = np.float32((a >> 9) + 0.5 + (b >> 9) + 0.5) * np.float32(2**-23)
        factor = mx.array(1 + (both - 1) / np.float32(128))
        if state_bits == 8 and type(part) in (optim.Adam, optim.AdamW):
            dither = STORAGES[8].dither(part.step)[:2]
            box.update(decode(encode(box, part.eps, *dither).moments, part.eps))
            continue
        for key, x in box.items():
            # Adafactor's rows and columns are not of their parameter's shape.
            if not key.endswith(("row", "col")):
                box[key] = (x * factor).astype(mx.bfloat16).astype(mx.float32)


@pytest.mark.parametrize("state_bits", [16, 8])
@pytest.mark.parametrize(
    ("name", "dtype", "compiled"),
    [
        *[(name, x, False) for name in OPTIMIZERS for x in DTYPES],
        *[pytest.param(name, mx.float16, True, marks=compiles) for name in SOME],
    ],
)
def test_skipped_step_in_few_bits_changes_no_bit_and_others_match_dithered_steps(
    name, dtype, compiled, state_bits
):
    make = OPTIMIZERS[name]
    run = Run(make, dtype, compiled, state_bits)
    bare, expected = run_script(run, make, dtype, partial(round_moments, state_bits))
    masters = run.masters()
    assert name == "Adafactor" or not same_but_empty(run.inner.state, bare.state)
    for part, box in moments_of(run.inner):
        box.update(STORAGES[state_bits].decode(part, box))
    state = run.inner.state
    if dtype == mx.float32:
        assert same(masters, expected)
        assert same_but_empty(state, bare.state)
        return
    # Each of three steps may move a master weight by an ulp / 252, from either side.
    near = dict.fromkeys(("rtol", "atol"), mx.finfo(dtype).eps * 3 / 252)
    if state_bits == 16:
        near = {"rtol": 1e-6, "atol": 1e-9}
        assert same(run.box[0], tree_map(lambda x: x.astype(dtype), masters))
        if dtype == mx.bfloat16 or "AdaDelta" in name:
            near = {"rtol": 1e-4, "atol": 1e-6}
    assert_near(masters, expected, **near)
    # A moment that depends on the weights may round to the other neighbor.
    near = {"rtol": 2.0**-7, "atol": 1e-6}
    assert_near(without_empty(state), without_empty(bare.state), **near)


@pytest.mark.filterwarnings("ignore:Some parameters are float16")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["SGD", "AdamW corrected", "Adafactor", "Muon"])
def test_half_parameters_without_master_weights_step_in_float32_and_keep_their_dtype(
    name, dtype
):
    make = OPTIMIZERS[name]
    run = Run(make, dtype, compiled=False, state_bits=None)
    run_script(run, make, dtype)
    assert dtypes(run.box[0]) == {dtype}
    assert dtypes(run.inner.state).isdisjoint(HALVES)


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("norm", [None, 5.0], ids=["", "clipped"])
def test_non_finite_value_in_any_leaf_skips_the_step(value, norm):
    optimizer = MasterWeightOptimizer(optim.SGD(0.1, momentum=0.9), max_grad_norm=norm)
    weights = parameters()
    optimizer.init(weights)
    before = bits([weights, optimizer.state["optimizer"]])
    for path, x in tree_flatten(weights):
        if x.size:
            bad = poison(gradients_like(weights, 1), path, value)
            weights = optimizer.apply_gradients(bad, weights)
            assert not optimizer.scaler.last_step_applied.item(), path
            assert norm is None or not mx.isfinite(optimizer.grad_norm).item()
    assert bits([weights, optimizer.state["optimizer"]]) == before


def test_every_mlx_optimizer_is_in_the_skip_matrix():
    there = {
        name
        for name, x in vars(optim).items()
        if isinstance(x, type) and issubclass(x, optim.Optimizer)
    }
    tested = {type(make()).__name__ for make in OPTIMIZERS.values()}
    assert tested == there - {"Optimizer"}
