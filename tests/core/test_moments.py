"""Master weights and moments in fewer bytes: ``state_bits=16`` and ``8``."""

import math

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import OPTIMIZERS, gradients_like
from support.optimizer_helpers import HALVES, Training, wrapped

from mlx_gradscale import LossScaleOptimizer, MasterWeightOptimizer


def nbytes(tree):
    return sum(x.nbytes for _, x in tree_flatten(tree) if x.ndim)


# Weight 2, master weight 4, 2 or 1, and the moments; float32 weights are their own
# masters. Adafactor's rows and columns are 1/8 of a byte here.
BYTES = {
    "AdamW": (lambda: optim.AdamW(1e-3), {32: 14, 16: 8, 8: 5}, {32: 12, 16: 8, 8: 6}),
    "Lion": (lambda: optim.Lion(1e-3), {32: 10, 16: 6, 8: 5}, {32: 8, 16: 6, 8: 6}),
    "SGD momentum": (
        lambda: optim.SGD(1e-3, momentum=0.9),
        {32: 10, 16: 6, 8: 5},
        {32: 8, 16: 6, 8: 6},
    ),
    "Adafactor": (
        optim.Adafactor,
        {32: 6.25, 16: 4.25, 8: 3.25},
        dict.fromkeys((32, 16, 8), 4.25),
    ),
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("dtype", [*HALVES, mx.float32])
def test_state_takes_as_many_bytes_per_parameter_as_documented(name, dtype):
    make, half, full = BYTES[name]
    taken = {}
    for state_bits in half:
        weights = {"w": mx.ones((32, 32), dtype)}
        optimizer = wrapped(make(), state_bits=state_bits)
        optimizer.init(weights)
        for seed in range(2):
            gradients = gradients_like(weights, seed)
            weights = optimizer.apply_gradients(gradients, weights)
        # The written bits are the weight's own memory.
        state = {k: x for k, x in optimizer.state.items() if k != "written"}
        taken[state_bits] = nbytes([weights, state]) / 1024
    assert taken == (full if dtype == mx.float32 else half)


COMPILED = [pytest.mark.compiles, pytest.mark.many_kernels]


# AdamW takes one kernel in bfloat16; with bias correction or in float16, it takes two.
@pytest.mark.parametrize(
    ("name", "dtype", "compiled"),
    [
        *[(name, dtype, False) for name in OPTIMIZERS for dtype in HALVES],
        *[pytest.param(name, mx.bfloat16, True, marks=COMPILED) for name in OPTIMIZERS],
        pytest.param("AdamW", mx.float16, True, marks=COMPILED),
    ],
)
def test_run_in_8_bits_resumes_bit_identically(name, dtype, compiled):
    runs = [
        Training(OPTIMIZERS[name](), dtype, compiled, max_grad_norm=1.0, state_bits=8)
        for _ in range(2)
    ]
    first, second = runs
    first.run(range(3), bad=(1,))
    second.model.update(first.model.parameters())
    second.optimizer.state = dict(tree_flatten(first.optimizer.state))
    for run in runs:
        run.run(range(3, 6), bad=(4,))
    assert first.everything() == second.everything()


@pytest.mark.parametrize("state_bits", [16, 8])
def test_moments_decay_where_rounding_to_the_nearest_would_freeze_them(state_bits):
    start = {"w": mx.linspace(0.5, 2.0, 256)}
    optimizer = MasterWeightOptimizer(optim.Adam(0.0), state_bits=state_bits)
    storage = optimizer._storage

    def second_moment():
        return storage.decode(optimizer.optimizer, optimizer.state["w"])["v"]

    optimizer.init(start)
    optimizer.apply_gradients(start, start)
    first = second_moment()
    none = {"w": mx.zeros(256)}
    for _ in range(800):
        optimizer.apply_gradients(none, start)
        mx.eval(optimizer.state)
    # To the nearest, v would not change at all.
    rounded = storage.encode(
        optimizer.optimizer, (256,), {"m": first, "v": first}
    ).moments
    smaller = {"m": first * 0.999, "v": first * 0.999}
    again = storage.encode(optimizer.optimizer, (256,), smaller).moments
    assert mx.array_equal(again["v"], rounded["v"])
    # A code of 8 bits is 28 percent from the next.
    decay = mx.log(second_moment() / first)
    expected = 800 * math.log(0.999)
    assert mx.mean(decay).item() == pytest.approx(expected, abs=0.05)
    near = {16: 0.15, 8: 0.6}[state_bits]
    assert mx.max(mx.abs(decay - expected)).item() < near


@pytest.mark.parametrize("state_bits", [16, 8])
def test_few_state_bits_of_a_third_party_optimizer_are_refused(state_bits):
    inner = optim.MultiOptimizer([type("Own", (optim.Adam,), {})(0.1)], [])
    with pytest.raises(ValueError, match="Own manages its own state"):
        LossScaleOptimizer(inner, state_bits=state_bits)


@pytest.mark.parametrize("eps", [0.0, 1e-13, float("nan")])
def test_state_bits_8_refuses_an_eps_that_its_codes_cannot_represent(eps):
    optimizer = wrapped(optim.AdamW(1e-3), state_bits=8)
    optimizer.eps = eps
    with pytest.raises(ValueError, match="state_bits=8 requires an eps of at least"):
        optimizer.init({"w": mx.ones(2, mx.float16)})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-3])
def test_gradients_of_every_size_leave_finite_weights_in_8_bits(dtype, eps):
    sizes = 10.0 ** mx.arange(-30, 16)
    weights = {"w": mx.concatenate([mx.full(46, 0.01), mx.zeros(46)]).astype(dtype)}
    optimizer = wrapped(optim.AdamW(1e-3, eps=eps), state_bits=8)
    for i in range(30):
        # Spikes, silence, and changes of sign; zeros stay zero.
        gradients = sizes * [1, -1, 1e-3, 0, 0, 0][i % 6]
        gradients = {"w": mx.concatenate([gradients, gradients * 0])}
        weights = optimizer.apply_gradients(gradients, weights)
    masters = optimizer.masters(weights)["w"]
    assert mx.all(mx.isfinite(masters)).item()
    # 30 steps of at most 16 times the rate, where v has its largest code.
    assert mx.max(mx.abs(masters)).item() < 0.5
    assert not mx.any(masters[46:]).item()
