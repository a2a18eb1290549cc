"""Shapes without data, and templates that are filled with arrays later."""

import argparse
import io

import mlx.core as mx
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import Placeholder, TensorShape
from tests.support.torch_files import records, save_bytes, torch_bytes

torch = pytest.importorskip("torch")


def mapped(value, change, seen=None):
    """Replace the tensors of an object in place, also those inside placeholders."""
    seen = {} if seen is None else seen
    if isinstance(value, (mx.array, TensorShape)):
        return seen.setdefault(id(value), (change(value), value))[0]
    if id(value) in seen:
        return value
    seen[id(value)] = value, value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = mapped(item, change, seen)
    elif isinstance(value, list):
        value[:] = [mapped(item, change, seen) for item in value]
    elif type(value) is tuple:
        return tuple(mapped(item, change, seen) for item in value)
    elif isinstance(value, Placeholder):
        value.args = mapped(value.args, change, seen)
        for _, items in value.edits:
            mapped(items, change, seen)
    return value


def test_shapes_reads_every_dtype_without_reading_data():
    obj = {
        "float8": torch.zeros(2, 3).to(torch.float8_e5m2),
        "double": torch.zeros(4, dtype=torch.float64),
        "half": torch.zeros(0, 2, dtype=torch.float16),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }
    expected = {
        "float8": TensorShape((2, 3), "float8_e5m2"),
        "double": TensorShape((4,), "float64"),
        "half": TensorShape((0, 2), "float16"),
        "parameter": TensorShape((2,), "float32", True, True),
    }
    for is_zip in (True, False):
        data = torch_bytes(obj, _use_new_zipfile_serialization=is_zip)
        assert torch_checkpoint.shapes(data) == expected
    # Without the data, only shapes can be told.
    damaged = bytearray(torch_bytes({"w": torch.ones(1000, 1000)}))
    damaged[2_000_000] ^= 1
    assert torch_checkpoint.shapes(damaged)["w"].shape == (1000, 1000)


def test_tied_tensors_are_one_leaf_of_a_template():
    weight = torch.ones(2)
    found = torch_checkpoint.shapes(torch_bytes([weight, weight.detach(), weight[1:]]))
    assert found[0] is found[1]
    assert found[2] == TensorShape((1,), "float32")


def test_filled_template_equals_the_original_pickle_byte_for_byte(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    run = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, best=torch.tensor(0.5)),
        "module": torch.nn.Linear(2, 2),  # a whole object, with Parameters
        "half": torch.ones(2, dtype=torch.bfloat16),
        "truth": torch.tensor([True]),
        "epoch": 3,
    }
    data = torch_bytes(run)
    original = torch_checkpoint.load(data)
    arrays = []
    mapped(torch_checkpoint.load(data), arrays.append)
    template = mapped(torch_checkpoint.load(data), TensorShape.of)
    torch_checkpoint.save(tmp_path / "template.pt", template)
    assert (tmp_path / "template.pt").stat().st_size < 12_000

    again = torch_checkpoint.load(tmp_path / "template.pt")
    assert again["model"] == torch_checkpoint.shapes(data)["model"]
    assert again["model"]._metadata == original["model"]._metadata
    rest = iter(arrays)
    filled = mapped(again, lambda leaf: leaf.fill(mx.array(next(rest))))
    back = save_bytes(filled)
    assert records(back) == records(save_bytes(original))
    assert records(back)["data.pkl"] == records(data)["data.pkl"]
    module = torch.load(io.BytesIO(back), weights_only=False)["module"]
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())


def test_template_may_contain_tensors_too():
    obj = {"w": TensorShape((2, 3), "bfloat16"), "rng": mx.arange(3)}
    found = torch_checkpoint.load(save_bytes(obj))
    assert found["w"] == obj["w"]
    assert found["rng"].tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="TensorShape"):
        torch.load(io.BytesIO(save_bytes(obj)), weights_only=True)
