"""Run folders, names and paths that somebody made to do harm, or by accident."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from convert_helpers import fails, forward, paths, small, usual

from mlx_gradscale import GradScaler, inspect, plot, torch_checkpoint
from mlx_gradscale.convert import (
    RunError,
    from_torch,
    load_run,
    main,
    read_run,
    read_torch,
    write_run,
    write_torch,
)
from mlx_gradscale.diagnostics import ScaleHistory
from mlx_gradscale.formats import load_flodl, save_flodl


def torch_folder(tmp_path):
    """A run that came from a folder; its record."""
    there = tmp_path / "there"
    there.mkdir()
    torch_checkpoint.save(there / "pytorch_model.bin", small()[0])
    forward(there, tmp_path / "run")
    return tmp_path / "run" / "training.json"


def snapshot(folder):
    return {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize(
    "name",
    ["/{}/victim.pt", "../victim.pt", "a/../../victim.pt", "..", ".", "", "a/b.pt",
     "a\\b.pt", "a\0.pt", "a\n.pt", "victim.py", ".bashrc"],
)  # fmt: skip
@pytest.mark.parametrize("flags", [[], ["--overwrite"], ["--dry-run"]])
def test_a_run_names_no_file_outside_its_folder(name, flags, tmp_path, capsys):
    """With "folder" set, keys of the checkpoint are names of files."""
    training = torch_folder(tmp_path)
    name = name.replace("{}", str(tmp_path))
    (tmp_path / "victim.pt").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "victim.py").write_text("mine")
    record = json.loads(training.read_text())
    record["checkpoint"][name] = {"$section": "model"}
    training.write_text(json.dumps(record))
    before = snapshot(tmp_path)
    where = ["--mlx-path", str(tmp_path / "run"), "--to", "torch"]
    flags = [*flags, "--torch-path", str(tmp_path / "out")]
    assert "The run's record names" in fails(capsys, *where, *flags)
    with pytest.raises(ValueError, match="names"):
        write_torch(tmp_path / "out", {name: {"w": mx.ones(2)}}, True, True)
    assert snapshot(tmp_path) == before


def test_where_the_model_was_rounded_is_not_read_from_a_file(tmp_path):
    """A live record holds a path; one in a file would be followed."""
    write_run(tmp_path / "run", from_torch(usual()))
    training = tmp_path / "run" / "training.json"
    record = json.loads(training.read_text())
    for key in ("rounded", "is_pattern"):
        record[key] = {"folder": "/etc", "names": []}
    training.write_text(json.dumps(record))
    found = read_run(tmp_path / "run").record
    assert (found.rounded, found.is_pattern) == (None, False)


def test_a_dry_run_lists_every_file(tmp_path, capsys):
    checkpoint = usual() | {"noise": mx.random.normal((9, 9))}
    where = paths(tmp_path, checkpoint)
    assert main([*where, "--dry-run"]) == 0
    said = capsys.readouterr().out
    listed = {line.split()[0] for line in said.splitlines() if "  new" in line}
    assert main(where) == 0
    assert listed == {str(p) for p in (tmp_path / "run").iterdir()}
    where[1] = str(tmp_path / "b.pt")
    capsys.readouterr()
    assert main([*where, "--dry-run"]) == 0
    assert f"{tmp_path / 'b.pt'}  new" in capsys.readouterr().out
    (tmp_path / "b.pt").touch()
    assert main([*where, "--dry-run", "--to", "torch", "--overwrite"]) == 0
    assert f"{tmp_path / 'b.pt'}  replaced" in capsys.readouterr().out


def test_a_dry_run_lists_every_file_of_a_folder(tmp_path, capsys):
    torch_folder(tmp_path)
    capsys.readouterr()
    where = ["--mlx-path", str(tmp_path / "run"), "--torch-path", str(tmp_path / "new")]
    assert main([*where, "--dry-run"]) == 0
    assert f"{tmp_path / 'new' / 'pytorch_model.bin'}  new" in capsys.readouterr().out


def run_command(here, *arguments):
    """The command as it is installed: the current folder is not in sys.path."""
    program = here.parent / "program"
    program.mkdir(exist_ok=True)
    code = "import sys\nfrom mlx_gradscale.convert import main\nsys.exit(main())\n"
    (program / "convert.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, str(program / "convert.py"), *arguments],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_a_model_does_not_shadow_the_standard_library(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    evil = "open('ran', 'w'); raise SystemExit('shadowed')\n"
    for name in ("fcntl", "ctypes", "shutil", "tqdm", "numpy", "gzip", "colorsys"):
        (here / f"{name}.py").write_text(evil)
    (here / "parts.py").write_text("SIZE = 3\n")
    # A name that is installed too: what the user asks for is the user's.
    (here / "pytest.py").write_text(
        "import colorsys, mlx.nn as nn\nfrom parts import SIZE\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(SIZE, 2)\n"
    )
    where = paths(here, usual())
    done = run_command(here, *where, "--model", "pytest:Model")
    assert done.returncode == 0, done.stderr
    assert not (here / "ran").exists()
    assert (here / "run" / "model.safetensors").exists()
    done = run_command(here, *where, "--model", "colorsys:Model", "--overwrite",
                       "--to", "mlx")  # fmt: skip
    assert "colorsys has no Model" in done.stderr
    assert not (here / "ran").exists()


def test_help_says_what_runs_code(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "runs their code" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, capsys):
    for name in ("a.pt", "a.safetensors", "a.json", "a.csv", "a.jsonl", "a.bin"):
        os.mkfifo(tmp_path / name)
    out = str(tmp_path / "out")
    for name in ("a.pt", "a.safetensors"):
        where = ["--torch-path", str(tmp_path / name), "--mlx-path", out]
        assert "is a pipe" in fails(capsys, *where)
        assert inspect.main([str(tmp_path / name)]) == 1
        assert "is a pipe" in capsys.readouterr().err
    with pytest.raises(OSError, match="is a pipe"):
        torch_checkpoint.load(tmp_path / "a.pt")
    for way in (torch_checkpoint.save, lambda path, _: GradScaler().save(path)):
        with pytest.raises(OSError, match="is a pipe"):
            way(tmp_path / "a.pt", {})
    with pytest.raises(OSError, match="is a pipe"):
        GradScaler().load(tmp_path / "a.json")
    with pytest.raises(OSError, match="is a pipe"):
        load_flodl(tmp_path / "a.bin")
    with pytest.raises(OSError, match="is a pipe"):
        save_flodl(tmp_path / "a.bin", GradScaler().state_dict())
    for name in ("a.csv", "a.jsonl"):
        for way in (ScaleHistory, ScaleHistory.load):
            with pytest.raises(OSError, match="is a pipe"):
                way(tmp_path / name)
        assert plot.main([str(tmp_path / name)]) == 1
    # As the place to write to, for a file and for a folder.
    where = paths(tmp_path / "files", None)
    (tmp_path / "files").mkdir()
    torch_checkpoint.save(tmp_path / "files" / "a.pt", usual())
    os.mkfifo(tmp_path / "files" / "run")
    assert "is a file, not a folder" in fails(
        capsys, *where, "--to", "mlx", "--overwrite"
    )
    (tmp_path / "files" / "run").unlink()
    assert main(where) == 0
    where[1] = str(tmp_path / "a.pt")
    assert "is a pipe" in fails(capsys, *where, "--to", "torch", "--overwrite")
    # Inside a folder that is read.
    os.mkfifo(tmp_path / "files" / "b.pt")
    with pytest.raises(OSError, match="is a pipe"):
        read_torch(tmp_path / "files")
    for name in ("training.json", "scaler.json", "model.safetensors"):
        place = tmp_path / "files" / "run" / name
        kept = place.read_bytes()
        place.unlink()
        os.mkfifo(place)
        with pytest.raises(OSError, match="is a pipe"):
            read_run(tmp_path / "files" / "run")
        place.unlink()
        place.write_bytes(kept)
    assert sum(p.is_fifo() for p in tmp_path.rglob("*")) == 7  # none was replaced


def test_a_device_is_not_replaced():
    with pytest.raises(OSError, match="is a device"):
        torch_checkpoint.save(os.devnull, {})
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(sys.platform == "darwin", reason="its disks keep names in UTF-8")
def test_a_folder_whose_name_is_no_text(tmp_path, capsys):
    base = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    base.mkdir()
    where = paths(base, usual())
    assert main(where) == 0
    assert "caf\\udce9" in capsys.readouterr().out
    assert read_run(base / "run").weights["fc.bias"].tolist() == [1.0, 2.0]
    assert inspect.main([str(base / "run")]) == 0
    assert inspect.main([str(base / "run" / "model.safetensors")]) == 0
    where[1] = str(base / "b.pt")
    assert main(where) == 0
    assert torch_checkpoint.load(base / "b.pt")["epoch"] == 3
    where[1] = str(base / "b.safetensors")
    where[3] = str(base / "run2")
    torch_checkpoint.save(base / "c.pt", small()[0])
    assert main(["--torch-path", str(base / "c.pt"), *where[2:]]) == 0
    assert main(where) == 0
    assert main(["--torch-path", where[1], "--mlx-path", str(base / "run3")]) == 0
    history = ScaleHistory(base / "run.csv", every=1)
    history.record(GradScaler(), loss=1.0)
    assert plot.main([str(base / "run.csv")]) == 0
    assert plot.main([str(base / "no.csv")]) == 1


def test_deep_json_is_an_error_with_a_sentence(tmp_path, capsys):
    for depth in (300, 100_000):
        deep = "[" * depth + "]" * depth
        path = tmp_path / "run.jsonl"
        path.write_text(f'{{"step": 1, "scale": {deep}, "applied": true}}\n')
        with pytest.raises(ValueError, match="line 1, is no record"):
            ScaleHistory.load(path)
        assert plot.main([str(path)]) == 1
        assert len(capsys.readouterr().err) < 400
        path = tmp_path / "scaler.json"
        path.write_text(f'{{"scale": {deep}}}')
        with pytest.raises((ValueError, KeyError)):
            GradScaler().load(path)
        if depth > 1000:
            assert inspect.main([str(path)]) == 1
        run = tmp_path / f"run{depth}"
        write_run(run, from_torch(usual()))
        record = (run / "training.json").read_text()
        changed = record.replace('"epoch": 3', f'"epoch": {deep}')
        assert changed != record
        (run / "training.json").write_text(changed)
        with pytest.raises(RunError):
            read_run(run)


def test_a_run_is_an_ordinary_value_error(tmp_path):
    assert issubclass(RunError, ValueError)
    for wrong in (read_run, lambda path: load_run(path, None)):
        with pytest.raises(RunError):
            wrong(tmp_path / "none")
        (tmp_path / "file").touch()
        with pytest.raises(RunError):
            wrong(tmp_path / "file")
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(RunError):
            wrong(tmp_path / "empty")


def test_an_interrupt_waits_until_mlx_is_there():
    """In the middle of its import it would end the process by SIGABRT."""
    code = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "mlx.core":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
try:
    import mlx_gradscale
except KeyboardInterrupt:
    print("interrupted", "mlx.core" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "interrupted True\n", done.stderr
