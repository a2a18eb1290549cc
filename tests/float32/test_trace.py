"""A trace knows the error of each layer by itself."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import model_state

from mlx_gradscale import float32_layers
from mlx_gradscale.float32.trace import measure
from mlx_gradscale.float32.trial import Trial

HALF = mx.float16


class Norm(nn.Module):
    """Its mean of squares overflows for rows of 300 and more."""

    def __call__(self, x):
        return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True))


def errors(model, x):
    trial = Trial(model, lambda x: model(x).astype(mx.float32).mean(), (x,))
    before = model_state(model)
    call, _ = measure(trial)
    assert model_state(model) == before
    return {each.path: each.error for each in call.walk() if each.path is not None}


def make():
    mx.random.seed(0)
    layers = nn.Linear(8, 8, bias=False), Norm(), nn.Dropout(0.5), nn.Linear(8, 8)
    layers[0].weight = mx.eye(8) * 400
    model = nn.Sequential(*layers)
    model.set_dtype(HALF)
    return model, mx.ones((4, 8), HALF)


def test_only_the_layer_that_overflows_and_its_caller_have_an_error():
    found = errors(*make())
    assert found.pop("layers.1") == pytest.approx(1.0)
    assert found.pop("") > 0.25
    # Also Dropout, which drops the same values in both runs.
    assert found.keys() == {"layers.0", "layers.2", "layers.3"}
    assert max(found.values()) < 1e-3


def test_float32_layer_has_no_error_and_corrects_its_caller():
    model, x = make()
    float32_layers(model, "layers.1")
    assert max(errors(model, x).values()) < 1e-2


def test_row_masked_by_the_lowest_number_of_float32_has_no_error():
    class Softmax(nn.Module):
        def __call__(self, x, mask):
            return mx.softmax(x + mask, axis=-1)

    class Masked(nn.Sequential):
        def __call__(self, x):
            mask = mx.full((4, 8), mx.finfo(x.dtype).min)
            return self.layers[0](self.layers[1](x), mask)

    model = Masked(Softmax(), nn.Linear(8, 8))
    assert errors(model, mx.ones((4, 8), HALF))["layers.0"] < 1e-2


def test_one_wrong_row_of_many_is_seen_and_a_tiny_row_is_not():
    def error(row, layer):
        x = mx.ones((100, 8), HALF)
        x[3] = row
        return errors(nn.Sequential(layer, nn.Linear(8, 8)), x)["layers.0"]

    assert error(1, Norm()) < 1e-2
    assert error(400, Norm()) == pytest.approx(1.0)
    # Rounds by far more than other rows, relative to its own size.
    assert error(1e-5, nn.Linear(8, 8, bias=False)) < 1e-2


def test_error_is_that_of_the_dtype_in_which_the_model_computes():
    model, x = make()
    model.set_dtype(mx.bfloat16)
    # 400 squared fits into bfloat16, but not into float16.
    assert errors(model, x.astype(mx.bfloat16))["layers.1"] < 0.1
