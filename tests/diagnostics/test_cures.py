"""The line that explain_overflow prints makes the model train."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

import mlx_gradscale
from mlx_gradscale import GradScaler, LossScaleOptimizer, find_float32_layers
from mlx_gradscale.diagnostics import explain_overflow

HALF = mx.float16
X = mx.random.normal((16, 8), key=mx.random.key(0))
Y = mx.roll(X, 1, axis=1)
BATCH = X.astype(HALF), Y.astype(HALF)


class Net(nn.Module):
    """Adds ``gain`` times the output of a layer, and normalises the sum."""

    def __init__(self, gain=1.0, dtype=HALF):
        super().__init__()
        mx.random.seed(1)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 8)
        self.gain = gain
        self.set_dtype(dtype)

    def __call__(self, x):
        x = x + self.first(x)
        return self.head(self.norm(x + self.gain * self.second(x)))


def mse(model):
    def loss_fn(x, y):
        off = model(x).astype(mx.float32) - y.astype(mx.float32)
        return off.square().mean()

    return loss_fn


def paste(report, model):
    """Run the line that the report prints, and nothing else."""
    *_, line = report.line.splitlines()
    assert line.strip() in str(report)
    exec(line.strip(), {"mlx_gradscale": mlx_gradscale, "model": model})


def check_that_it_trains(model, loss_fn, batch, scale=16.0, rate=0.05, dtype=None):
    optimizer = LossScaleOptimizer(optim.SGD(rate), GradScaler(scale))
    loss_and_grad = optimizer.value_and_grad(model, loss_fn, dtype)
    losses = []
    for _ in range(8):
        loss, grads = loss_and_grad(*batch)
        optimizer.update(model, grads)
        losses.append(loss.item())
    assert optimizer.scaler.skipped_steps.item() <= 2
    assert losses[-1] < losses[0]


def test_cure_of_a_float16_model_trains():
    model, optimizer = Net(gain=1e5), LossScaleOptimizer(optim.SGD(0.05))
    scaled = optimizer.scale_loss(mse(model), model)
    for loss_fn, options in ((scaled, {}), (mse(model), {"scale": optimizer})):
        report = explain_overflow(model, loss_fn, *BATCH, **options)
        assert (report.cause, report.layer) == ("forward", "")
        assert "The input of norm" in str(report)
        assert "the code of the model computes" in str(report)
    # A float32 norm, where the overflow was seen, would change nothing.
    assert report.cure != ["norm"]
    paste(report, model)
    check_that_it_trains(model, mse(model), BATCH)


def test_cure_of_a_model_with_compute_dtype_trains():
    model = Net(gain=1e5, dtype=mx.float32)
    report = explain_overflow(model, mse(model), X, Y, scale=16.0, compute_dtype=HALF)
    assert report.cause == "forward"
    paste(report, model)
    check_that_it_trains(model, mse(model), (X, Y), dtype=HALF)


@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_cure_of_a_loss_reduced_in_float16_trains():
    model = Net()

    def loss_fn(x, y):
        return mx.square(model(x) - 300 * y).mean()

    report = explain_overflow(model, loss_fn, *BATCH)
    assert (report.cause, report.layer) == ("loss", None)
    assert report.cure == ["head to the loss"]
    paste(report, model)
    check_that_it_trains(model, loss_fn, BATCH, scale=1.0, rate=1e-5)


def test_too_large_parameter_gets_a_float32_layer():
    model = Net(dtype=mx.float32)
    model.norm.weight = mx.full((8,), 1e5)
    model.head.weight /= 1e5
    report = explain_overflow(model, mse(model), X, Y, compute_dtype=HALF)
    assert (report.cause, report.layer) == ("forward", "norm")
    paste(report, model)
    again = explain_overflow(model, mse(model), X, Y, compute_dtype=HALF)
    assert again.cause == "nothing"


def test_cure_by_the_whole_model_says_what_else_to_do():
    class Own(Net):
        def __call__(self, x):
            x = mx.square(self.first(x) * 300)
            return self.head(x / mx.mean(x, axis=-1, keepdims=True))

    model = Own()
    report = explain_overflow(model, mse(model), *BATCH)
    assert (report.cause, report.cure) == ("forward", [""])
    text = str(find_float32_layers(model, mse(model), [BATCH]))
    assert text.startswith("The overflow is in the model's own code")
    assert "\n\n" not in text
    assert "the whole model would have to" in report.line
    assert "x.astype(mx.float32)" in report.line
    paste(report, model)
    assert mx.isfinite(mse(model)(*BATCH)).item()


def test_no_line_where_nothing_helps():
    model = Net()

    def loss_fn(x, y):
        return mx.log(mse(model)(x, y) * 0)

    report = explain_overflow(model, loss_fn, *BATCH)
    assert (report.cause, report.cure, report.line) == ("loss", None, "")
