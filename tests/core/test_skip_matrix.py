"""A skipped step changes no bit, and a saved state resumes, in every combination."""

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
    compiled_if,
    dtypes,
    gradients_like,
    parameters,
    poison,
    same,
)
from support.optimizer_helpers import HALVES, assert_near, decoded, moments_of
from support.scaler_helpers import used

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from mlx_gradscale.core.eight_bit import EightBit, decode, encode

# What each step is given: three finite gradients among skips, the first step included.
SCRIPT = [-INF, None, None, NAN, INF, -INF, None]


def cast(tree, dtype=mx.float32):
    return tree_map(lambda x: x.astype(dtype), tree)


def without_empty(state):
    """Return a state without an empty parameter's, where Adafactor's becomes NaN."""
    return {p: x for p, x in tree_flatten(state) if "empty" not in p}


def same_but_empty(ours, bare):
    found = [without_empty(state) for state in (ours, bare)]
    assert len(found[0]) == len(found[1]) > 1
    return same(*found)


class Run:
    """One optimizer in a wrapper or, without ``state_bits``, behind a scaler."""

    def __init__(self, make, dtype, compiled, state_bits):
        self.arguments = make, dtype, compiled, state_bits
        self.scaler, tree = used(GradScaler(1024.0)), parameters(dtype)
        if compiled:  # fewer shapes: Adafactor compiles a dozen kernels for each
            tree = {"layers": tree["layers"], "frozen": tree["frozen"][:1]}
        self.box, self.inner = [tree], make()
        self.optimizer, self.is_wrapped = self.inner, state_bits is not None
        if self.is_wrapped:
            self.optimizer = LossScaleOptimizer(
                self.inner, self.scaler, state_bits=state_bits
            )
        self.optimizer.init(tree if self.is_wrapped else cast(tree))
        self.traced = Traced(self._step)
        state = self.box, self.optimizer.state, self.scaler.state
        self.step = compiled_if(compiled, self.traced, *state)

    def _step(self, gradients):
        self.box[0] = self.scaler.apply_gradients(
            self.optimizer, gradients, self.box[0]
        )
        self.scaler.update()

    def masters(self):
        return self.optimizer.masters(self.box[0]) if self.is_wrapped else self.box[0]

    def resume(self, gradients):
        """Take a step; resume before it, in a new run or, if compiled, in this one."""
        state = dict(tree_flatten(self.optimizer.state))
        weights = tree_map(lambda x: x, self.box[0])  # mx.compile replaces its arrays
        self.step(gradients)
        _, _, compiled, _ = self.arguments
        run = self if compiled else Run(*self.arguments)
        run.box[0], run.optimizer.state = weights, state
        return run

    def trained(self):
        """Everything that a skipped step must leave alone."""
        state = {k: x for k, x in self.optimizer.state.items() if k != "scaler"}
        return bits([self.box, state])


def run_script(make, dtype, compiled, state_bits, change=lambda bare: None):
    """Return a run, and a bare optimizer and its float32 parameters beside it.

    ``change`` is called with the bare optimizer after each step.
    """
    run, bare = Run(make, dtype, compiled, state_bits), make()
    expected = cast(run.box[0])
    bare.init(expected)
    paths = [path for path, x in tree_flatten(run.box[0]) if x.size]
    for i, bad in enumerate(SCRIPT):
        scale = run.scaler.get_scale()
        true = gradients_like(run.box[0], i, dtype=dtype)
        scaled = tree_map(lambda g, s=scale: (g * s).astype(dtype), true)
        if i == 3 and run.is_wrapped:
            run = run.resume(scaled)
        if bad is None:
            run.step(scaled)
            expected = bare.apply_gradients(cast(true), expected)
            change(bare)
        else:
            before = run.trained()
            run.step(poison(scaled, paths[i % len(paths)], bad))
            assert run.trained() == before, f"step {i}"
        assert run.scaler.last_step_applied.item() == (bad is None)
    assert run.scaler.skipped_steps.item() == 4
    assert run.scaler.get_scale() == 1024.0 / 2**4
    return run, bare, expected


# A kernel takes most of a second to compile, so the compiled half of the matrix has one
# dtype per optimizer, and fewer optimizers for what differs little. "autocompiled" is
# an eager loop in which the package compiles the update itself.
compiles = [pytest.mark.compiles, pytest.mark.many_kernels]
SOME = ["SGD schedule", "AdamW corrected", "Muon", "MultiOptimizer"]
OTHERS = [name for name in OPTIMIZERS if name != "AdamW corrected"]
DTYPES = [mx.float32, *HALVES]


def each(names, dtypes, *more, marks=compiles):
    return [pytest.param(n, x, *more, marks=marks) for n in names for x in dtypes]


@pytest.mark.parametrize(
    ("name", "dtype", "mode", "state_bits"),
    [
        *each(OPTIMIZERS, [mx.float32], "eager", None, marks=()),
        *each(OPTIMIZERS, DTYPES, "eager", 32, marks=()),
        *each(["AdamW corrected"], DTYPES, "compiled", 32, marks=compiles[0]),
        *each(SOME, [mx.float32], "compiled", None),
        *each(SOME, [mx.float16], "autocompiled", 32),
        *each(OTHERS, [mx.float16], "compiled", 32),
    ],
)
def test_skipped_step_changes_no_bit_and_others_match_bare_steps(
    name, dtype, mode, state_bits
):
    make, compiled = OPTIMIZERS[name], mode == "compiled"
    run, bare, expected = run_script(make, dtype, compiled, state_bits)
    assert same(run.masters(), expected)
    assert same_but_empty(run.inner.state, bare.state)
    assert same(run.box[0], cast(expected, dtype))
    assert not compiled or run.traced.count == 1


def round_moments(state_bits, optimizer):
    """Round the moments of a bare optimizer as the docstrings of the kinds say."""
    for part, box in moments_of(optimizer):
        a, b = (part.step.item() * n % 2**32 for n in (2654435769, 1779033703))
        both = np.float32((a >> 9) + 0.5 + (b >> 9) + 0.5) * np.float32(2**-23)
        factor = mx.array(1 + (both - 1) / np.float32(128))
        if state_bits == 8 and type(part) in (optim.Adam, optim.AdamW):
            dither = EightBit().dither(part.step)[:2]
            box.update(decode(encode(box, part.eps, *dither).moments, part.eps))
            continue
        for key, x in box.items():
            # Adafactor's rows and columns are not of their parameter's shape.
            if not key.endswith(("row", "col")):
                box[key] = (x * factor).astype(mx.bfloat16).astype(mx.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "compiled", "state_bits"),
    [
        *each(OPTIMIZERS, DTYPES, False, 16, marks=()),
        *each(OPTIMIZERS, DTYPES, False, 8, marks=()),
        *each(SOME, [mx.float16], True, 16),
        *each(SOME, [mx.float16], True, 8),
        # AdamW takes one kernel in bfloat16; corrected or in float16, it takes two.
        *each(OPTIMIZERS, [mx.bfloat16], True, 8),
        *each(["AdamW"], [mx.float16], True, 8),
    ],
)
def test_skipped_step_in_few_bits_changes_no_bit_and_others_match_dithered_steps(
    name, dtype, compiled, state_bits
):
    make = OPTIMIZERS[name]
    run, bare, expected = run_script(
        *(make, dtype, compiled, state_bits), lambda x: round_moments(state_bits, x)
    )
    masters = run.masters()
    assert name == "Adafactor" or not same_but_empty(run.inner.state, bare.state)
    state = decoded(run.optimizer, make(), run.box[0]).state
    if dtype == mx.float32:
        assert same(masters, expected)
        assert same_but_empty(state, bare.state)
        return
    # Each of three steps may move a master weight by an ulp / 252, from either side.
    near = dict.fromkeys(("rtol", "atol"), mx.finfo(dtype).eps * 3 / 252)
    if state_bits == 16:
        near = {"rtol": 1e-6, "atol": 1e-9}
        assert same(run.box[0], cast(masters, dtype))
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
    run, _, _ = run_script(OPTIMIZERS[name], dtype, compiled=False, state_bits=None)
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
    kinds = [x for x in vars(optim).values() if isinstance(x, type)]
    there = {x.__name__ for x in kinds if issubclass(x, optim.Optimizer)}
    tested = {type(make()).__name__ for make in OPTIMIZERS.values()}
    assert tested == there - {"Optimizer"}
