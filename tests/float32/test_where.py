"""Layers are named by paths, globs, chains, functions and files."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_gradscale import float32_layers
from mlx_gradscale.float32 import Float32Search


class Block(nn.Identity):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.norm = nn.RMSNorm(4)
        self.act = nn.gelu


class Shelf(nn.Module):
    """Holds modules and is never called."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(), Block(), Block()]
        self.by_name = {"a": Block(), "b": Block()}


class Net(nn.Identity):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.shelf = Shelf()
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("norm", ["norm"]),
        ("shelf.blocks.1.mlp.layers.0", ["shelf.blocks.1.mlp.layers.0"]),
        ("shelf.by_name.b", ["shelf.by_name.b"]),
        ("*.mlp", [f"shelf.{b}.mlp" for b in ("blocks.0", "blocks.1", "blocks.2")]
            + [f"shelf.by_name.{b}.mlp" for b in "ab"]),
        ("shelf.blocks.[01].attn", ["shelf.blocks.0.attn", "shelf.blocks.1.attn"]),
        # Layers inside a float32 layer are float32 already.
        ("shelf.blocks.0*", ["shelf.blocks.0"]),
        (["shelf.blocks.0.mlp", "shelf.blocks.0", "norm"], ["shelf.blocks.0", "norm"]),
        (["norm", "norm"], ["norm"]),
        ("", [""]),
        ([], []),
        ("shelf.by_name.b to head", ["shelf.by_name.b", "norm", "head"]),
        ("shelf.blocks.2.mlp to shelf.by_name.a.attn",
            ["shelf.blocks.2.mlp", "shelf.blocks.2.norm", "shelf.by_name.a.attn"]),
        ("head to norm", ["head", "norm"]),
        ("norm to head to the loss", ["norm", "head"]),
        (("norm", "head"), ["norm", "head"]),
        (lambda path, module: isinstance(module, nn.RMSNorm) and "blocks" in path,
            [f"shelf.blocks.{i}.norm" for i in range(3)]),
    ],
)  # fmt: skip
def test_layers_can_be_selected_by(where, expected):
    assert float32_layers(Net(), where) == expected


REFUSED = {
    "nearest": ("shelf.blocks.1.mpl", ValueError, r"mean shelf\.blocks\.1\.mlp"),
    "far": ("zzzzzzzz", ValueError, r"has no module 'zzzzzzzz'\.$"),
    "array": ("head.weight", ValueError, "mean head"),
    "never called": ("shelf", ValueError, r"does not define __call__.*shelf\.\*"),
    "chain": ("norm to haed", ValueError, "mean head"),
    "only the loss": (" to the loss to norm", ValueError, "no module 'the loss to"),
    "glob in a chain": ("shelf.by_name.* to norm", ValueError, "no module"),
    "none": (None, TypeError, "where must be"),
    "class": (nn.Linear, TypeError, "where must be"),
    "module": (nn.Linear(2, 2), ValueError, "no module 'weight'"),
    "no file": (Path("none.json"), FileNotFoundError, "none.json"),
}


@pytest.mark.parametrize(("where", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_where_raises_and_leaves_the_model_unchanged(where, error, message):
    model = Net()
    before = [type(module) for _, module in model.named_modules()]
    with pytest.raises(error, match=message):
        float32_layers(model, where)
    assert [type(module) for _, module in model.named_modules()] == before
    with pytest.raises(TypeError, match=r"must be an mlx\.nn\.Module"):
        float32_layers({"norm": mx.ones(3)}, "norm")


@pytest.mark.parametrize("as_string", [False, True])
def test_layers_round_trip_through_a_file(tmp_path, as_string):
    path = tmp_path / "float32.json"
    where = ["shelf.blocks.0.mlp", "norm to head", "embed to the loss"]
    Float32Search(where).save(path)
    assert json.loads(path.read_text())["layers"] == where
    again = float32_layers(Net(), str(path) if as_string else path)
    assert again == float32_layers(Net(), where)
    with pytest.raises(ValueError, match=r"must end in \.json"):
        Float32Search(where).save(tmp_path / "layers.txt")
    assert [x.name for x in tmp_path.iterdir()] == ["float32.json"]


GOOD = {"format": "mlx_gradscale.float32_layers", "version": 1, "layers": ["norm"]}
OTHER = {
    "not JSON": b"\x80\x04K\x01.",
    "another format": json.dumps({**GOOD, "format": "x"}).encode(),
    "version": json.dumps({**GOOD, "version": 2}).encode(),
    "nested": json.dumps({**GOOD, "layers": [["norm"]]}).encode(),
    "unknown layer": json.dumps({**GOOD, "layers": ["nrom"], "by": "hand"}).encode(),
}


@pytest.mark.parametrize("content", OTHER.values(), ids=OTHER)
def test_file_that_is_not_a_layer_list_is_refused(tmp_path, content):
    path = tmp_path / "float32.json"
    path.write_bytes(content)
    model = Net()
    message = r"float32\.json (does not contain a list|cannot be read)|mean norm"
    with pytest.raises(ValueError, match=message):
        float32_layers(model, path)
    assert type(model.norm) is nn.RMSNorm
