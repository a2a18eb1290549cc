"""The output of the inspect command for each kind of file."""

import json
import time

import mlx.core as mx
import pytest
from support.convert_runs import GOLDEN, forward, model_flag

from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.inspect import describe, main
from tests.support.torch_files import name, pickled, tensor, text


def said(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def by_name(path):
    return {entry["name"]: entry for entry in describe(path)["entries"]}


NAMESPACE = name("argparse", "Namespace") + b")R"
MANY = 50_000
# Objects that are cheap to refer to again, but large.
OBJECTS = {
    "list": NAMESPACE + b"}" + text("a") + b"](" + b"N" * MANY + b"esb",
    "key": NAMESPACE + b"}B" + (2**22).to_bytes(4, "little") + bytes(2**22) + b"Nsb",
    "texts": NAMESPACE + b"}" + text("a") + text("x" * 2**22) * 2 + b"\x86sb",
    "states": name("x", "Y") + b")R" + b"Nb" * MANY,
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_large_object_that_appears_many_times_is_read_once(kind, tmp_path):
    again = b"q\x00" + b"h\x00" * 15_000
    path = tmp_path / "a.pt"
    path.write_bytes(pickled(b"(" + OBJECTS[kind] + again + b"t"))
    start = time.process_time()
    assert len(describe(path)["entries"]) == 15_001
    assert time.process_time() - start < 10


def test_every_unusual_value_is_listed_and_valid_json(tmp_path, capsys):
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
    found = json.loads(
        said(capsys, tmp_path / "a.pt", "--json"), parse_constant=pytest.fail
    )
    shown = {x["name"]: x.get("value", x.get("dtype")) for x in found["entries"]}
    assert shown.pop("t").startswith("('3 bytes', 'yyy")
    assert shown == {
        "e": "{}",
        "f": "[]",
        "s": "{1}",
        "i": "int of 10000 bits",
        "nan": "nan",
        "list": "list of 99",
        "z": "complex64",
        "args/lr": 0.5,
        "deep" + "/x" * 11: "dict of 1",
        "(1, 'k')": 2.5,
    }


def test_pytorch_checkpoint_is_listed_with_shapes_and_values(capsys):
    text = said(capsys, GOLDEN / "conv_adamw.pt")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].endswith("conv_adamw.pt: 46 tensors, 1,691 elements")
    assert "model/features.0.weight float32 4x2x3x3" in lines
    assert "optimizer/param_groups/0/lr 0.01" in lines
    assert "optimizer/state/0/step float32 scalar" in lines
    assert "scaler/scale 512.0" in lines
    assert "epoch 3" in lines
    found = json.loads(said(capsys, GOLDEN / "conv_adamw.pt", "--json"))
    assert found == describe(GOLDEN / "conv_adamw.pt")


def test_converted_run_is_listed_without_counting_its_template(tmp_path):
    name = "conv_adamw"
    forward(GOLDEN / f"{name}.pt", tmp_path / "run", *model_flag(name))
    found = by_name(tmp_path / "run")
    weight = found["save-000001/model.safetensors/features.layers.0.weight"]
    assert weight["shape"] == [4, 3, 3, 2]
    assert found["save-000001/training.json/settings/0/class"]["value"] == "AdamW"
    assert not any(name.startswith("template.pt") for name in found)
    template = by_name(tmp_path / "run" / "template.pt")
    assert template["checkpoint/epoch"]["value"] == 3
    assert template["checkpoint/model/features.0.weight"]["shape"] == [4, 2, 3, 3]


def test_control_characters_are_escaped(tmp_path, capsys):
    odd = "w\x1b[2J\n\u202e"
    pt.save(tmp_path / "a.pt", {odd: mx.zeros(2), "note\x07": "a\r\x1b]0;b"})
    text = said(capsys, tmp_path / "a.pt")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"w\x1b[2J\n\u202e" in text
    assert r"a\r\x1b]0;b" in text


def test_inspect_errors_take_one_line_and_limits_can_be_raised(tmp_path, capsys):
    for file in ("missing.pt", "bad.pt", "bad.safetensors", "bad.json"):
        if file.startswith("bad"):
            (tmp_path / file).write_bytes(b"garbage")
        assert main([str(tmp_path / file)]) == 1
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1
    pt.save(tmp_path / "a.pt", list(range(1000)))
    assert main([str(tmp_path / "a.pt"), "--limit", "operations=100"]) == 1
    assert "--limit operations=..." in capsys.readouterr().err
    assert main([str(tmp_path / "a.pt"), "--limit", "operations=1e6"]) == 0
    assert main([str(tmp_path / "a.pt"), "--limit", "patience=3"]) == 1


def test_every_tensor_is_counted_though_not_every_one_is_listed(tmp_path, capsys):
    shapes = {f"w{i}": pt.TensorShape((2,), "bfloat16") for i in range(30_000)}
    deep = [mx.zeros(3)]
    for _ in range(15):
        deep = [deep]
    pt.save(tmp_path / "a.pt", {"w": shapes, "again": [shapes["w0"]], "deep": deep})
    found = json.loads(said(capsys, tmp_path / "a.pt", "--json"))
    assert (found["tensors"], found["elements"]) == (30_002, 60_005)
    assert len(found["entries"]) == 20_001
    assert "only 20,000 values" in found["entries"][-1]["value"]
    assert "a.pt: 30,002 tensors, 60,005 elements\n" in said(capsys, tmp_path / "a.pt")


def test_tensors_of_a_namespace_that_contains_itself_are_counted_once(tmp_path):
    start, end = NAMESPACE + b"q\x00}", tensor() + b"sb"
    itself = start + b"(" + b"".join(text(f"{i}") + b"h\x00" for i in range(9)) + b"u"
    (tmp_path / "a.pt").write_bytes(pickled(itself + text("w") + end))
    assert describe(tmp_path / "a.pt")["tensors"] == 1


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
    found = describe(tmp_path)
    assert [*found["errors"]] == ["b.pt", "c.json", "d.safetensors"]
    json.dumps(found)


def test_files_named_like_a_checkpoint_are_read_but_links_are_not(tmp_path):
    (tmp_path / "secret.json").write_text('{"key": 1}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.json").symlink_to("../secret.json")
    (tmp_path / "run" / "save-best.json").write_text('{"epoch": 1}')
    assert describe(tmp_path / "run")["entries"] == [
        {"name": "a.json", "value": "symbolic link, not followed"},
        {"name": "save-best.json/epoch", "value": 1},
    ]
