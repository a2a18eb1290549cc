"""The line that explain_overflow prints makes the model train."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from support.helpers import mse

import mlx_gradscale
from mlx_gradscale import GradScaler, LossScaleOptimizer, find_float32_layers
from mlx_gradscale.diagnostics import explain_overflow

HALF = mx.float16
X = mx.random.normal((16, 8), key=mx.random.key(0))
Y = mx.roll(X, 1, axis=1)
BATCH = X.astype(HALF), Y.astype(HALF)


class Net(nn.Module):
    """Adds ``gain`` times the output of a layer, and normalizes the sum."""

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


def check_cure(model, loss_fn, batch, **options):
    """Run the line that the report prints, and explain again."""
    report = explain_overflow(model, loss_fn, *batch, **options)
    *_, line = report.line.splitlines()
    assert line.strip() in str(report)
    exec(line.strip(), {"mlx_gradscale": mlx_gradscale, "model": model})
    assert explain_overflow(model, loss_fn, *batch, **options).cause == "nothing"
    return report


def test_suggested_float32_layers_make_a_float16_model_train():
    optimizer = LossScaleOptimizer(optim.SGD(0.05), GradScaler(16.0))
    for as_option in (False, True):
        model = Net(gain=1e5)
        scaled = optimizer.scale_loss(mse(model), model)
        loss_fn, options = (
            (mse(model), {"scale": optimizer}) if as_option else (scaled, {})
        )
        report = check_cure(model, loss_fn, BATCH, **options)
        assert (report.cause, report.layer) == ("forward", "")
        assert "The input of norm, which the code of the model computes," in str(report)
        # A float32 norm, where the overflow was seen, would change nothing.
        assert report.cure != ["norm"]
    loss_and_grad = optimizer.value_and_grad(model, mse(model))
    losses = []
    for _ in range(8):
        loss, grads = loss_and_grad(*BATCH)
        optimizer.update(model, grads)
        losses.append(loss.item())
    assert optimizer.scaler.skipped_steps.item() <= 2
    assert losses[-1] < losses[0]


def test_suggested_float32_layers_work_with_compute_dtype():
    model = Net(gain=1e5, dtype=mx.float32)
    report = check_cure(model, mse(model), (X, Y), scale=16.0, compute_dtype=HALF)
    assert report.cause == "forward"


def test_suggested_float32_layers_fix_a_loss_reduced_in_float16():
    model = Net()

    def loss_fn(x, y):
        return mx.square(model(x) - 300 * y).mean()

    report = check_cure(model, loss_fn, BATCH)
    assert (report.cause, report.layer) == ("loss", None)
    assert report.cure == ["head to the loss"]


def test_layer_with_too_large_a_parameter_becomes_float32():
    model = Net(dtype=mx.float32)
    model.norm.weight = mx.full((8,), 1e5)
    model.head.weight /= 1e5
    report = check_cure(model, mse(model), (X, Y), compute_dtype=HALF)
    assert (report.cause, report.layer) == ("forward", "norm")


def test_fix_that_needs_the_whole_model_in_float32_suggests_alternatives():
    class Own(Net):
        def __call__(self, x):
            x = mx.square(self.first(x) * 300)
            return self.head(x / mx.mean(x, axis=-1, keepdims=True))

    model = Own()
    text = str(find_float32_layers(model, mse(model), [BATCH]))
    assert text.startswith("The whole model would have to compute in float32")
    assert "\nThe input of head, which the code of the model computes, " in text
    assert "\n\n" not in text
    report = check_cure(model, mse(model), BATCH)
    assert (report.cause, report.cure) == ("forward", [""])
    assert "The whole model would have to" in report.line
    assert "x.astype(mx.float32)" in report.line


def test_report_contains_no_fix_if_no_layers_help():
    model = Net()

    def loss_fn(x, y):
        return mx.log(mse(model)(x, y) * 0)

    report = explain_overflow(model, loss_fn, *BATCH)
    assert (report.cause, report.cure, report.line) == ("loss", None, "")
