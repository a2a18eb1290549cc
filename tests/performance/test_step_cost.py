"""What a compiled step costs, counted: kernels, bytes, buffers, traces, memory.

These numbers rest on how MLX's compiler fuses, so a new MLX may move them although
nothing that a user sees has changed.
"""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from support.helpers import OPTIMIZERS, Mlp, batch, mse

from benchmarks import first_step, peak_memory, steps
from benchmarks.bytes_and_kernels import count, count_kernels, read_graph
from benchmarks.steps import CASES, Case, arrays_of
from mlx_gradscale import GradScaler, LossScaleOptimizer
from mlx_gradscale.core import guard

ROOT = Path(__file__).parents[2]

# MLX's optimizers whose update is elementwise, so that it can be one kernel.
NOT_ELEMENTWISE = {"Adafactor", "Adafactor moment", "Muon", "MultiOptimizer"}
ELEMENTWISE = [name for name in OPTIMIZERS if name not in NOT_ELEMENTWISE]


def step_of(case, leaves=4, shape=(8, 8)):
    return steps.scaled_step(case, case.gradients([shape] * leaves))


def kernels_per_leaf(case):
    few, many = (count(step_of(case, leaves))[1] for leaves in (32, 64))
    return (many - few) / 32


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_leaf_costs_at_most_one_and_a_quarter_kernels(name):
    assert kernels_per_leaf(Case(OPTIMIZERS[name])) <= 1.25


@pytest.mark.parametrize("name", CASES)
def test_each_leaf_costs_at_most_two_kernels_in_every_mode(name):
    assert kernels_per_leaf(CASES[name]) <= 2.25


# Bytes per parameter that a step reads and writes as on a GPU, where half gradients are
# unscaled inside the update kernel; MLX's AdamW alone moves 28.
MOVED = {
    "AdamW, float32": 33.0,
    "AdamW, float32, max_grad_norm": 33.0,
    "AdamW, float16, float32 master weights": 34.5,
    "AdamW, float16, remainders": 28.5,
    "AdamW, float32 computed in float16": 28.5,
    "SGD with momentum, float32": 25.0,
    "Lion, float32": 25.0,
}


@pytest.mark.parametrize("name", MOVED)
def test_step_moves_no_more_bytes_than_previously_recorded(name, monkeypatch):
    monkeypatch.setattr(guard, "casts_first", lambda: False)
    moved, _ = count(step_of(CASES[name], leaves=16, shape=(256, 256)))
    assert moved / (16 * 256 * 256) <= MOVED[name] + 0.1


@pytest.mark.parametrize("name", CASES)
def test_no_fused_kernel_takes_more_buffers_than_metal_allows(name):
    # Metal has 31 per kernel, and MLX needs three for shape, strides and their number.
    step = step_of(CASES[name])
    known = arrays_of([step.state, step.gradients])
    primitives = read_graph(arrays_of(step.start()), known)
    made = {output for primitive in primitives for output in primitive.outputs}
    fused = [each for each in primitives if each.name.startswith("Compiled")]
    assert fused
    for primitive in fused:
        # Constants are printed into the kernel: no name, and nothing makes them.
        given = {x for x in primitive.inputs if x in made or x.startswith("array")}
        assert len(given) + len(primitive.outputs) <= 28, primitive


# Bytes per parameter: kept between steps, and beyond that at the peak of an update, as
# on a GPU. An update writes new arrays for all that is kept, and the check joins eight
# leaves into one, which takes half a byte for float32.
MEMORY = {
    "AdamW, float32, MLX alone": (12, 12),
    "AdamW, float32": (12, 12.5),
    "AdamW, float32, max_grad_norm": (12, 12.5),
    "AdamW, float16, float32 master weights": (14, 14.25),
    "AdamW, float16, remainders": (12, 12.25),
    "AdamW, float32 computed in float16": (12, 12.25),
}


@pytest.mark.parametrize("name", peak_memory.RUNS)
def test_step_takes_no_more_bytes_per_parameter_than_documented(name, monkeypatch):
    monkeypatch.setattr(guard, "casts_first", lambda: False)
    most_kept, most_added = MEMORY[name]
    kept, _ = peak_memory.whole_step(name, width=128)
    assert kept == pytest.approx(most_kept, abs=0.1)
    assert peak_memory.update(name) <= most_added + 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="MLX keeps kernels elsewhere.")
def test_first_step_builds_at_most_four_more_kernels_than_a_bare_step(tmp_path):
    built = {}
    for variant in first_step.VARIANTS:
        folder = tmp_path / variant
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-m", "benchmarks.first_step", variant, "16"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        built[variant] = len(list(folder.rglob("*.so")))
    assert built["scaled"] <= built["bare"] + 4, built


@pytest.mark.parametrize("kind", ["scaler", "wrapper", "clipped"])
def test_unscaled_gradients_cost_kernels_only_if_they_are_read(kind):
    mx.random.seed(0)
    model, scaler, inner = Mlp(), GradScaler(64.0), optim.AdamW(1e-2)
    norm = 1.0 if kind == "clipped" else None
    optimizer = LossScaleOptimizer(inner, scaler, max_grad_norm=norm)
    loss_and_grad = scaler.value_and_grad(model, mse(model))
    state = [model.state, optimizer.state]
    for _ in range(3):
        mx.eval(state)
        _, grads = loss_and_grad(*batch())
        if kind == "scaler":
            scaler.minimize(inner, model, grads)
        else:
            optimizer.update(model, grads)
    n_leaves = len(tree_flatten(grads))
    read = count_kernels([state, grads]).total()
    assert read >= count_kernels(state).total() + n_leaves
