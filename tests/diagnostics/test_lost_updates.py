"""``lost_updates`` against real steps in float32 and in half precision."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.helpers import INF, OPTIMIZERS, bits, model_state, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from mlx_gradscale.diagnostics import lost_updates

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}


def make(dtype=mx.bfloat16, layers=()):
    mx.random.seed(0)
    model = nn.Sequential(
        *(nn.Linear(8, 64), *layers, nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, 1),
    )
    model.set_dtype(dtype)
    x = mx.random.normal((64, 8), key=mx.random.key(1))
    return model, mse(model), x.astype(dtype), x.sum(axis=1, keepdims=True)


def measure(optimizer, *run):
    """Check that asking changes nothing, and return the report."""
    before = model_state(run[0]), bits(optimizer.state)
    report = lost_updates(optimizer, *run)
    assert (model_state(run[0]), bits(optimizer.state)) == before
    return report


def weights(parameters):
    arrays = [np.array(x.astype(mx.float32)) for _, x in tree_flatten(parameters)]
    return np.concatenate([x.ravel() for x in arrays]).astype(float)


def train(optimizer, model, loss_fn, *batch, steps=1):
    """Step a model in place, and return the change of all its weights."""
    before = weights(model.parameters())
    differentiate = getattr(optimizer, "value_and_grad", nn.value_and_grad)
    for _ in range(steps):
        _, gradients = differentiate(model, loss_fn)(*batch)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
    return weights(model.parameters()) - before


def shares(moved, update):
    lost = 1 - moved @ update / (update @ update)
    return pytest.approx((lost, np.mean((moved == 0)[update != 0])), abs=0.01)


def float32_twin(make_optimizer, optimizer, model, dtype):
    """The same weights, moments and batch in float32."""
    twin, full = make_optimizer(), make(mx.float32)
    full[0].update(tree_map(lambda x: x.astype(mx.float32), model.parameters()))
    twin.init(full[0].trainable_parameters())
    if optimizer.state["step"].item():
        twin.state = tree_map(
            lambda x: x.astype(mx.float32) if x.dtype == dtype else x, optimizer.state
        )
    return twin, *full


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize(
    "make_optimizer",
    [lambda: optim.Lion(1e-5), lambda: optim.SGD(1e-2, momentum=0.9)],
    ids=["Lion", "SGD"],
)
def test_shares_are_those_of_a_real_step_beside_a_float32_step(
    make_optimizer, dtype, steps
):
    optimizer, run = make_optimizer(), make(dtype)
    train(optimizer, *run, steps=steps)
    report = measure(optimizer, *run)
    update = train(*float32_twin(make_optimizer, optimizer, run[0], dtype))
    assert (report.lost, report.stuck) == shares(train(optimizer, *run), update)


# The first update of AdamW without bias correction is 3.2 times the rate.
@pytest.mark.parametrize(
    ("rate", "lost", "stuck"),
    [(1e-5, 0.83, 0.89), (1e-4, -0.13, 0.12), (1e-3, 0.03, 0.05)],
)
def test_adamw_in_bfloat16_loses_most_of_an_update_at_a_small_rate(rate, lost, stuck):
    run = make()
    report = measure(optim.AdamW(rate), *run)
    assert report.lost == pytest.approx(lost, abs=0.02)
    assert report.stuck == pytest.approx(stuck, abs=0.02)
    twin = float32_twin(lambda: optim.AdamW(rate), optim.AdamW(rate), run[0], None)
    moved, update = train(optim.AdamW(rate), *run), train(*twin)
    assert (report.lost, report.stuck) == shares(moved, update)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"state_bits": 16}])
@pytest.mark.parametrize("wrapper", [MasterWeightOptimizer, LossScaleOptimizer])
def test_wrapper_reports_what_its_weights_would_lose_without_it(
    wrapper, options, steps
):
    optimizer, run = wrapper(optim.AdamW(1e-5), **options), make()
    train(optimizer, *run, steps=steps)
    report = measure(optimizer, *run)
    start = run[0].parameters()
    before = weights(optimizer.masters(start))
    train(optimizer, *run)
    update = weights(optimizer.masters(run[0].parameters())) - before
    start = weights(start)
    added = mx.array((start + update).astype(np.float32)).astype(mx.bfloat16)
    assert (report.lost, report.stuck) == shares(weights(added) - start, update)
    assert report.lost > 0.6


def test_sharing_a_state_with_init_or_a_load_gives_the_same_report():
    run = make()
    trained = MasterWeightOptimizer(optim.AdamW(1e-5), state_bits=16)
    train(trained, *run, steps=3)
    loaded = MasterWeightOptimizer(optim.AdamW(1e-5), state_bits=16)
    loaded.state = tree_map(mx.array, trained.state)  # waits for init()
    assert measure(loaded, *run) == measure(trained, *run)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_measured_with_dropout_batch_norm_and_frozen_layers(name):
    model, *run = make(layers=[nn.BatchNorm(64), nn.Dropout(0.5)])
    model.layers[4].freeze()
    for optimizer in (OPTIMIZERS[name](), MasterWeightOptimizer(OPTIMIZERS[name]())):
        for _ in range(2):
            report = measure(optimizer, model, *run)
            assert 0 <= report.stuck <= 1 > report.lost
            assert report.layers.keys() == {"layers.0", "layers.1", "layers.6"}
            optimizer.init(model.trainable_parameters())


def test_update_of_zero_gives_nan_and_says_so():
    warmup = optim.linear_schedule(0.0, 1e-3, 10)
    report = measure(optim.AdamW(warmup), *make())
    assert math.isnan(report.lost)
    assert math.isnan(report.stuck)
    assert "zero everywhere, as in the first step of a warm-up" in str(report)


def test_non_finite_update_is_reported_instead_of_measured():
    model, _, *batch = make()
    bad = model, lambda x, y: INF * model(x).sum(), *batch
    report = measure(optim.AdamW(1e-5), *bad)
    assert math.isnan(report.lost)
    assert "The update of this batch is non-finite" in report.verdict


def test_float32_weights_lose_nothing():
    report = measure(optim.AdamW(1e-5), *make(mx.float32))
    assert (report.lost, report.stuck) == (pytest.approx(0, abs=1e-3), 0)
    assert report.verdict == "Plain float32 would lose 0% of an update at 1e-5."


def test_table_lists_the_ten_worst_layers_and_a_verdict():
    model, *run = make(layers=[nn.Linear(64, 64) for _ in range(20)])
    report = measure(optim.AdamW(1e-5), model, *run)
    header, *rows, more, total, verdict = str(report).splitlines()
    assert header.split() == ["layer", "lost", "stuck"]
    lost = [report.layers[row.split()[0]].lost for row in rows]
    assert lost == sorted((x.lost for x in report.layers.values()), reverse=True)[:10]
    assert more == "13 more"
    assert total.split() == ["all", "layers", *total.split()[2:]]
    assert (
        verdict == f"Plain bfloat16 would lose {report.lost:.0%} of an update at 1e-5."
    )


def test_scale_of_a_float16_run_keeps_gradients_that_would_underflow():
    model, loss_fn, *batch = make(mx.float16)
    run = model, lambda x, y: 1e-9 * loss_fn(x, y), *batch
    assert math.isnan(measure(optim.SGD(1e5), *run).lost)
    optimizer = LossScaleOptimizer(optim.SGD(1e5), GradScaler(2.0**24))
    assert measure(optimizer, *run).lost < 1


def test_peak_memory_is_that_of_the_gradients_and_one_weight():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(32)))
    model.set_dtype(mx.bfloat16)
    x, size = mx.ones((4, 256), mx.bfloat16), 32 * 256 * 257
    mx.eval(model.parameters())
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    lost_updates(optim.AdamW(1e-5), model, lambda x: model(x).sum(), x)
    # Master weights, moments and updates in float32 would take 16 bytes.
    assert (mx.get_peak_memory() - start) / size < 5


def test_what_is_not_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"mlx\.optimizers\.Optimizer"):
        lost_updates(1e-5, *make())
