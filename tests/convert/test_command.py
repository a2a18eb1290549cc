"""The command: flags, directions, one-line errors, and nothing half written."""

import os
import shutil
import subprocess
import sys
from collections import OrderedDict

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from support.convert_runs import (
    Small,
    fails,
    forward,
    identical,
    paths,
    small,
    usual,
)

from mlx_gradscale import restore_checkpoint
from mlx_gradscale import torch_checkpoint as pt
from mlx_gradscale.checkpoint import read_checkpoint
from mlx_gradscale.convert.command import main


def back(tmp_path, name="b.pt"):
    return ["--torch-path", f"{tmp_path}/{name}", "--mlx-path", f"{tmp_path}/run"]


def test_command_says_how_to_resume_and_what_a_dry_run_would_write(tmp_path, capsys):
    where = paths(tmp_path, usual() | {"args": {"lr": 1}})
    assert main([*where, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "fc.weight" in out
    assert "SGD at step 0, parameters: 2\nscaler: scaler\n" in out
    assert not (tmp_path / "run").exists()
    assert main(where) == 0
    said = capsys.readouterr()
    assert "not converted: epoch, args. " in said.err
    names = {}
    exec(said.out.partition("To resume:")[2], names)
    assert names["scaler"].get_scale() == 512.0
    assert main([*back(tmp_path), "--dry-run"]) == 0
    assert not (tmp_path / "b.pt").exists()


def test_conversion_direction_follows_from_the_path_that_exists(tmp_path, capsys):
    where = paths(tmp_path)
    assert "Neither" in fails(capsys, *where)
    paths(tmp_path, usual())
    assert "There is no" in fails(capsys, *where, "--to", "torch")
    assert main(where) == 0
    assert "--to mlx or --to torch" in fails(capsys, *where)
    for target in ("mlx", "torch"):
        assert "--overwrite" in fails(capsys, *where, "--to", target)
        assert main([*where, "--to", target, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--model", "no_such_module:Net"], "ModuleNotFoundError"),
        (["--model", "support.convert_runs:Nothing"], "no attribute 'Nothing'"),
        (["--model", "support.convert_runs"], "MODULE:NAME"),
        (["--model", "os:getcwd"], "type str. Pass an mlx.nn.Module"),
        (["--model", "sys:exit"], "SystemExit"),
        (["--names", "no_such_file"], "No such file"),
        (["--rename", "(=x"], "regular expression"),
        (["--rename", r"nothing=\g<x>"], "regular expression"),
        (["--model-key", "net"], "at keys={'model': 'net'}"),
        (["--mlx-path", "{}/a.pt/new/out"], "a.pt/new"),  # inside a file
        (["--mlx-path", "/dev", "--to", "mlx", "--overwrite"], "or a mount point"),
    ],
)
def test_convert_errors_take_one_line_and_leave_no_files(flags, word, tmp_path, capsys):
    where = paths(tmp_path, usual())
    assert word in fails(capsys, *where, *(flag.format(tmp_path) for flag in flags))
    assert [*tmp_path.iterdir()] == [tmp_path / "a.pt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rename", "nothing"], "'nothing' must contain '=' between its two parts."),
        (["--layout", "nothing"], "'nothing' must contain '=' between its two parts."),
        (["a.pt", "run"], "are required: --torch-path, --mlx-path"),
    ],
)
def test_usage_error_says_what_to_pass_after_one_line_of_usage(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: mlx_gradscale convert --torch-path PATH")
    assert error.endswith(message)


def test_rename_is_split_at_the_last_equals_sign(tmp_path):
    model = OrderedDict((f"a=b.{k}", v) for k, v in small()[0].items())
    where = paths(tmp_path, {"model": model})
    assert main([*where, "--rename", r"^a(?==)=b\.="]) == 0
    assert "fc.weight" in read_checkpoint(tmp_path / "run").weights


def test_safetensors_output_is_accepted_only_for_weights_alone(tmp_path, capsys):
    target = tmp_path / "b.safetensors"
    assert main(paths(tmp_path, usual())) == 0
    assert "ends in .pt" in fails(capsys, *back(tmp_path, target.name))
    assert not target.exists()
    pt.save(tmp_path / "a.pt", small()[0])
    forward(tmp_path / "a.pt", tmp_path / "run", "--to", "mlx", "--overwrite")
    forward(target, tmp_path / "run")
    identical(mx.load(str(target))["fc.weight"], small()[0]["fc.weight"])


def test_float64_tensors_are_rounded_in_mlx_and_come_back_as_float64(tmp_path):
    with mx.stream(mx.cpu):
        third = mx.array([1 / 3, 2 / 3], mx.float64)
        checkpoint = usual() | {"best": third}
        checkpoint["model"]["fc.bias"] = third
        checkpoint["optimizer"]["state"][1]["momentum_buffer"] = third
        assert main(paths(tmp_path, checkpoint)) == 0
        saved = read_checkpoint(tmp_path / "run")
        for array in (saved.weights["fc.bias"], saved.optimizer["fc.bias.v"]):
            assert array.dtype == mx.float32
        assert main(back(tmp_path)) == 0
        identical(pt.load(tmp_path / "b.pt"), checkpoint)  # MLX only rounded them


def test_way_back_reads_the_original_that_torch_json_names(tmp_path, capsys):
    """Also after both moved together; flags that it has already are an error."""
    (tmp_path / "x").mkdir()
    assert main(paths(tmp_path / "x", usual())) == 0
    shutil.move(tmp_path / "x", tmp_path / "y")
    where = back(tmp_path / "y")
    for flags in (["--optimizer-key", ""], ["--drop", "*"], ["--rename", "a=b"]):
        assert "torch.json already contains" in fails(capsys, *where, *flags)
    assert main([*where, "--accept", "amsgrad"]) == 0
    assert f"Reading {tmp_path}/y/a.pt" in capsys.readouterr().err
    identical(pt.load(tmp_path / "y/b.pt"), pt.load(tmp_path / "y/a.pt"))


@pytest.mark.parametrize("change", ["missing", "bytes", "pipe", "folder", "json"])
def test_original_that_is_missing_or_changed_is_an_error_that_names_like(
    change, tmp_path, capsys
):
    where, path = paths(tmp_path, usual()), tmp_path / "a.pt"
    assert main(where) == 0
    pt.save(tmp_path / "edited.pt", usual() | {"epoch": 4})
    if change == "json":
        (tmp_path / "run/torch.json").write_text('{"rows": 3}')
    elif change == "bytes":
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
        {"pipe": os.mkfifo, "folder": os.mkdir}.get(change, str)(path)
    assert "with --like" in fails(capsys, *back(tmp_path))
    assert not (tmp_path / "b.pt").exists()
    if change != "json":  # an edited copy of the original needs no other flags
        assert main([*back(tmp_path), "--like", str(tmp_path / "edited.pt")]) == 0
        assert pt.load(tmp_path / "b.pt")["epoch"] == 4


def test_weights_without_an_optimizer_convert_both_ways(tmp_path, capsys):
    assert main(paths(tmp_path, {"model": small()[0], "epoch": 3})) == 0
    assert "The weights are in save-*/model.saf" in capsys.readouterr().out
    with pytest.raises(ValueError, match="or load only the weights"):
        restore_checkpoint(tmp_path / "run", Small(), optim.SGD(0.1))
    # A single save of a run has the original of the run.
    for folder in ("run", "run/save-000001"):
        forward(tmp_path / "b.pt", tmp_path / folder)
        identical(pt.load(tmp_path / "b.pt"), pt.load(tmp_path / "a.pt"))
        (tmp_path / "b.pt").unlink()


@pytest.mark.parametrize(
    ("inside", "to"),
    [("run.pt", "mlx"), ("deep/run.pt", "mlx"), (".", "mlx"), (".", "torch")],
)
def test_path_that_contains_the_other_is_never_replaced(inside, to, tmp_path, capsys):
    where = paths(tmp_path, usual())
    assert main(where) == 0
    source = tmp_path / "run" / inside
    source.parent.mkdir(exist_ok=True)
    if inside != ".":
        shutil.copyfile(tmp_path / "a.pt", source)
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    more = ["--torch-path", str(source), "--to", to, "--overwrite"]
    fails(capsys, *where, *more)
    assert {p: p.is_file() and p.read_bytes() for p in before} == before


def test_failed_conversion_leaves_no_files_or_the_old_ones(
    tmp_path, capsys, monkeypatch
):
    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    where, saves = paths(tmp_path, usual()), "mlx_gradscale.convert.origin._digest"
    for flags in ([], ["--to", "mlx", "--overwrite"]):
        before = sorted(tmp_path.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(saves, interrupt)
            assert main([*where, *flags]) == 130
        assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
        assert sorted(tmp_path.rglob("*")) == before
        assert main([*where, *flags]) == 0
    before = sorted(tmp_path.rglob("*"))
    checkpoint = usual()
    checkpoint["model"]["fc.bias"] *= float("nan")
    paths(tmp_path, checkpoint)
    assert "nothing was saved" in fails(capsys, *where, *flags)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "run/history.csv").write_text("mine")
    assert "not part of this checkpoint: history" in fails(capsys, *where, *flags)


def test_convert_command_needs_no_torch_and_local_files_shadow_no_module(tmp_path):
    """A folder with its own json.py and numpy.py still converts."""
    for name in ("json", "numpy", "zipfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    text = "import mlx.nn as nn\nclass Net(nn.Module):\n    def __init__(self):\n"
    text += "        super().__init__()\n        self.fc = nn.Linear(3, 2)\n"
    (tmp_path / "my_model.py").write_text(text)
    pt.save(tmp_path / "a.pt", usual())
    done = subprocess.run(
        [sys.executable, "-P", "-c",
         "import sys; sys.modules['torch'] = None; "
         "from mlx_gradscale.convert.command import main; sys.exit(main())",
         "--torch-path", "a.pt", "--mlx-path", "run", "--model", "my_model:Net"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/torch.json").exists()
