"""The output of the inspect command for each kind of file."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from mlx_gradscale import save_checkpoint
from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.inspect import describe, main
from tests.support.torch_files import GOLDEN, name, pickled, tensor, text


def said(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def rows(path):
    """The table as a dict of names and values."""
    lines = describe(path)[0].splitlines()[3:]
    return {line.split("  ")[0].strip(): line.split("  ")[-1].strip() for line in lines}


NAMESPACE = name("argparse", "Namespace") + b")R"
# Objects that are cheap to refer to again, but large.
OBJECTS = {
    "list": NAMESPACE + b"}" + text("a") + b"](" + b"N" * 50_000 + b"esb",
    "states": name("x", "Y") + b")R" + b"Nb" * 50_000,
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_large_object_that_appears_many_times_is_listed_each_time(kind, tmp_path):
    again = b"q\x00" + b"h\x00" * 5_000
    path = tmp_path / "a.pt"
    path.write_bytes(pickled(b"(" + OBJECTS[kind] + again + b"t"))
    assert len(rows(path)) == 5_001


def test_every_unusual_value_is_listed(tmp_path, capsys):
    deep = {"a": 1, "b": 2}
    for _ in range(12):
        deep = {"x": deep}
    pt.save(tmp_path / "a.pt", mx.zeros((2, 3)))
    assert "the file itself  float32 2x3\n" in said(capsys, tmp_path / "a.pt")
    values = {"e": {}, "f": [], "s": {1}, "t": (b"abc", "y" * 300), "i": 2**9999}
    values |= {"nan": float("nan"), "list": [*range(99)], "z": mx.array(1j)}
    args = pt.Placeholder("argparse", "Namespace").called(b"R", ())
    args.edits.append((b"b", [{"lr": 0.5}]))
    values["args"] = args
    pt.save(tmp_path / "a.pt", values | {"deep": deep, (1, "k"): 2.5})
    shown = rows(tmp_path / "a.pt")
    assert shown.pop("t").startswith("(b'abc', 'yyy")
    assert shown == {
        "e": "{}",
        "f": "[]",
        "s": "{1}",
        "i": "int of 10000 bits",
        "nan": "nan",
        "list": "list of 99",
        "z": "complex64 scalar",
        "args/lr": "0.5",
        "deep" + "/x" * 11: "dict of 1",
        "(1, 'k')": "2.5",
    }


def test_pytorch_checkpoint_is_listed_with_shapes_and_values(capsys):
    path = GOLDEN.parent / "convert" / "conv_adamw.pt"
    lines = [" ".join(line.split()) for line in said(capsys, path).splitlines()]
    assert lines[0].endswith("conv_adamw.pt: 46 tensors, 1,691 elements")
    assert "model/features.0.weight float32 4x2x3x3" in lines
    assert "optimizer/param_groups/0/lr 0.01" in lines
    assert "optimizer/state/0/step float32 scalar" in lines
    assert "scaler/scale 512.0" in lines
    assert "epoch 3" in lines


def test_newest_checkpoint_of_a_run_is_listed(tmp_path):
    model = nn.Linear(3, 2)
    for _ in range(2):
        save_checkpoint(tmp_path / "run", model, optim.AdamW(0.1))
    found = rows(tmp_path / "run")
    assert found["save-000002/model.safetensors/weight"] == "float32 2x3"
    assert found["save-000002/training.json/settings/0/class"] == "AdamW"
    assert not any(name.startswith("save-000001") for name in found)


def test_control_characters_are_escaped(tmp_path, capsys):
    odd = "w\x1b[2J\n\u202e"
    pt.save(tmp_path / "a.pt", {odd: mx.zeros(2), "note\x07": "a\r\x1b]0;b"})
    text = said(capsys, tmp_path / "a.pt")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"w\x1b[2J\n\u202e" in text
    assert r"a\r\x1b]0;b" in text


@pytest.mark.parametrize(
    "file", ["missing.pt", "bad.pt", "bad.safetensors", "bad.json"]
)
def test_inspect_errors_take_one_line(file, tmp_path, capsys):
    if file != "missing.pt":
        (tmp_path / file).write_bytes(b"garbage")
    assert main([str(tmp_path / file)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1


def test_every_tensor_is_counted_though_not_every_one_is_listed(tmp_path, capsys):
    weights = {f"w{i}": mx.zeros((2,)) for i in range(21_000)}
    deep = [mx.zeros(3)]
    for _ in range(15):
        deep = [deep]
    pt.save(tmp_path / "a.pt", {"w": weights, "again": [weights["w0"]], "deep": deep})
    text = said(capsys, tmp_path / "a.pt")
    assert "a.pt: 21,001 tensors, 42,003 elements\n" in text
    assert len(text.splitlines()) == 20_004
    assert "only 20,000 values" in text.splitlines()[-1]


def test_tensors_of_a_namespace_that_contains_itself_are_counted_once(tmp_path):
    start, end = NAMESPACE + b"q\x00}", tensor() + b"sb"
    itself = start + b"(" + b"".join(text(f"{i}") + b"h\x00" for i in range(9)) + b"u"
    (tmp_path / "a.pt").write_bytes(pickled(itself + text("w") + end))
    assert "a.pt: 1 tensor, 4 elements" in describe(tmp_path / "a.pt")[0]


def test_bad_file_in_a_folder_does_not_hide_the_others(tmp_path, capsys):
    pt.save(tmp_path / "a.pt", {"w": mx.zeros((2, 3))})
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 cut off")
    (tmp_path / "c.json").write_bytes(b" " * (2**24 + 1))
    (tmp_path / "d.safetensors").write_bytes(b"garbage")
    (tmp_path / "e.json").write_text('{"epoch": 3}')
    assert main([str(tmp_path)]) == 1
    shown, error = capsys.readouterr()
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0].endswith(": 1 tensor, 6 elements")
    assert {"a.pt/w float32 2x3", "e.json/epoch 3"} < {*lines}
    for file in ("b.pt", "c.json", "d.safetensors"):
        assert any(line.startswith(f"{file} cannot be read: ") for line in lines)
    assert error.startswith("error: 3 files could not be read. b.pt: The zip directory")
    assert [*dict(describe(tmp_path)[1])] == ["b.pt", "c.json", "d.safetensors"]
