"""find_float32_layers: the layers that overflow, found, few, and enough to train."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.helpers import Traced, model_state

from mlx_gradscale import find_float32_layers, float32_layers
from mlx_gradscale.float32 import search
from mlx_gradscale.float32.trace import measure
from mlx_gradscale.float32.trial import Trial

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
# By its path: import would find this folder of tests.
example = SimpleNamespace(**runpy.run_path(f"{EXAMPLES}/float32_layers.py"))

HALF = mx.float16


def test_float32_layers_example_prints_its_table_and_draws_figures(tmp_path, capsys):
    example.main(2, tmp_path, ["norm"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| norm |")
    # The last cells: float32 layers add casts and no other kernel.
    assert "| lost |" in row
    assert row.endswith("| +18 | +18 |")
    assert [path.name for path in tmp_path.iterdir()] == ["headroom-norm.png"]


class Net(nn.Module):
    """``gain`` is made by the model's own code and taken away by ``last``."""

    def __init__(self, gain=1.0):
        super().__init__()
        mx.random.seed(2)
        self.layers = [nn.Linear(8, 8) for _ in range(4)]
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.gain = gain

    def __call__(self, x):
        for layer in self.layers:
            x = x + nn.relu(layer(x))
        return self.head(self.last(self.gain * x))


def make(gain=1.0, dtype=HALF, model=None):
    model = model or Net(gain)
    model.set_dtype(dtype)
    return model, lambda x: model(x).astype(mx.float32).square().mean()


X = mx.random.normal((4, 8), key=mx.random.key(0)).astype(HALF)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_runs_are_shown_on_a_terminal_and_nowhere_else(
    monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr(search, "_DELAY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    model, loss_fn = make()
    find_float32_layers(model, loss_fn, [X, X * 2])
    how = [
        "in float32, and each layer in half precision",
        "in half precision, compared with float32",
    ]
    runs = (f"Batch {i} of 2 {run}" for run in how for i in (1, 2))
    shown = [f"Search for float32 layers: {run}" for run in runs]
    assert capsys.readouterr().err.splitlines() == shown * is_terminal


def test_model_without_overflow_needs_no_float32_layers_and_three_runs_per_batch():
    model, loss_fn = make()
    before, loss_fn = model_state(model), Traced(loss_fn)
    found = find_float32_layers(model, loss_fn, [X, X * 2])
    assert loss_fn.count == 6
    assert model_state(model) == before
    assert (found.where, found.problem) == ([], "")
    assert "Every layer can compute in half precision" in str(found)
    assert {row.layer for row in found.rows} > {"", "layers.0", "last", "head"}
    assert all(row.headroom > 1 for row in found.rows)
    assert float32_layers(model, found) == []


def test_search_report_shows_headroom_and_reasons_and_fixes_the_model():
    model, loss_fn = make(gain=6e4)
    before = model_state(model)
    found = find_float32_layers(model, loss_fn, [X])
    assert model_state(model) == before
    assert not found.problem
    full, other = make(gain=6e4, dtype=mx.float32)
    options = {"compute_dtype": HALF}
    again = find_float32_layers(full, other, [X.astype(mx.float32)], **options)
    assert again.where == found.where
    rows = {row.layer: row for row in found.rows}
    assert rows["last"].is_float32
    assert not rows["head"].is_float32
    assert rows["last"].largest > 65504
    assert rows["last"].headroom < 0
    assert "above 65504" in found.reasons[found.where[0]]
    text = str(found)
    assert text.splitlines()[-len(found.rows) - 1].startswith("layer ")
    assert f"{found.float16_parameters:.2%}" in text
    float32_layers(model, found)
    assert mx.isfinite(loss_fn(X)).item()
    float32_layers(model, [])
    assert not mx.isfinite(loss_fn(X)).item()


def identities(*gains, factor=1.0):
    """Linear layers that multiply by a gain; the last one takes ``factor`` times x."""
    *first, last = (nn.Linear(8, 8, bias=False) for _ in gains)
    model = nn.Sequential(*first, last)
    for layer, gain in zip(model.layers, gains, strict=True):
        layer.weight = mx.eye(8) * gain

    def loss_fn(x):
        for layer in first:
            x = layer(x)
        return last(x * factor).astype(mx.float32).square().mean()

    model.set_dtype(HALF)
    return model, loss_fn


def large_output():
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model.layers[2].bias = mx.array([66000.0])
    return model, lambda x: 1e-8 * model(x).astype(mx.float32).square().mean()


def one_layer():
    model = nn.Linear(8, 8)
    model.weight = mx.full((8, 8), 3e4)
    model.set_dtype(HALF)
    return model, lambda x: (model(x).astype(mx.float32) * 1e-6).square().mean()


class Norm(nn.Module):
    """Its mean of squares overflows for values of 300 and more."""

    def __call__(self, x):
        return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True))


class Twice(Norm):
    """Overflows in its layer, and again in its own code."""

    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def __call__(self, x):
        return super().__call__(400 * self.norm(400 * x))


def overflows_twice():
    return make(model=nn.Sequential(nn.Linear(8, 8), Twice(), nn.Linear(8, 8)))


def defined_in_another_order():
    """Calls its first layer last."""
    model, _ = identities(1e-4, 4e4, 1.0)
    last, *first = model.layers
    return model, lambda x: last(first[1](first[0](x))).astype(mx.float32).mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        mx.random.seed(0)
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.RMSNorm(8)

    def __call__(self, tokens):
        return self.embed.as_linear(self.norm(self.embed(tokens)))


def tied():
    model = Tied()
    model.set_dtype(HALF)
    return model, lambda tokens: mx.square(300 * model(tokens)).sum()


ONE = mx.ones((4, 8), HALF)
CHAIN = ["layers.1 to layers.2"]
FOUND = {
    "margin": (lambda: identities(1.0, 4e4, 1e-4), [ONE], {}, CHAIN),
    "a margin of 1": (lambda: identities(1.0, 4e4, 1e-4), [ONE], {"margin": 1.0}, []),
    "computed by the loss function":
        (lambda: identities(1.0, 4.0, 1e-4, factor=1e4), [ONE], {}, CHAIN),
    "bfloat16": (lambda: make(6e4, mx.bfloat16), [X.astype(mx.bfloat16)],
        {"tolerance": 0.1}, []),
    "large batch": (lambda: identities(1e-4, 1.0),
        [mx.abs(X) / mx.abs(X).max() * 60000], {}, []),
    "a batch that fits": (lambda: make(2000.0), [X], {}, []),
    "batches of other shapes": (lambda: make(2000.0), [X, X[:2] * 50, {"x": X[:3]}], {},
        ["layers.3 to last"]),
    "larger batch first": (lambda: identities(1e4, 4.0, 1e-5), [4 * ONE, ONE], {},
        ["layers.0 to layers.2"]),
    "last layer": (large_output, [mx.abs(X).astype(mx.float32)],
        {"compute_dtype": HALF}, ["layers.2 to the loss"]),
    "last layer before a tied embedding": (tied, [mx.arange(16)], {},
        ["norm to the loss"]),
    "one layer": (one_layer, [X * 8], {}, [" to the loss"]),
    "two overflows in a layer": (overflows_twice, [X], {}, ["layers.1"]),
    "order": (defined_in_another_order, [ONE], {},
        ["layers.1 to layers.2", "layers.2 to layers.0"]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make_model", "batches", "options", "where"), FOUND.values(), ids=FOUND
)
def test_found_layers_are_few_and_give_the_loss_of_float32(
    make_model, batches, options, where
):
    model, loss_fn = make_model()
    found = find_float32_layers(model, loss_fn, batches, **options)
    assert (found.where, found.problem) == (where, "")
    assert len(found.losses) == len(batches)
    tolerance = options.get("tolerance", 0.02)
    for expected, loss in found.losses:
        assert loss == pytest.approx(expected, rel=tolerance)


def test_gradients_that_underflow_need_a_larger_scale_and_no_float32_layers():
    model, loss_fn = make()
    found = find_float32_layers(model, lambda x: 1e-12 * loss_fn(x), [X])
    assert (found.where, found.problem) == ([], "")
    assert found.scale > 65536
    assert "The gradients underflow at a loss scale of 65536" in str(found)


def test_residual_stream_that_mlx_lm_clips_is_found():
    gemma = pytest.importorskip("mlx_lm.models.gemma3_text", reason="no mlx-lm")
    from mlx_lm.tuner.trainer import default_loss

    mx.random.seed(0)
    model = gemma.Model(
        gemma.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=32,
            sliding_window_pattern=3,
            query_pre_attn_scalar=16,
        )
    )
    model.model.embed_tokens.weight *= 4
    model.model.layers[2].post_feedforward_layernorm.weight += 6e4
    model.set_dtype(HALF)
    tokens, lengths = mx.arange(12)[None], mx.array([[0, 12]])
    # Finite, because mlx-lm clips at 65504; the gradients are wrong.
    assert mx.isfinite(default_loss(model, tokens, lengths)[0]).item()
    trial = Trial(model, default_loss, (model, tokens, lengths))
    _, expected = measure(trial)

    def distance(where):
        float32_layers(model, where)
        return trial.check(expected, 0.1, 1.0).distance

    assert distance([]) > 0.2
    found = find_float32_layers(model, default_loss, [(model, tokens, lengths)])
    assert found.where == ["model.layers.2 to model.norm"]
    assert distance(found.where) < 0.05


def break_weight(model, loss_fn):
    model.layers[1].weight = mx.full((8, 8), float("nan"), HALF)
    return loss_fn, X


def cast_in_the_loss(model, loss_fn):
    def loses_half(x):
        loss = loss_fn(x)
        return loss / 2 if x.dtype == HALF else loss

    return loses_half, X


HOPELESS = {
    "weights": (break_weight, "in layers.1.weight. Restore an"),
    "batch": (lambda _, loss_fn: (loss_fn, X * float("inf")),
        r"NaN or inf in args\[0\]"),
    "logarithm": (lambda _, loss_fn: (lambda x: mx.log(loss_fn(x) * 0), X),
        "The loss is -inf"),
    "input": (lambda _, loss_fn: (lambda x: loss_fn(mx.log(x * 0)), X),
        "even in float32. The output of layers.0 is the first."),
    "root": (lambda model, _: (lambda x: mx.sqrt(model(x) * 0.0).sum(), X),
        "non-finite gradients at every loss scale. The derivatives of"),
    "scale": (lambda _, loss_fn: (lambda x: 1e-15 * loss_fn(x), X),
        "rounding or underflow changes the gradients by 100%"),
    "cast in the loss": (cast_in_the_loss, r"is not enough. The loss is .* instead of"),
    "rounding": (lambda _, loss_fn: (lambda x: 1000 + loss_fn(x), X),
        "Nothing overflows, but rounding or underflow changes", {"tolerance": 1e-5}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HOPELESS))
def test_search_gives_the_reason_if_no_layers_help(name, tmp_path):
    spoil, message, *options = HOPELESS[name]
    model, loss_fn = make()
    loss_fn, x = spoil(model, loss_fn)
    before, loss_fn = model_state(model), Traced(loss_fn)
    found = find_float32_layers(model, loss_fn, [x], **dict(*options))
    assert loss_fn.count <= 20
    assert model_state(model) == before
    with pytest.raises(ValueError, match=message):
        float32_layers(model, found)
    with pytest.raises(ValueError, match="no layers to save"):
        found.save(tmp_path / "layers.json")
    assert str(found).startswith("Computing layers in float32 does not help.")


MISUSE = {
    "no batches": (make, [], {}, ValueError, "batches is empty"),
    "an array": (make, X, {}, TypeError, "batches must be a list"),
    "margin": (make, [X], {"margin": 0.5}, ValueError, "margin must be finite"),
    "tolerance": (make, [X], {"tolerance": 0}, ValueError, "between 0 and 1"),
    "dtype": (make, [X], {"compute_dtype": mx.int8}, ValueError, "=mx.float16"),
    "frozen": (lambda: (make()[0].freeze(), mx.sum), [X], {}, ValueError, "Unfreeze"),
    "float32": (lambda: make(dtype=mx.float32), [X], {}, ValueError, "set_dtype"),
    "loss": (lambda: (make()[0], 3), [X], {}, TypeError, "Expected the loss function"),
}


@pytest.mark.parametrize(
    ("how", "batches", "options", "error", "message"), MISUSE.values(), ids=MISUSE
)
def test_search_misuse_leaves_the_model_alone(how, batches, options, error, message):
    model, loss_fn = how()
    before = model_state(model)
    with pytest.raises(error, match=message):
        find_float32_layers(model, loss_fn, batches, **options)
    assert model_state(model) == before
