"""Folders of PyTorch files: models in several files, and files that are no part."""

import json

import mlx.core as mx
import pytest
from convert_helpers import fails, forward, identical, small

from mlx_gradscale import inspect, torch_checkpoint
from mlx_gradscale.convert import Record, main, read_run, read_torch, write_torch
from mlx_gradscale.convert.torch_folder import read_rest
from mlx_gradscale.run_folder.contents import RunError

NAMES = {
    "safetensors": ("model-0000{}-of-00002.safetensors", "model.safetensors"),
    "bin": ("pytorch_model-0000{}-of-00002.bin", "pytorch_model.bin"),
}


def sharded(folder, kind):
    """A model in two files, with its index, its optimizer and a tokenizer."""
    folder.mkdir()
    model, optimizer, _ = small()
    pattern, name = NAMES[kind]
    where = {}
    for i, (key, tensor) in enumerate(model.items(), start=1):
        where[key] = pattern.format(i)
        if kind == "bin":
            torch_checkpoint.save(folder / where[key], {key: tensor})
        else:
            path = str(folder / where[key])
            mx.save_safetensors(path, {key: tensor}, {"format": "pt"})
    index = {"metadata": {"total_size": 32}, "weight_map": where}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / f"{name}.index.json").write_text(text)
    torch_checkpoint.save(folder / "optimizer.pt", optimizer)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "empty.txt").touch()
    return folder / f"{name}.index.json"


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("kind", NAMES)
def test_a_model_in_several_files_goes_there_and_back(kind, has_index, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    index = sharded(there, kind)
    before = json.loads(index.read_text())
    if not has_index:
        index.unlink()
    forward(there, tmp_path / "run")
    assert read_run(tmp_path / "run").weights.keys() == {"fc.weight", "fc.bias"}
    forward(back, tmp_path / "run")
    assert {p.name for p in back.iterdir()} == {
        *(p.name for p in there.iterdir()),
        index.name,
    }
    after = json.loads((back / index.name).read_text())
    assert after["weight_map"] == before["weight_map"]
    if has_index:
        assert (back / index.name).read_bytes() == index.read_bytes()
    for name in ("tokenizer.json", "empty.txt"):
        assert (back / name).read_bytes() == (there / name).read_bytes()
    (content, _), (want, _) = read_torch(back), read_torch(there)
    identical(dict(content[index.name]), dict(want[index.name]))
    assert inspect.main([str(there)]) == 0


def test_one_of_several_files_is_not_a_model(tmp_path, capsys):
    sharded(tmp_path / "there", "bin")
    one = tmp_path / "there" / NAMES["bin"][0].format(1)
    target = ["--mlx-path", str(tmp_path / "run")]
    assert "give the folder" in fails(capsys, "--torch-path", str(one), *target)
    one.unlink()
    where = ["--torch-path", str(one.parent), *target]
    assert "of which 1 are there" in fails(capsys, *where)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda index: index["weight_map"].pop("fc.bias"), "do not hold the same"),
        (lambda index: index["weight_map"].update(x="a.bin"), "do not hold the same"),
        (lambda index: index["weight_map"].update(x="../a.bin"), "no plain name"),
        (lambda index: index["weight_map"].update(x=3), "no plain name"),
        (lambda index: index.update(weight_map=[]), "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(change, word, tmp_path, capsys):
    path = sharded(tmp_path / "there", "safetensors")
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    where = ["--torch-path", str(path.parent), "--mlx-path", str(tmp_path / "run")]
    assert word in fails(capsys, *where)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\xff"])
def test_an_index_that_is_no_json_is_an_error(text, tmp_path, capsys):
    path = sharded(tmp_path / "there", "safetensors")
    path.write_bytes(text.encode("latin-1"))
    where = ["--torch-path", str(path.parent), "--mlx-path", str(tmp_path / "run")]
    assert str(path) in fails(capsys, *where)


@pytest.mark.parametrize("name", ["../x-1-of-1.bin", "/x-1-of-1.bin", "x.py", "x.bin"])
def test_a_record_names_no_other_files_for_a_model(name, tmp_path, capsys):
    sharded(tmp_path / "there", "bin")
    forward(tmp_path / "there", tmp_path / "run")
    training = tmp_path / "run" / "training.json"
    record = json.loads(training.read_text())
    kept = json.dumps(record)
    (shards,) = record["shards"].values()
    shards["files"]["fc.bias"] = name
    training.write_text(json.dumps(record))
    out = str(tmp_path / "out")
    where = ["--mlx-path", str(tmp_path / "run"), "--torch-path", out]
    assert "is damaged" in fails(capsys, *where)
    record = json.loads(kept)
    record["carried"][name.replace("x.", "../x.")] = record["carried"]["empty.txt"]
    training.write_text(json.dumps(record))
    assert "is damaged" in fails(capsys, *where)
    assert not (tmp_path / "out").exists()


def test_what_is_carried_along_replaces_nothing(tmp_path, capsys):
    """And what is too large, or a folder, is left out with a word."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", small()[0])
    (there / "config.json").write_text("theirs")
    (there / "train.py").write_text("theirs")
    (there / "logs").mkdir()
    with open(there / "data.npy", "wb") as file:
        file.truncate(2**27)
    forward(there, tmp_path / "run")
    said = capsys.readouterr().err
    assert "Left out, as no files of a checkpoint: data.npy, logs." in said
    assert "as they are: config.json, train.py." in said
    back.mkdir()
    (back / "train.py").write_text("mine")
    where = ["--mlx-path", str(tmp_path / "run"), "--torch-path", str(back)]
    where += ["--to", "torch", "--overwrite"]
    assert main([*where, "--dry-run"]) == 0
    assert "train.py" not in capsys.readouterr().out
    assert main(where) == 0
    assert (back / "train.py").read_text() == "mine"
    assert (back / "config.json").read_text() == "theirs"
    assert {p.name for p in back.iterdir()} == {
        *("train.py", "config.json", "pytorch_model.bin")
    }


def test_a_folder_full_of_other_files_is_not_carried_along(tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", small()[0])
    for i in range(1100):
        (there / f"{i:04}.png").touch()
    (there / "a\nb.txt").touch()
    (there / ".c.0123456789abcdef.tmp").touch()
    (there / "folder.pt").mkdir()
    forward(there, tmp_path / "run")
    said = capsys.readouterr().err
    assert "0007.png and 992 more" in said
    assert len(read_run(tmp_path / "run").record.carried) == 1000
    (left,) = (line for line in said.splitlines() if "Left out" in line)
    assert ".c.0123456789abcdef.tmp" in left
    assert "1000.png" in left


def test_a_trainers_state_that_is_no_json_is_an_error(tmp_path):
    content = {"pytorch_model.bin": small()[0], "trainer_state.json": {"a": mx.ones(2)}}
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        write_torch(tmp_path / "out", content, is_folder=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [5, "text", {"other": mx.ones(2)}])
def test_an_index_without_its_model_is_an_error(content, tmp_path):
    """It was an AttributeError where a damaged run says that a number is the model."""
    shards = {"a.bin.index.json": {"metadata": {}, "files": {"w": "a-1-of-1.bin"}}}
    with pytest.raises(ValueError, match="other tensors than the index"):
        write_torch(
            tmp_path / "out",
            {"a.bin.index.json": content},
            is_folder=True,
            record=Record(shards=shards),
        )
    assert not (tmp_path / "out").exists()


def test_a_text_in_a_pytorch_file_is_not_taken_for_a_file(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", small()[0])
    torch_checkpoint.save(there / "note.pt", b"bytes")
    content, _ = read_torch(there)
    record = Record()
    read_rest(there, content, record)
    write_torch(tmp_path / "back", content, True, record=record)
    identical(read_torch(tmp_path / "back")[0], content)


def test_an_mlx_model_in_several_files_is_a_run(tmp_path):
    """As mlx-lm writes a large one."""
    for i, name in enumerate(("a", "b"), start=1):
        path = tmp_path / f"model-0000{i}-of-00002.safetensors"
        mx.save_safetensors(str(path), {name: mx.zeros(2)})
    assert read_run(tmp_path).weights.keys() == {"a", "b"}


def test_a_link_to_a_part_that_is_gone_is_named(tmp_path):
    mx.save_safetensors(str(tmp_path / "model-1-of-2.safetensors"), {"a": mx.zeros(2)})
    (tmp_path / "model-2-of-2.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(RunError, match=r"2-of-2\.safetensors is a link"):
        read_run(tmp_path)
