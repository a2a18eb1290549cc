"""The command: flags, plans, one-line errors, nothing half done."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from convert_helpers import GOLDEN, fails, forward, model_flag, paths, small, usual

from mlx_gradscale import inspect, torch_checkpoint
from mlx_gradscale.convert import (
    Choices,
    Options,
    command,
    from_torch,
    load_run,
    main,
    progress,
    read_run,
    save_run,
)
from mlx_gradscale.run_folder import contents


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    where = ["--torch-path", str(GOLDEN / "conv_adamw.pt"), "--mlx-path"]
    assert main([*where, str(tmp_path / "run"), *model_flag("conv"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "features.0.weight features.layers.0.weight 4x3x3x2 float32 conv" in lines
    assert "up.weight up.weight 4x3x3x6 float32 conv_transpose" in lines
    assert "features.1.num_batches_tracked (training.json)" in lines
    assert "0 AdamW 10 0.01 6" in lines  # one of the 7 steps was skipped
    assert "scale 512.0" in lines
    assert list(tmp_path.iterdir()) == []
    forward(GOLDEN / "conv_adamw.pt", tmp_path / "run", *model_flag("conv"))
    forward(tmp_path / "no.pt", tmp_path / "run", "--dry-run")
    assert not (tmp_path / "no.pt").exists()


def test_direction_and_existing_files(tmp_path, capsys):
    where = paths(tmp_path)
    said = fails(capsys, *where)
    assert "nothing to read" in said
    assert str(tmp_path / "a.pt") in said
    where = paths(tmp_path, usual())
    assert "nothing at --mlx-path" in fails(capsys, *where, "--to", "torch")
    assert main(where) == 0
    assert "Both paths exist" in fails(capsys, *where)
    before = (tmp_path / "run" / "training.json").read_bytes()
    assert "--overwrite" in fails(capsys, *where, "--to", "mlx")
    assert "--overwrite" in fails(capsys, *where, "--to", "torch")
    (tmp_path / "run" / "other").write_text("x")
    assert main([*where, "--to", "mlx", "--overwrite"]) == 0
    assert (tmp_path / "run" / "training.json").read_bytes() == before
    assert (tmp_path / "run" / "other").read_text() == "x"
    assert main([*where, "--to", "torch", "--overwrite"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"a.pt", "run"}


def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys):
    (tmp_path / "a.pt").write_bytes(b"garbage")
    fails(capsys, *paths(tmp_path))
    checkpoint = usual() | {"model": {"conv.weight": mx.zeros((2, 3, 3, 3))}}
    where = paths(tmp_path, checkpoint)
    assert "conv.weight" in fails(capsys, *where)
    assert "OLD=NEW" in fails(capsys, *where, "--rename", "x")
    assert "MODULE:NAME" in fails(capsys, *where, "--model", "x")
    assert "no_such_module" in fails(capsys, *where, "--model", "no_such_module:x")
    assert "has no nothing" in fails(capsys, *where, "--model", f"{__name__}:nothing")
    assert "mlx.nn.Module" in fails(capsys, *where, "--model", f"{__name__}:small")
    where = paths(tmp_path, {"model": {"w": mx.array([1.0])}, "odd": {1: 2}})
    assert main(where) == 0
    (tmp_path / "run" / "training.json").write_text('{"format": "other"}')
    (tmp_path / "a.pt").unlink()
    assert "not written by" in fails(capsys, *where)
    (tmp_path / "run" / "training.json").write_text("{")
    assert "is not JSON" in fails(capsys, *where)
    (tmp_path / "run" / "model.safetensors").write_bytes(b"xx")
    assert "not a safetensors file" in fails(capsys, *where)
    assert {p.name for p in tmp_path.iterdir()} == {"run"}
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


@pytest.mark.parametrize("rename", ["(=x", r"^a=\2", r"fc=\g<x>"])
def test_a_bad_rename_is_one_line(rename, tmp_path, capsys):
    said = fails(capsys, *paths(tmp_path, usual()), "--rename", rename)
    assert f"--rename {rename}: " in said


def test_a_rename_is_split_at_the_last_equals_sign(tmp_path):
    where = paths(tmp_path, usual())
    assert main([*where, "--rename", r"^(?=fc\.)=layers.0."]) == 0
    names = read_run(tmp_path / "run").weights.keys()
    assert names == {"layers.0.fc.weight", "layers.0.fc.bias"}


def no_attribute():
    return object().nothing


def leaves():
    sys.exit("enough")


def interrupted():
    raise KeyboardInterrupt


def test_a_model_that_raises_is_one_line(tmp_path, capsys):
    where = paths(tmp_path, usual())
    said = fails(capsys, *where, "--model", f"{__name__}:no_attribute")
    assert f"{__name__}:no_attribute raised AttributeError" in said
    assert "SystemExit: enough" in fails(
        capsys, *where, "--model", f"{__name__}:leaves"
    )


def test_an_interrupt_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    where = paths(tmp_path, usual())
    assert main([*where, "--model", f"{__name__}:interrupted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(contents, "write_arrays", lambda *_: interrupted())
    where[-1] = str(tmp_path / "new" / "deep" / "run")
    assert main(where) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_unknown_words_to_accept_are_an_error(tmp_path, capsys):
    where = paths(tmp_path, usual())
    said = fails(capsys, *where, "--accept", "amsgrda")
    assert "amsgrad" in said
    assert main([*where, "--accept", "amsgrad"]) == 0
    (tmp_path / "a.pt").unlink()
    assert "dampening" in fails(capsys, *where, "--accept", "x")


def test_to_safetensors(tmp_path, capsys):
    """It wrote a zip file under that name."""
    where = paths(tmp_path, usual())
    assert main(where) == 0
    where[1] = str(tmp_path / "back.safetensors")
    assert "ends in .pt" in fails(capsys, *where)
    assert not (tmp_path / "back.safetensors").exists()
    model = dict(usual()["model"])
    mx.save_safetensors(str(tmp_path / "in.safetensors"), model)
    where[1] = str(tmp_path / "in.safetensors")
    assert main([*where, "--to", "mlx", "--overwrite"]) == 0
    where[1] = str(tmp_path / "back.safetensors")
    assert main(where) == 0
    back, metadata = mx.load(where[1], return_metadata=True)
    assert metadata == {"format": "pt"}
    assert back.keys() == model.keys()
    assert all(mx.array_equal(back[key], model[key]) for key in model)


def test_a_dry_run_shows_and_fails_as_the_real_one(tmp_path, capsys):
    model = nn.Module()
    model.fc = nn.Linear(3, 2)
    where = paths(tmp_path, usual())
    assert main(where) == 0
    resumed = load_run(tmp_path / "run", model)
    resumed.optimizer.learning_rate = 0.025
    resumed.optimizer.state["step"] = mx.array(41, mx.uint64)
    save_run(tmp_path / "run", model, resumed.optimizer, resumed.scaler)
    where += ["--to", "torch", "--dry-run"]
    assert "is there already" in fails(capsys, *where)
    (tmp_path / "a.pt").unlink()
    assert main(where) == 0
    lines = [" ".join(x.split()) for x in capsys.readouterr().out.splitlines()]
    assert any(x.startswith("0 SGD 2 0.02500000") and x.endswith(" 41") for x in lines)
    inspect.main([str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "lr=0.025" in said
    assert "lr=0.1" not in said


def test_errors_in_a_folder_name_the_file(tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", usual()["model"])
    (there / "optimizer.bin").write_bytes(b"garbage")
    where = ["--torch-path", str(there), "--mlx-path", str(tmp_path / "run")]
    assert str(there / "optimizer.bin") in fails(capsys, *where)
    (there / "optimizer.bin").unlink()
    assert main(where) == 0
    path = tmp_path / "run" / "training.json"
    where[1] = str(tmp_path / "back")
    whole = path.read_text()
    for old, new in (
        ('"$section"', '"$strange"'),
        ('"entries": {', '"entries": [], "x": {'),
        ('"order"', '"odrer"'),
        ('"version": 1', '"version": 9'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        assert str(path) in fails(capsys, *where)


def test_a_refused_setting_can_be_accepted(tmp_path, capsys):
    checkpoint = usual()
    checkpoint["optimizer"]["param_groups"][0]["maximize"] = True
    where = paths(tmp_path, checkpoint)
    assert "--accept" in fails(capsys, *where)
    assert main([*where, "--accept", "maximize"]) == 0
    assert "[WARNING] SGD has maximize=True" in capsys.readouterr().err


def test_parts_that_are_gone_are_left_out_with_a_word(tmp_path, capsys):
    where = paths(tmp_path, usual())
    assert main(where) == 0
    (tmp_path / "a.pt").unlink()
    (tmp_path / "run" / "optimizer.safetensors").unlink()
    assert main(where) == 0
    assert "no optimizer state: it is left out" in capsys.readouterr().err
    assert list(torch_checkpoint.load(tmp_path / "a.pt")) == [
        "model",
        "scaler",
        "epoch",
    ]


def test_names_from_a_file(tmp_path):
    checkpoint = usual()
    model = {"a": mx.zeros(2), "b": mx.ones(2)}
    state = checkpoint["optimizer"]
    state["state"] = {i: {"momentum_buffer": mx.full(2, i)} for i in (0, 1)}
    where = paths(tmp_path, {"model": model, "optimizer": state})
    (tmp_path / "names.txt").write_text("b\na\n")
    assert main([*where, "--names", str(tmp_path / "names.txt"), "--step", "9"]) == 0
    flat = read_run(tmp_path / "run").optimizer
    assert (flat["b.v"].tolist(), flat["a.v"].tolist()) == ([0, 0], [1, 1])
    assert flat["step"].item() == 9


def test_float64_needs_a_decision(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3, dtype=torch.float64)}, tmp_path / "a.pt")
    where = paths(tmp_path)
    said = fails(capsys, *where)
    assert "--float64 float32" in said
    assert "mx." not in said
    said = fails(capsys, *where, "--float64", "float64")
    assert "w is float64" in said
    assert "--float64 float32" in said
    fails(capsys, *where, "--float64", "float64", "--dry-run")
    assert main([*where, "--float64", "float32"]) == 0
    assert read_run(tmp_path / "run").weights["w"].dtype == mx.float32


def test_doubles_beside_the_model_are_kept(tmp_path):
    """--float64 float64 could write nothing at all."""
    torch = pytest.importorskip("torch")
    best = torch.tensor([[1 / 3, float("nan"), float("-inf")]], dtype=torch.float64)
    history = torch.rand(100, dtype=torch.float64)
    checkpoint = {"model": {"w": torch.ones(3)}, "best": best, "history": history}
    torch.save(checkpoint, tmp_path / "a.pt")
    assert main([*paths(tmp_path), "--float64", "float64"]) == 0
    (tmp_path / "a.pt").unlink()
    assert main(paths(tmp_path)) == 0
    back = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(back["history"], history)
    assert torch.equal(back["best"].nan_to_num(), best.nan_to_num())
    assert back["best"].dtype == torch.float64


def test_an_optimizer_without_a_model_is_refused(tmp_path, capsys):
    _, optimizer, scaler = small()
    where = paths(tmp_path, {"optimizer": optimizer, "scaler": scaler})
    assert "no model" in fails(capsys, *where)
    assert main([*where, "--optimizer-key", ""]) == 0


def test_scaler_states_of_others_are_converted_with_a_word(tmp_path, capsys):
    model, _, _ = small()
    scaler = {"scale": mx.array([64.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    where = paths(tmp_path, {"model": model, "scaler": scaler})
    assert main(where) == 0
    said = capsys.readouterr().err
    assert "hysteresis=2" in said
    assert "growth_interval=1000" in said
    assert read_run(tmp_path / "run").scaler["scale"] == 64.0
    (tmp_path / "a.pt").unlink()
    assert main(where) == 0
    assert "came from megatron" in capsys.readouterr().err
    assert torch_checkpoint.load(tmp_path / "a.pt")["scaler"]["growth_interval"] == 1000


def test_as_a_process(tmp_path):
    run = [sys.executable, "-m", "mlx_gradscale"]
    where = paths(tmp_path, usual())
    done = subprocess.run([*run, "convert", *where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2
    assert "convert" in done.stderr


@pytest.mark.parametrize("tqdm", [True, False])
def test_big_arrays_have_a_progress_bar_on_a_terminal(monkeypatch, capsys, tqdm):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    arrays = {"a": mx.zeros(1000), "b": mx.ones(500) + 1}
    progress.evaluate(arrays)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_BIG", 1)
    progress.evaluate(arrays)
    assert capsys.readouterr().err == ""  # not a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress.evaluate(arrays)
    said = capsys.readouterr().err
    assert ("converting" in said, "100%" in said) == (tqdm, tqdm)


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path, monkeypatch, capsys):
    where, back = paths(tmp_path, usual()), tmp_path / "a.pt"
    assert main(where) == 0
    back.unlink()
    monkeypatch.setattr(command, "evaluate", lambda arrays: back.write_text("mine"))
    assert "is there already" in fails(capsys, *where)
    assert back.read_text() == "mine"


def test_choices_from_python():
    tensors = {"c.weight": mx.zeros((2, 3, 5))}
    run = from_torch(tensors, options=Options(Choices(conv=("c.*",))))
    assert run.weights["c.weight"].shape == (2, 5, 3)


def test_importing_needs_no_torch():
    code = (
        "import sys; import mlx_gradscale.convert, mlx_gradscale.inspect; "
        "bad = {'torch', 'tqdm', 'matplotlib', 'mlx_lm'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
