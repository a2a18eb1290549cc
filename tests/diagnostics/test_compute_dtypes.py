"""compute_dtypes shows where half precision is lost, and in which layer."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import Mlp, batch, bits, mse

from mlx_gradscale import float32_layers
from mlx_gradscale.diagnostics import compute_dtypes


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.out = nn.Linear(8, 7)
        self.set_dtype(mx.float16)

    def __call__(self, tokens):
        positions = mx.arange(tokens.shape[1], dtype=mx.float32)[:, None]
        return self.out(self.embedding(tokens) + positions)


def test_compute_dtypes_names_the_first_promoted_layer_and_keeps_the_model():
    model = Masked()
    before = bits(model.parameters())

    def loss_fn(model, tokens):
        return model(tokens).astype(mx.float32).mean()

    report = compute_dtypes(model, loss_fn, model, mx.array([[1, 2, 3]]))
    assert (report.first.path, report.first.inputs) == ("out", (mx.float32,))
    text = str(report)
    assert "embedding" in text
    assert "out has float16 parameters but returns float32, from inputs of" in text
    assert "typically batches, masks" in text
    assert type(model.out) is nn.Linear
    assert bits(model.parameters()) == before


def test_compute_dtypes_evaluates_nothing():
    model, tokens = Masked(), mx.zeros((1, 4096), mx.int32)
    mx.eval(model.parameters(), tokens)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    compute_dtypes(model, lambda x: model(x).sum(), tokens)
    # The outputs of each layer have 64 kB and more.
    assert mx.get_peak_memory() - before < 32_000


@pytest.mark.parametrize("how", ["half", "compute_dtype", "float32 layer", "float32"])
def test_compute_dtypes_reports_no_promotion_in_a_sound_model(how):
    is_half = how in ("half", "float32 layer")
    model = Mlp(dtype=mx.float16 if is_half else mx.float32)
    if how == "float32 layer":
        float32_layers(model, "layers.0")
    options = {"compute_dtype": mx.float16} if how == "compute_dtype" else {}
    report = compute_dtypes(model, mse(model), *batch(dtype=mx.float16), **options)
    assert report.first is None
    text = "No layer with half-precision parameters computes in float32."
    text = "No layer computes in half precision" if how == "float32" else text
    assert text in str(report)
    paths = [layer.path for layer in report.layers]
    assert ("layers.0" in paths) == (how != "float32 layer")


def test_shared_layer_is_reported_at_each_call_under_its_first_path():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Sequential(layer))
    report = compute_dtypes(model, lambda x: model(x).sum(), batch()[0])
    paths = [each.path for each in report.layers]
    assert paths == ["layers.0", "layers.0", "layers.1", ""]


def test_compute_dtypes_names_a_layer_that_promotes_its_own_output():
    class Casts(nn.Linear):
        def __call__(self, x):
            return super().__call__(x).astype(mx.float32)

    model = nn.Sequential(Casts(8, 8))
    model.set_dtype(mx.float16)
    report = compute_dtypes(model, lambda x: model(x).sum(), batch(dtype=mx.float16)[0])
    assert report.first.path == "layers.0"
    assert "returns float32, from inputs of float16." in str(report)
