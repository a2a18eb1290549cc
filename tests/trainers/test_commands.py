"""Every command by every name: what it says and how it ends."""

import importlib.metadata
import os
import runpy
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from mlx_gradscale import __main__ as dispatcher
from mlx_gradscale import __version__, convert, float16, inspect, lora, plot

CHECKPOINT = Path(__file__).parent / "golden_convert" / "conv_sgd.pt"


@contextmanager
def closed_pipe():
    """Standard output that nobody reads, as after ``| head`` has seen enough."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output, redirect_stdout(output):
        yield


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (inspect, [str(CHECKPOINT)]),
        (inspect, ["--json", str(CHECKPOINT)]),
        (inspect, ["--help"]),
        (convert, ["--help"]),
        (plot, ["--help"]),
        (float16, ["--help"]),
        (lora, ["--help"]),
        (dispatcher, ["--help"]),
        (dispatcher, ["inspect", str(CHECKPOINT)]),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_word(command, arguments, capfd):
    if command is lora:
        pytest.importorskip("mlx_lm")
    with closed_pipe():
        code = command.main(arguments)
    assert code == 141  # 128 and SIGPIPE, as a shell tells it
    assert capfd.readouterr().err == ""


def test_a_module_that_is_run_inspects_and_minds_the_pipe():
    command = [sys.executable, "-m", "mlx_gradscale.inspect", str(CHECKPOINT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "conv_sgd.pt: PyTorch checkpoint" in done.stdout
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    piped.stdout.close()  # before it has begun to print
    assert piped.stderr.read() == b""
    piped.stderr.close()
    assert piped.wait() == 141


@pytest.mark.filterwarnings("ignore:'mlx_gradscale.inspect' found in sys.modules")
@pytest.mark.parametrize("name", ["convert", "float16", "inspect", "lora", "plot"])
def test_every_command_runs_as_a_module(name, monkeypatch, capsys):
    if name == "lora":
        pytest.importorskip("mlx_lm")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"mlx_gradscale.{name}", run_name="__main__")
    assert end.value.code == 0
    assert f"usage: mlx_gradscale.{name} " in capsys.readouterr().out


def test_the_package_imports_no_conversion():
    code = "import sys, mlx_gradscale; print('mlx_gradscale.convert' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_help_lists_every_command(capsys):
    assert dispatcher.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in dispatcher.COMMANDS)
    assert dispatcher.main([]) == 2


def test_a_wrong_word_is_named(capsys):
    assert dispatcher.main(["nonsense\x1b[2J"]) == 2
    assert r"no command 'nonsense\x1b[2J'" in capsys.readouterr().err


def test_the_version(capsys):
    assert dispatcher.main(["--version"]) == 0
    mlx = importlib.metadata.version("mlx")
    assert capsys.readouterr().out == f"mlx_gradscale {__version__}, MLX {mlx}\n"


@pytest.mark.parametrize("name", dispatcher.COMMANDS)
def test_each_help_has_an_example(name, capsys):
    if name == "lora":
        pytest.importorskip("mlx_lm")
    with pytest.raises(SystemExit) as stopped:
        dispatcher.main([name, "--help"])
    assert stopped.value.code == 0
    assert "example: mlx_gradscale" in " ".join(capsys.readouterr().out.split())


def test_arguments_reach_the_command(capsys):
    assert dispatcher.main(["inspect", str(CHECKPOINT)]) == 0
    assert "SGD" in capsys.readouterr().out
    run = [sys.executable, "-m", "mlx_gradscale", "inspect", "no.pt"]
    assert subprocess.run(run, capture_output=True).returncode == 1


def test_each_command_is_a_script_and_so_are_all():
    text = (CHECKPOINT.parents[2] / "pyproject.toml").read_text()
    scripts = text.partition("[project.scripts]\n")[2].partition("\n\n")[0]
    found = {line.partition(" = ")[0].strip('"') for line in scripts.splitlines()}
    assert found == {
        "mlx_gradscale",
        *(f"mlx_gradscale.{name}" for name in dispatcher.COMMANDS if name != "run"),
    }
