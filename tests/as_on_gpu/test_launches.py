"""What a step costs on a GPU: how many kernels, bytes per parameter, and memory.

The tool raises an error for a kernel with more than 31 buffers or without elements, so
every step that is evaluated under it is also checked for that.
"""

import itertools
import re

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import OPTIMIZERS, Mlp, batch
from support.optimizer_helpers import loop_of

from benchmarks import peak_memory, steps
from benchmarks.steps import Case
from tools.as_on_gpu import record

LEAVES, SHAPE, SIZE = 16, (64, 128), 64 * 128
CHECKED_TOGETHER = 8  # leaves of one shape
# The arithmetic of the scale, the counters, the step count and the dither of 16 bits.
MOST_SCALAR_LAUNCHES = 14

# MLX's optimizers whose update is elementwise, so that it can be one kernel.
NOT_ELEMENTWISE = {"Adafactor", "Adafactor moment", "Muon", "MultiOptimizer"}
ELEMENTWISE = [name for name in OPTIMIZERS if name not in NOT_ELEMENTWISE]
# The bytes per parameter that an optimizer reads and writes for float32 moments.
MOMENTS = {"SGD": 0, "SGD momentum": 8, "Lion": 8, "Adam": 16, "AdamW": 16}
MOMENTS["AdamW corrected"] = 16

# Arguments of a Case, and the bytes per parameter that its step moves for weights and
# gradients, plain and clipped. For example, float32 weights are read and written (8),
# their gradients are read by the check and by the update (8), and the check joins eight
# leaves into one, which it writes and reads (1; from half gradients 0.5, squares 1).
MODES = {
    "float32": ({}, 17.0, 17.0),
    "float32 computed in float16": ({"compute_dtype": mx.float16}, 12.5, 13.0),
    "float32 computed in bfloat16": ({"compute_dtype": mx.bfloat16}, 12.5, 13.0),
}
for half in (mx.float16, mx.bfloat16):
    name = str(half).removeprefix("mlx.core.")
    MODES[name] = ({"dtype": half}, 16.5, 17.0)
    MODES[f"{name}, 16 bits"] = ({"dtype": half, "state_bits": 16}, 12.5, 13.0)
    MODES[f"{name}, 8 bits"] = ({"dtype": half, "state_bits": 8}, 10.5, 11.0)
for bits in (16, 8):
    MODES[f"float32, {bits} bits"] = ({"state_bits": bits}, 17.0, 17.0)


def launches_of(case, compiled=True, shapes=(SHAPE,) * LEAVES, transposed=False):
    """Record the third step, after the first ones have made state and warnings."""
    gradients = case.gradients(shapes)
    if transposed:
        gradients = [g.T for g in gradients]
    step = steps.scaled_step(case, gradients, compiled)
    step.run()
    step.run()
    with record() as launches:
        step.run()
    return launches


def kernels_of(case, name):
    """Return the number of update kernels per leaf: two for some in 8 bits."""
    if case.state_bits != 8 or case.dtype == mx.float32:
        return 1
    return (
        2
        if case.dtype == mx.float16 or re.match("SGD|AdaDelta|.*corrected", name)
        else 1
    )


def check_kernels(launches, case, name):
    """Check the number of kernels of a step, besides those of the finite check."""
    whole = [x for x in launches if x.elements == SIZE]
    assert {x.primitive for x in whole} == {"Compiled"}, case
    expected = kernels_of(case, name) * LEAVES + LEAVES // CHECKED_TOGETHER
    assert len(whole) == expected, case


def check_launches(launches, case, name, moved):
    """Check the number of kernels of a step, and the bytes it moves per parameter."""
    is_coded = case.state_bits == 8 and name.startswith("Adam")
    moved += MOMENTS[name] / (4 if is_coded else 2 if case.state_bits < 32 else 1)
    # A second kernel reads the new master weight, which the first one has written, and
    # the old weight and remainder once more.
    moved += 11 * (kernels_of(case, name) - 1)
    check_kernels(launches, case, name)
    reductions = [x for x in launches if x.elements == 1 and x.bytes > SIZE]
    # Metal reduces arrays of this size in two launches.
    assert [x.count for x in reductions] == [2] * (LEAVES // CHECKED_TOGETHER)
    most = MOST_SCALAR_LAUNCHES + 2 * (case.state_bits == 8) + 3 * ("corr" in name)
    assert sum(x.elements == 1 for x in launches) - len(reductions) <= most
    assert not any(x.elements not in (1, SIZE) for x in launches)
    # In quarters of a byte: what scalars take is less than that.
    assert sum(x.bytes for x in launches) * 4 // (LEAVES * SIZE) / 4 == moved


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MOMENTS)
def test_step_has_as_many_kernels_per_parameter_and_bytes_as_documented(name, mode):
    given, *bases = MODES[mode]
    for (clip, base), compiled in itertools.product(enumerate(bases), (True, False)):
        case = Case(OPTIMIZERS[name], clip=bool(clip), **given)
        check_launches(launches_of(case, compiled), case, name, base)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_linear_layers_which_are_column_major_are_not_copied(mode):
    given, moved, _ = MODES[mode]
    case = Case(**given)
    launches = launches_of(case, shapes=(SHAPE[::-1],) * LEAVES, transposed=True)
    check_launches(launches, case, "AdamW", moved)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_without_elements_launches_nothing(mode):
    given, *_ = MODES[mode]
    for name, clip, compiled in itertools.product(
        MOMENTS, (False, True), (True, False)
    ):
        case = Case(OPTIMIZERS[name], clip=clip, **given)
        launches = launches_of(case, compiled, [(0, 3), (2, 3)])
        assert launches
        assert all(x.elements for x in launches)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_is_one_kernel_per_parameter_or_two_in_8_bits(name):
    for mode, (given, *_) in MODES.items():
        if name == "AdaDelta" and mode.endswith("bits") and "float16, 8" not in mode:
            continue  # deeper than the 11 primitives that MLX fuses: 5 or 6 kernels
        case = Case(OPTIMIZERS[name], clip=True, **given)
        check_kernels(launches_of(case), case, name)


@pytest.mark.parametrize("kind", ["scaler", "wrapper", "clipped"])
def test_unscaled_gradients_cost_kernels_only_if_they_are_read(kind):
    model, norm = Mlp(), 1.0 if kind == "clipped" else None
    optimizer, loss_and_grad, update = loop_of(
        kind, model, optim.AdamW(1e-2), max_grad_norm=norm
    )
    for _ in range(3):
        _, grads = loss_and_grad(*batch())
        update(model, grads)
        mx.eval(model.state, optimizer.state)
    with record() as launches:
        mx.eval(grads)
    assert len(launches) >= len(tree_flatten(grads))


def test_mlx_fuses_outputs_with_a_common_root_into_one_kernel():
    def separate(a, b):
        return a * 2 + b, a * 2 - b

    def joined(a, b):
        plus, minus = separate(a, b)
        return mx.where(True, plus, minus), minus

    a, b = mx.ones(8), mx.ones(8)
    mx.eval(a, b)
    with record() as apart:
        mx.eval(mx.compile(separate)(a, b))
    with record() as fused:
        mx.eval(mx.compile(joined)(a, b))
    assert len(apart) > len(fused) == 1


# Bytes per parameter: kept between steps, and beyond that at the peak of an update. All
# gradients are in memory before. A parameter waits for the one before, so new arrays
# replace old ones.
MEMORY = {
    "float32": (12, 8),
    "bfloat16, 32 bits": (14, 8),
    "bfloat16, 16 bits": (8, 8),
    "bfloat16, 8 bits": (5, 3),
}


@pytest.mark.parametrize("name", peak_memory.RUNS)
def test_step_takes_no_more_bytes_per_parameter_than_documented(name):
    most_kept, most_added = MEMORY[name.removesuffix(", clipped")]
    kept, _, _ = peak_memory.whole_step(name, n_layers=8, width=128)
    assert kept == pytest.approx(most_kept, abs=0.1)
    assert peak_memory.update(name) <= most_added + 0.01
