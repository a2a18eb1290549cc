"""The lines that explain_overflow prints make the model train as in float32."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from support.helpers import mse
from support.overflow_models import MODELS, batch

import mlx_gradscale
from mlx_gradscale import GradScaler, LossScaleOptimizer, find_float32_layers
from mlx_gradscale.diagnostics import calibrate, explain_overflow

HALF = mx.float16


def paste(report, **names):
    """Run the lines that the report prints."""
    assert report.line in str(report)
    namespace = {"mx": mx, **names}
    for line in report.line.splitlines():
        if line.startswith("    "):
            exec(line.strip(), namespace)
    if "calibrate() finds a better scale" in report.line:
        scaler = names["optimizer"].scaler
        scale = calibrate(scaler, names["model"], names["loss_fn"], *names["batch"])
        assert scale == report.search.scale


def train(model, loss_fn, optimizer, steps=20):
    """Return the mean loss of the last five steps."""
    loss_and_grad = optimizer.value_and_grad(model, loss_fn)
    losses = []
    for i in range(steps):
        loss, grads = loss_and_grad(*batch(model, i))
        optimizer.update(model, grads)
        losses.append(loss.item())
    return sum(losses[-5:]) / 5


LAST, BLOCK = ["layers.2 to the loss"], "blocks.1"
# The cause, the layer and the fix that the report gives at a scale of 65536.
ADVICE = {
    "residual": ("forward", BLOCK, ["blocks.1 to norm"]),
    "mlp": ("forward", f"{BLOCK}.mlp", ["blocks.1.mlp"]),
    "attention": ("forward", f"{BLOCK}.attention", ["blocks.1.attention"]),
    "loss": ("loss", None, ["head to the loss"]),
    "norm": ("forward", f"{BLOCK}.norms.0",
        ["blocks.1.norms.0", "blocks.1.norms.2", "norm"]),
    "stream": ("forward", "blocks.0", ["blocks.0 to norm"]),
    "large weights": ("forward", f"{BLOCK}.mlp.up",
        ["blocks.1.mlp.up to blocks.1.mlp.down"]),
    "norm by sum": ("forward", "blocks.0.norms.0",
        [*(f"blocks.{i}.norms.{j}" for i in (0, 1) for j in (0, 2)), "norm"]),
    "no overflow": ("nothing", None, None),
    "batch norm": ("forward", "layers.1", ["layers.1"]),
    "cosine": ("gradients", "layers.2", None),
    "KL divergence": ("loss", None, LAST),
    "log of softmax": ("loss", None, LAST),
    "sum of squares": ("loss", None, LAST),
    "large targets": ("loss", None, LAST),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The loss is float16")
@pytest.mark.parametrize("name", MODELS)
def test_pasted_advice_trains_as_in_float32_and_skips_no_step(name):
    model, loss_fn = MODELS[name]()
    expected = train(model, loss_fn, LossScaleOptimizer(optim.Adam(3e-3)))
    model, loss_fn = MODELS[name]()
    model.set_dtype(HALF)
    optimizer = LossScaleOptimizer(optim.Adam(3e-3))
    names = {"model": model, "loss_fn": loss_fn, "optimizer": optimizer}
    names["batch"] = batch(model)
    report = explain_overflow(model, loss_fn, *names["batch"], scale=65536.0)
    assert (report.cause, report.layer, report.fix) == ADVICE[name]
    assert ("better to train in bfloat16" in str(report)) == (name == "stream")
    paste(report, **names)
    after = explain_overflow(model, loss_fn, *names["batch"], scale=optimizer)
    assert (after.cause, after.where[:8]) == ("nothing", "The loss")
    if name == "large weights":
        # Adam moves weights of 1e-6 by 3e-3: other layers overflow after six steps.
        train(model, loss_fn, optimizer, steps=7)
        again = explain_overflow(model, loss_fn, *batch(model, 7), scale=optimizer)
        paste(again, **names)
        train(model, loss_fn, optimizer, steps=20)
        assert optimizer.scaler.skipped_steps.item() <= 2
        return
    assert train(model, loss_fn, optimizer) == pytest.approx(expected, rel=0.05)
    assert optimizer.scaler.skipped_steps.item() == 0


@pytest.mark.parametrize(
    ("name", "scale"), [("large targets", 512), ("no overflow", 65536)]
)
def test_search_report_names_calibrate_only_if_the_first_steps_would_be_skipped(
    name, scale
):
    model, loss_fn = MODELS[name]()
    options = {"compute_dtype": HALF, "cast_inputs": name == "no overflow"}
    found = find_float32_layers(model, loss_fn, [batch(model)], **options)
    assert ("calibrate() finds a better" in str(found)) == (name != "no overflow")
    assert found.scale == scale


def test_smaller_scale_is_advised_for_a_model_that_already_has_float32_layers():
    model, loss_fn = MODELS["large targets"]()
    model.set_dtype(HALF)
    mlx_gradscale.float32_layers(model, LAST)
    report = explain_overflow(model, loss_fn, *batch(model), scale=GradScaler())
    assert (report.cause, report.fix) == ("gradients", None)
    assert "they match float32. A dynamic scaler" in str(report)
    assert "calibrate() finds a better scale" in report.line


def test_small_gradients_that_underflow_without_scaling_are_reported():
    model, loss_fn = MODELS["no overflow"]()
    model.set_dtype(HALF)
    report = explain_overflow(model, lambda *xs: 1e-6 * loss_fn(*xs), *batch(model))
    assert (report.cause, report.line) == ("nothing", "")
    assert report.where.startswith("Small gradients underflow. At a loss scale of 2^16")


def test_fix_that_needs_the_whole_model_in_float32_suggests_alternatives():
    class Own(nn.Sequential):
        def __call__(self, x):
            x = mx.square(self.layers[0](x) * 300)
            return self.layers[1](x / mx.mean(x, axis=-1, keepdims=True))

    model = Own(nn.Linear(8, 8), nn.Linear(8, 8))
    model.set_dtype(HALF)
    report = explain_overflow(model, mse(model), *batch(model))
    assert (report.cause, report.fix) == ("forward", [""])
    assert "This saves little. If an expression" in report.line
    text = str(find_float32_layers(model, mse(model), [batch(model)]))
    assert "\n  (model): Values reach" in text
