"""Float16 with the wrapper trains as well as float32; plain float16 does not."""

import math
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from mlx_gradscale import GradScaler
from mlx_gradscale.diagnostics import gradient_histogram

pytest.importorskip("tqdm", reason="the examples are not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import quickstart


@pytest.fixture(scope="module")
def results():
    return {
        name: quickstart.train(dtype, make(), steps=100)
        for name, (dtype, make) in quickstart.ways().items()
    }


def test_the_wrapper_ends_within_two_percent_of_float32(results):
    expected = results["float32"]["loss"]
    found = results["float16 + LossScaleOptimizer"]["loss"]
    # From log(128) = 4.85; both must have learned for the comparison to mean much.
    assert expected < 3.0
    assert found == pytest.approx(expected, rel=0.02)


def test_plain_float16_is_lost(results):
    loss = results["float16"]["loss"]
    assert math.isnan(loss) or loss > 1.2 * results["float32"]["loss"]


def test_how_much_of_the_gradients_float16_loses(results):
    # Measured: 0.003 percent underflow, 6 percent are subnormal. So underflow is not
    # what ruins plain float16 above; Adam's epsilon, zero in float16, is.
    shares = gradient_histogram(results["float32"]["gradients"]).unscaled
    assert shares.underflow > 0
    assert shares.underflow + shares.subnormal > 0.02


def test_without_scaling_even_sgd_in_float16_is_worse():
    # No Adam, whose epsilon is zero in float16: the loss of a batch, made small as
    # averaging over many more tokens makes it, and a learning rate that undoes it.
    small = 2.0**-14
    losses = {}
    for name, scaler in {
        "scaled": GradScaler(init_scale=2.0**14),
        "plain": GradScaler(enabled=False),
    }.items():
        mx.random.seed(0)
        model = quickstart.Transformer(width=32, layers=1)
        optimizer = optim.SGD(0.5 / small)

        def loss_fn(tokens, targets, model=model):
            logits = model(tokens).astype(mx.float32)
            entropy = quickstart.nn.losses.cross_entropy(
                logits, targets, reduction="mean"
            )
            return entropy * small

        loss_and_grad = scaler.value_and_grad(model, loss_fn, mx.float16)
        training, _ = quickstart.text()
        for tokens, targets in quickstart.batches(training, 30, 1):
            loss, gradients = loss_and_grad(tokens, targets)
            scaler.minimize(optimizer, model, gradients)
            mx.eval(model.state, optimizer.state, scaler.state)
        losses[name] = loss.item() / small
    assert losses["scaled"] < losses["plain"] - 0.05
