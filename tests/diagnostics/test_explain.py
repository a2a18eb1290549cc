"""explain_overflow names the layer, and leaves everything unchanged."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import NAN, model_state

from mlx_gradscale import float32_layers
from mlx_gradscale.diagnostics import explain_overflow

HALF = mx.float16


class Block(nn.Module):
    """A block with a computation of its own between its two layers."""

    def __init__(self, fc1=1.0, between=1.0, fc2=1.0, after=1.0):
        super().__init__()
        self.fc1 = nn.Linear(8, 8, bias=False)
        self.fc2 = nn.Linear(8, 8, bias=False)
        self.fc1.weight = mx.eye(8) * fc1
        self.fc2.weight = mx.eye(8) * fc2
        self.between = between
        self.after = after

    def __call__(self, x):
        return self.fc2(self.between * self.fc1(x)) * self.after


class Net(nn.Module):
    def __init__(self, **gains):
        super().__init__()
        self.blocks = [Block(), Block(**gains), Block()]
        self.norm = nn.BatchNorm(8)
        self.dropout = nn.Dropout(0.5)
        self.eval()

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.dropout(x)


def mean_square(model, x):
    return model(x).astype(mx.float32).square().mean()


def explain(model, x=1.0, loss_fn=mean_square, **options):
    before = model_state(model)
    x = mx.full((4, 8), x) if isinstance(x, float) else x
    options = {"compute_dtype": HALF, **options}
    report = explain_overflow(model, loss_fn, model, x, **options)
    assert model_state(model) == before
    return report


def small_gradient_of_a_large_input(model, x):
    # Only their product, the gradient of the weight, is too large.
    return model.blocks[1].fc2(x).astype(mx.float32).sum() * 16


def root(model, x):
    return mx.sqrt(model(x)).astype(mx.float32).mean()


# Forward 1e-4 * 1e4 is 1; backward the gradient is 1e4 times as large.
BACKWARD = {"fc1": 1e4}, 1e-4, mean_square
CASES = [  # gains, x, loss function, loss scale, cause, layer, text
    ({}, 1.0, mean_square, 1.0, "nothing", None, "compute_dtype= that training uses"),
    ({"fc2": 3e4}, 4.0, mean_square, 1.0,
        "forward", "blocks.1", ": Values reach 1.2e+05, above 65504."),
    ({"fc2": 1e5}, 0.1, mean_square, 1.0,
        "forward", "blocks.1.fc2", "Values reach 1e+04, and its output is off by"),
    ({"between": 6e4}, 4.0, mean_square, 1.0,
        "forward", "blocks.1", "Values reach 2.4e+05, above 65504."),
    ({"after": 6e4}, 4.0, mean_square, 1.0,
        "forward", "blocks.1", "Values reach 2.4e+05, above 65504."),
    (*BACKWARD, 2.0**10,
        "gradients", "blocks.0.fc2", "The gradients of blocks.0.fc2.weight, "),
    (*BACKWARD, 1.0, "nothing", None, "The loss is 1 at a loss scale of 2^0."),
    ({}, 3e4, small_gradient_of_a_large_input, 1.0,
        "gradients", "blocks.1.fc2", "The gradients of blocks.1.fc2.weight are NaN"),
    ({}, 300.0, lambda model, x: model(x).square().sum(), 1.0,
        "loss", None, "The loss is inf at a loss scale of 2^0."),
    ({}, 1.0, lambda model, x: model(x).mean(), 65536.0,
        "gradients", "blocks.2.fc2", "The gradients of blocks.2.fc2.weight,"),
    ({}, 0.0, root, 2.0**10,
        "derivative", "blocks.2.fc2", "non-finite gradients at every loss scale"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "x", "loss_fn", "scale", "cause", "layer", "text"), CASES
)
def test_report_names_first_overflow(gains, x, loss_fn, scale, cause, layer, text):
    report = explain(Net(**gains), x, loss_fn, scale=scale)
    assert (report.cause, report.layer) == (cause, layer)
    assert text in str(report)
    assert ("cannot help" in str(report)) == (cause in ("forward", "loss"))


def test_parameters_kept_in_float32_and_float32_layers_do_not_overflow():
    def keep(path, _):
        return path.startswith("blocks.1.fc2")

    assert explain(Net(fc2=1e5), 0.1, keep=keep).cause == "gradients"
    model = Net(between=6e4, after=1e-4)
    assert explain(model, 4.0).cause == "forward"
    float32_layers(model, "blocks.1")
    assert explain(model, 4.0).cause == "nothing"


def test_explain_overflow_names_nan_in_the_batch_or_in_a_parameter():
    x = mx.ones((4, 8))
    x[1, 2] = NAN
    model = Net()
    report = explain(model, x)
    assert (report.cause, report.layer) == ("batch", None)
    assert "The batch contains NaN or inf in args[1]." in str(report)
    report = explain_overflow(model, mean_square, model, x=x)
    assert "NaN or inf in x." in str(report)
    report = explain(Net(fc1=NAN))
    assert (report.cause, report.layer) == ("parameters", "blocks.1.fc1")
    assert "NaN or inf in blocks.1.fc1.weight." in str(report)


def test_explain_overflow_reports_an_input_that_overflows_in_the_cast():
    model = Net()

    def loss_fn(x, weight=None):
        return ((model(x).astype(mx.float32) * 1e-3).square() * weight).mean()

    def explained(**options):
        x, weight = mx.full((4, 8), 250000.0), mx.ones(())
        options |= {"weight": weight, "compute_dtype": HALF}
        return explain_overflow(model, loss_fn, x, **options)

    report = explained()
    assert (report.cause, report.layer) == ("forward", "")
    assert "The model: Values reach 2.5e+05, and its output is" in str(report)
    assert explained(cast_inputs=False).cause == "nothing"


@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_of_either_sign_in_a_frozen_layer_is_not_mistaken_for_a_mask(sign):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for layer, gain in zip(model.layers, (3e4, 1e-4, 1.0), strict=True):
        layer.weight = mx.eye(8) * gain
    model.set_dtype(HALF)
    # No gradient flows through the first two layers.
    model.layers[0].freeze()
    model.layers[1].freeze()
    x = mx.full((4, 8), sign, HALF)
    x[0] *= 4
    report = explain(model, x, compute_dtype=None)
    assert (report.cause, report.layer) == ("forward", "layers.0")
    assert report.fix == ["layers.0 to layers.1"]


@pytest.mark.compiles
def test_explain_overflow_sees_checkpointed_and_compiled_layers():
    model = Net(fc1=1e4)

    def loss_fn(model, _):
        # Of an array that is no argument: that is when mx.compile really compiles
        # while a function is differentiated.
        h = mx.compile(lambda x: model.blocks[0](x))(mx.full((4, 8), 1e-4, HALF))
        h = nn.utils.checkpoint(model.blocks[1])(h)
        h = mx.compile(model.blocks[2])(h)
        return h.astype(mx.float32).square().mean()

    report = explain(model, loss_fn=loss_fn, scale=2.0**10)
    assert (report.cause, report.layer) == ("gradients", "blocks.0.fc2")


@pytest.mark.parametrize("dtype", [None, HALF])
def test_explain_overflow_restores_the_model_after_an_error(dtype):
    model = Net()
    model.train()
    before = model_state(model)

    def loss_fn(model, x):
        model.norm(model(x))  # replaces the running statistics
        model.blocks.append(Block())
        model.extra = mx.ones(3)
        model.note = "changed"
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        explain_overflow(model, loss_fn, model, mx.ones((4, 8)), compute_dtype=dtype)
    assert model_state(model) == before
