"""Half precision that is lost without a word is told, once, and where."""

import copy
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Mlp, batch, bits, mse

from mlx_gradscale import GradScaler, LossScaleOptimizer, float32_layers
from mlx_gradscale.diagnostics import compute_dtypes
from mlx_gradscale.precision.dtypes import watched_dtypes


def said(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
        function(*args)
    return [str(w.message) for w in caught]


def ways(model):
    def by_argument(x, y):
        return argument(model, x, y)

    optimizer = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    loss_fn = optimizer.scale_loss(lambda model, x, y: mse(model)(x, y))
    argument = nn.value_and_grad(model, loss_fn)
    other = LossScaleOptimizer(optim.SGD(0.1), GradScaler(64.0))
    return [by_argument, other.value_and_grad(model, mse(model))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_float32_batch_in_a_float16_model_is_named_once(compiled):
    for i in range(2):
        model = Mlp(dtype=mx.float16)
        function = ways(model)[i]
        if compiled:
            function = mx.compile(function, inputs=model.state, outputs=model.state)
        messages = said(function, *batch())
        [message] = [text for text in messages if "computes in" in text]
        assert "'layers.0' has float16 parameters and computes in float32" in message
        assert "argument 'x' of the loss function" in message
        assert "x.astype(mx.float16)" in message


def test_nothing_is_said_where_all_is_half_or_all_is_float32():
    for function in ways(Mlp(dtype=mx.float16)):
        # The target is float32, as it should be.
        assert said(function, *batch(dtype=mx.float16)) == []
    for function in ways(Mlp()):
        assert said(function, *batch()) == []
    model, scaler = Mlp(), GradScaler(64.0)
    assert said(scaler.value_and_grad(model, mse(model), mx.float16), *batch()) == []


def test_a_kept_layer_and_an_island_cast_back_and_nothing_is_said():
    model = Mlp()
    kept = GradScaler(64.0).value_and_grad(
        model, mse(model), mx.float16, keep=lambda path, x: "layers.0" in path
    )
    assert said(kept, *batch()) == []
    model = Mlp(dtype=mx.float16)
    float32_layers(model, ["layers.0"])
    for function in ways(model):
        assert said(function, *batch(dtype=mx.float16)) == []


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.out = nn.Linear(8, 7)
        self.set_dtype(mx.float16)

    def __call__(self, tokens):
        positions = mx.arange(tokens.shape[1], dtype=mx.float32)[:, None]
        return self.out(self.embedding(tokens) + positions)


def test_compute_dtypes_tells_the_first_layer_and_leaves_the_model():
    model = Masked()
    before = bits(model.parameters())

    def loss_fn(model, tokens):
        return model(tokens).astype(mx.float32).mean()

    report = compute_dtypes(model, loss_fn, model, mx.array([[1, 2, 3]]))
    assert report.first.path == "out"
    assert report.first.inputs == (mx.float32,)
    table = str(report)
    assert "embedding" in table
    assert "masks, positions" in table
    assert type(model) is Masked
    assert bits(model.parameters()) == before
    whole = Mlp()
    report = compute_dtypes(whole, mse(whole), *batch(), compute_dtype=mx.float16)
    assert report.first is None
    assert "All layers compute in halves" in str(report)


def test_what_somebody_else_watches_is_not_reported_as_well():
    model, x = Mlp(dtype=mx.float16), batch()[0]
    function = ways(model)[1]
    with watched_dtypes(model):
        with pytest.raises(RuntimeError, match="looked at already"):
            compute_dtypes(model, lambda x: model(x).sum(), x)
        assert said(function, *batch()) == []
    # Nor is it forgotten: the first call that can be watched says it.
    [message] = said(function, *batch())
    assert "computes in float32" in message
    assert compute_dtypes(model, lambda x: model(x).sum(), x).first is not None


def test_a_method_that_is_replaced_meanwhile_stays_replaced():
    class Own(nn.Linear):
        def __call__(self, x):
            return super().__call__(x)

    def replacement(self, x):
        return x

    model = Own(8, 8)
    with watched_dtypes(model):
        Own.__call__ = replacement
    assert Own.__call__ is replacement


class Asks(nn.Module):
    """A model that looks at the types of its layers, and copies one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        self.seen = (type(self.layer), type(copy.deepcopy(self.layer)))
        return self.layer(x)


def test_the_types_of_layers_are_what_they_are_while_they_are_watched():
    model = Asks()
    method = nn.Linear.__call__
    function = ways(model)[1]
    function(*batch(dtype=mx.float16))
    assert model.seen == (nn.Linear, nn.Linear)
    assert nn.Linear.__call__ is method
