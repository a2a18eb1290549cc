"""explain_overflow names the layer, and leaves everything unchanged."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_gradscale import GradScaler, float32_layers
from mlx_gradscale.diagnostics import explain_overflow

HALF = mx.float16


class Block(nn.Module):
    """A block with a computation of its own between its two layers."""

    def __init__(self, gain=1.0, out_gain=1.0):
        super().__init__()
        self.fc1 = nn.Linear(8, 8, bias=False)
        self.fc2 = nn.Linear(8, 8, bias=False)
        self.fc1.weight = mx.eye(8)
        self.fc2.weight = mx.eye(8)
        self.gain = gain
        self.out_gain = out_gain

    def __call__(self, x):
        return self.fc2(self.gain * self.fc1(x)) * self.out_gain


class Net(nn.Module):
    def __init__(self, **gains):
        super().__init__()
        self.blocks = [Block(), Block(**gains), Block()]
        self.norm = nn.BatchNorm(8)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.dropout(x)


def snapshot(model):
    values = tree_map(mx.array, model.parameters())
    types = [(p, id(type(m)), dict(vars(m))) for p, m in model.named_modules()]
    return values, types, mx.random.state[0].tolist()


def assert_same(model, before):
    values, types, key = before
    now = [(p, id(type(m)), dict(vars(m))) for p, m in model.named_modules()]
    assert now == types
    assert mx.random.state[0].tolist() == key
    now = tree_flatten(model.parameters())
    then = tree_flatten(values)
    assert [path for path, _ in now] == [path for path, _ in then]
    for (_, a), (_, b) in zip(now, then, strict=True):
        assert a.dtype == b.dtype
        assert mx.array_equal(a, b, equal_nan=True).item()


def mean_square(model):
    return lambda x: model(x).astype(mx.float32).square().mean()


def explain(model, x=None, loss_fn=None, **options):
    before = snapshot(model)
    x = mx.ones((4, 8)) if x is None else x
    options = {"compute_dtype": mx.float16, **options}
    report = explain_overflow(model, loss_fn or mean_square(model), x, **options)
    assert_same(model, before)
    assert str(report)
    return report


def test_finite_batch_is_reported_as_such():
    report = explain(Net())
    assert (report.cause, report.layer, report.leaves) == ("nothing", None, [])
    assert report.loss_is_finite
    assert not report.scaling_helps
    assert str(report).startswith("The loss is finite, ")
    assert "pass compute_dtype=" in str(report)


def test_layer_that_overflows_forward_is_named():
    model = Net()
    model.blocks[1].fc2.weight = mx.eye(8) * 3e4
    report = explain(model, mx.full((4, 8), 4.0))
    assert (report.cause, report.layer) == ("forward", "blocks.1.fc2")
    assert not report.scaling_helps
    assert "32 +inf of 32, float16" in str(report)
    assert "cannot help" in str(report)


def test_overflow_between_two_layers_is_their_callers():
    report = explain(Net(gain=6e4), mx.full((4, 8), 4.0))
    assert (report.cause, report.layer) == ("forward", "blocks.1")
    assert "blocks.1 passes to blocks.1.fc2" in str(report)
    report = explain(Net(out_gain=6e4), mx.full((4, 8), 4.0))
    assert (report.cause, report.layer) == ("forward", "blocks.1")
    assert "in the output of blocks.1:" in str(report)


def test_layer_that_overflows_backward_is_named():
    # Forward 1e-4 * 1e4 is 1; backward the gradient is 1e4 times as large.
    model = Net()
    model.blocks[1].fc1.weight = mx.eye(8) * 1e4
    model.eval()
    x = mx.full((4, 8), 1e-4)
    report = explain(model, x, scale=2.0**10)
    assert (report.cause, report.layer) == ("gradients", "blocks.1.fc1")
    assert report.scaling_helps
    assert "the gradient that blocks.1.fc1 returns" in str(report)
    assert {r.path for r in report.leaves} == {
        "blocks.0.fc1.weight",
        "blocks.0.fc2.weight",
    }
    assert explain(model, x, scale=1.0).cause == "nothing"


def test_overflow_in_the_gradient_of_a_weight_is_named():
    model = Net()
    model.eval()

    # The input of fc2 is 3e4 and its output's gradient is small, so that the
    # gradient of its weight alone, their product, is too large.
    def loss_fn(x):
        return model.blocks[1].fc2(x).astype(mx.float32).sum() * 16

    report = explain(model, mx.full((4, 8), 3e4), loss_fn)
    assert (report.cause, report.layer) == ("gradients", "blocks.1.fc2")
    assert "parameter blocks.1.fc2.weight" in str(report)


def test_loss_that_overflows_is_said_first():
    model = Net()
    model.eval()
    report = explain(model, mx.full((4, 8), 300.0), lambda x: model(x).square().sum())
    assert (report.cause, report.layer) == ("loss", None)
    assert "compute the loss in float32" in str(report)
    assert str(report).startswith("The loss itself is inf")


def test_loss_reduced_in_float16_cannot_take_a_scale_of_65536():
    model = Net()
    model.eval()
    report = explain(model, None, lambda x: model(x).mean(), scale=65536.0)
    assert (report.cause, report.layer) == ("gradients", None)
    assert "the loss function returns to the model" in str(report)


def test_derivative_that_is_infinite_at_any_scale():
    model = Net()
    model.eval()

    def loss_fn(x):
        return mx.sqrt(model(x)).astype(mx.float32).mean()

    report = explain(model, mx.zeros((4, 8)), loss_fn, scale=2.0**10)
    assert report.cause == "derivative"
    assert not report.scaling_helps


def test_kept_parameter_is_not_cast():
    model = Net()
    model.eval()
    model.blocks[1].fc2.weight = mx.eye(8) * 1e5
    x = mx.full((4, 8), 0.1)
    report = explain(model, x)
    assert (report.cause, report.layer) == ("forward", "blocks.1.fc2")
    report = explain(model, x, keep=lambda path, _: path.startswith("blocks.1.fc2"))
    assert report.cause == "gradients"


def test_float32_layer_does_not_overflow():
    model = Net(gain=6e4, out_gain=1e-4)
    model.eval()
    x = mx.full((4, 8), 4.0)
    assert explain(model, x).cause == "forward"
    with float32_layers(model, "blocks.1"):
        assert explain(model, x).cause == "nothing"


def test_nan_in_the_batch_is_named():
    x = mx.ones((4, 8))
    x[1, 2] = float("nan")
    report = explain(Net(), x)
    assert (report.cause, report.layer) == ("batch", None)
    assert report.leaves[0].nan == 1
    assert "args[0]" in str(report)


@pytest.mark.parametrize("value", [250000.0, -250000.0])
def test_target_that_the_cast_makes_infinite_is_named(value):
    model = Net()

    def loss_fn(x, batch, weight=None):
        distance = model(x).astype(mx.float32) - batch["targets"][0]
        return (distance.square() * weight).mean()

    options = {"scale": 2.0**-6, "weight": mx.ones(())}
    batch = mx.ones((4, 8)), {"targets": [mx.full((4, 8), value)]}
    report = explain_overflow(model, loss_fn, *batch, compute_dtype=HALF, **options)
    assert (report.cause, report.layer) == ("arguments", None)
    assert not report.scaling_helps
    assert [r.path for r in report.leaves] == ["args[1].targets.0"]
    text = str(report)
    assert f"args[1].targets.0 reaches {value:.0f}; float16 ends at 65504." in text
    assert "value_and_grad(..., cast_inputs=False)" in text
    assert "loss in float32" not in text
    report = explain_overflow(
        model, loss_fn, *batch, compute_dtype=HALF, cast_inputs=False, **options
    )
    assert report.cause == "nothing"


def test_input_that_the_cast_makes_infinite_is_named():
    model = Net()
    x = mx.random.normal((64, 8)) * 1e6
    report = explain_overflow(model, mean_square(model), x=x, compute_dtype=HALF)
    assert report.cause == "arguments"
    assert [r.path for r in report.leaves] == ["x"]
    assert f"x reaches {x.flatten()[mx.argmax(mx.abs(x))].item():.6g};" in str(report)
    assert "keep=" not in str(report)


def test_mask_that_the_cast_makes_infinite_is_blamed_only_if_it_is_at_fault():
    model = Net()
    model.eval()

    def loss_fn(x, mask):
        weights = mx.softmax(mask.astype(mx.float32))
        return (weights * model(x).astype(mx.float32).square()).mean()

    def explained(mask, x=1e-4, scale=2.0**14):
        mask = mx.array(mask)
        return explain_overflow(
            model, loss_fn, mx.full((4, 8), x), mask, scale=scale, compute_dtype=HALF
        )

    some, every = [0.0] * 4 + [-1e9] * 4, [-1e9] * 8
    assert explained(some).cause == "nothing"
    assert explained(every).cause == "arguments"
    model.blocks[1].fc1.weight = mx.eye(8) * 1e4
    report = explained(some)
    assert (report.cause, report.layer) == ("gradients", "blocks.1.fc1")
    report = explained(some, x=10.0)
    assert (report.cause, report.layer) == ("forward", "blocks.1.fc1")


def test_nonfinite_parameter_is_named():
    model = Net()
    model.blocks[1].fc1.weight = mx.full((8, 8), float("nan"))
    report = explain(model)
    assert (report.cause, report.layer) == ("parameters", "blocks.1.fc1")
    assert [r.path for r in report.leaves] == ["blocks.1.fc1.weight"]


class Masked(nn.Module):
    """Attention with a mask of -inf that a layer of its own makes."""

    class Mask(nn.Module):
        def __call__(self, n, dtype):
            upper = mx.triu(mx.ones((n, n)), 1)
            return mx.where(upper, -float("inf"), 0.0).astype(dtype)

    def __init__(self):
        super().__init__()
        self.mask = self.Mask()
        self.before = nn.Linear(8, 8, bias=False)
        self.after = nn.Linear(8, 8, bias=False)
        self.before.weight = self.after.weight = mx.eye(8) * 1e3

    def __call__(self, x):
        x = self.before(x)
        scores = mx.softmax(x @ x.T * 0 + self.mask(x.shape[0], x.dtype), axis=-1)
        return self.after(scores @ x)


def test_mask_is_no_overflow():
    model = Masked()
    report = explain(model, mx.full((4, 8), 1e-3), scale=2.0**8)
    assert (report.cause, report.layer) == ("gradients", "after")
    report = explain(model, mx.full((4, 8), 0.07))
    assert (report.cause, report.layer) == ("forward", "after")


def test_model_as_argument_aux_outputs_and_keywords_work():
    model = Net()
    model.eval()

    def loss_fn(model, x, *, extra=None):
        return model(x).astype(mx.float32).mean(), mx.array(4)

    before = snapshot(model)
    report = explain_overflow(model, loss_fn, model, mx.ones((2, 8)))
    assert report.cause == "nothing"
    assert_same(model, before)


def test_checkpointed_and_compiled_layers_are_seen():
    model = Net()
    model.eval()
    model.blocks[1].fc1.weight = mx.eye(8) * 1e4
    block = model.blocks[1]

    def loss_fn(x):
        # Of an array that is no argument: that is when mx.compile really compiles
        # while a function is differentiated.
        h = mx.compile(lambda x: model.blocks[0](x))(mx.full((4, 8), 1e-4, HALF))
        h = nn.utils.checkpoint(block)(h)
        h = mx.compile(model.blocks[2])(h)
        return h.astype(mx.float32).square().mean()

    report = explain(model, None, loss_fn, scale=2.0**10)
    assert (report.cause, report.layer) == ("gradients", "blocks.1.fc1")


class Checkpointed(Net):
    def __call__(self, x):
        x = self.blocks[0](x)
        return nn.utils.checkpoint(self.blocks[1])(x * 1e-4) * 1e4


def test_caller_of_a_checkpointed_layer_is_known():
    # The gradient overflows in the model, by its 1e4, on the way to the layer.
    report = explain(Checkpointed(), scale=2.0**10)
    assert (report.cause, report.layer) == ("gradients", "")
    assert "the model returns to blocks.1" in str(report)


def test_model_is_restored_after_an_error():
    model = Net()
    before = snapshot(model)

    def loss_fn(x):
        model.norm(model(x))  # replaces the running statistics
        model.blocks.append(Block())
        model.extra = mx.ones(3)
        model.note = "changed"
        raise KeyError("no such column")

    for dtype in (None, mx.float16):
        with pytest.raises(KeyError, match="no such column"):
            explain_overflow(model, loss_fn, mx.ones((4, 8)), compute_dtype=dtype)
        assert_same(model, before)


def test_loss_from_scale_loss_has_its_own_scale():
    model = Net()
    model.eval()
    scaler = GradScaler(init_scale=2.0**30)
    scaled = scaler.scale_loss(mean_square(model))
    report = explain(model, loss_fn=scaled)
    assert report.cause == "gradients"
    scaler.update(2.0)
    report = explain(model, loss_fn=scaled)
    assert (report.cause, report.where) == ("nothing", "")
    with pytest.raises(TypeError, match="has its own scale"):
        explain(model, loss_fn=scaled, scale=scaler)
