"""The line that explain_overflow prints makes the model train."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

import mlx_gradscale
from mlx_gradscale import GradScaler, LossScaleOptimizer, find_float32_layers
from mlx_gradscale.diagnostics import explain_overflow

HALF = mx.float16


class Net(nn.Module):
    """Adds ``gain`` times what a layer returns, and normalises that."""

    def __init__(self, gain=1.0):
        super().__init__()
        mx.random.seed(1)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 8)
        self.gain = gain

    def __call__(self, x):
        x = x + self.first(x)
        return self.head(self.norm(x + self.gain * self.second(x)))


X = mx.random.normal((16, 8), key=mx.random.key(0))
Y = mx.roll(X, 1, axis=1)


def loss_of(model):
    def loss_fn(x, y):
        off = model(x).astype(mx.float32) - y.astype(mx.float32)
        return off.square().mean()

    return loss_fn


def paste(report, model):
    """Run the line that the report prints, and nothing else."""
    *_, line = report.line.splitlines()
    assert line.strip() in str(report)
    exec(line.strip(), {"mlx_gradscale": mlx_gradscale, "model": model})


def trained(model, loss_fn, batch=(X, Y), steps=8):
    batch = [x.astype(HALF) for x in batch]
    optimizer = LossScaleOptimizer(optim.SGD(0.05), GradScaler(16.0))
    function = nn.value_and_grad(model, optimizer.scale_loss(loss_fn, model))
    losses = []
    for _ in range(steps):
        loss, grads = function(*batch)
        optimizer.update(model, grads)
        losses.append(loss.item())
    assert optimizer.scaler.skipped_steps.item() <= 2
    return losses


def test_cure_of_a_float16_model_trains():
    model, optimizer = Net(gain=1e5), LossScaleOptimizer(optim.SGD(0.05))
    model.set_dtype(HALF)
    batch = X.astype(HALF), Y.astype(HALF)
    scaled = optimizer.scale_loss(loss_of(model), model)
    for options in ({}, {"scale": optimizer}):
        loss_fn = loss_of(model) if options else scaled
        report = explain_overflow(model, loss_fn, *batch, **options)
        assert (report.cause, report.layer) == ("forward", "")
        assert "the model passes to norm" in str(report)
        assert "the model computed it" in str(report)
    # Keeping norm, where it was seen, would change nothing.
    assert report.cure != ["norm"]
    paste(report, model)
    losses = trained(model, loss_of(model))
    assert losses[-1] < losses[0]


def test_cure_of_a_model_with_compute_dtype_trains():
    model, scaler = Net(gain=1e5), GradScaler(16.0)
    report = explain_overflow(
        model, loss_of(model), X, Y, scale=scaler, compute_dtype=HALF
    )
    assert report.cause == "forward"
    paste(report, model)
    losses = computed(model, loss_of(model), scaler)
    assert losses[-1] < losses[0]


def computed(model, loss_fn, scaler, batch=(X, Y), **options):
    optimizer = optim.SGD(0.05)
    function = scaler.value_and_grad(model, loss_fn, HALF, **options)
    losses = []
    for _ in range(8):
        loss, grads = function(*batch)
        scaler.minimize(optimizer, model, grads)
        losses.append(loss.item())
    assert scaler.skipped_steps.item() <= 2
    return losses


@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_cure_of_a_loss_reduced_in_float16_trains():
    model = Net()
    model.set_dtype(HALF)

    def loss_fn(x, y):
        return mx.square(model(x) - 300 * y).mean()

    report = explain_overflow(model, loss_fn, X.astype(HALF), Y.astype(HALF))
    assert (report.cause, report.layer) == ("loss", None)
    assert report.cure == ["head to the loss"]
    paste(report, model)
    optimizer = LossScaleOptimizer(optim.SGD(1e-5), GradScaler(1.0))
    function = nn.value_and_grad(model, optimizer.scale_loss(loss_fn, model))
    losses = []
    for _ in range(4):
        loss, grads = function(X.astype(HALF), Y.astype(HALF))
        optimizer.update(model, grads)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert optimizer.scaler.skipped_steps.item() == 0


def test_too_large_parameter_gets_a_float32_layer():
    model = Net()
    model.norm.weight = mx.full((8,), 1e5)
    model.head.weight /= 1e5
    report = explain_overflow(model, loss_of(model), X, Y, compute_dtype=HALF)
    assert (report.cause, report.layer) == ("forward", "norm")
    paste(report, model)
    again = explain_overflow(model, loss_of(model), X, Y, compute_dtype=HALF)
    assert again.cause == "nothing"


def test_cure_by_the_whole_model_says_what_else_to_do():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            mx.random.seed(0)
            self.first = nn.Linear(8, 8)
            self.head = nn.Linear(8, 8)

        def __call__(self, x):
            x = mx.square(self.first(x) * 300)
            return self.head(x / mx.mean(x, axis=-1, keepdims=True))

    model = Own()
    model.set_dtype(HALF)
    batch = X.astype(HALF), Y.astype(HALF)
    report = explain_overflow(model, loss_of(model), *batch)
    assert (report.cause, report.cure) == ("forward", [""])
    text = str(find_float32_layers(model, loss_of(model), [batch]))
    assert text.startswith("The overflow is in the model's own code")
    assert "\n\n" not in text
    assert "only the whole model in float32" in report.line
    assert "x.astype(mx.float32)" in report.line
    paste(report, model)
    assert mx.isfinite(loss_of(model)(*batch)).item()


def test_no_line_where_nothing_helps():
    model = Net()
    model.set_dtype(HALF)

    def loss_fn(x, y):
        return mx.log(loss_of(model)(x, y) * 0)

    report = explain_overflow(model, loss_fn, X.astype(HALF), Y.astype(HALF))
    assert (report.cause, report.cure, report.line) == ("loss", None, "")
