"""Every command ends as others do: its codes, and no word about a closed pipe."""

import os
import runpy
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from mlx_gradscale import __main__ as dispatcher
from mlx_gradscale import convert, float16, inspect, lora, plot

GOLDEN = Path(__file__).parent / "golden_convert" / "conv_sgd.pt"


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
        (inspect, [str(GOLDEN)]),
        (inspect, ["--json", str(GOLDEN)]),
        (inspect, ["--help"]),
        (convert, ["--help"]),
        (plot, ["--help"]),
        (float16, ["--help"]),
        (lora, ["--help"]),
        (dispatcher, ["--help"]),
        (dispatcher, ["inspect", str(GOLDEN)]),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_word(command, arguments, capfd):
    with closed_pipe():
        code = command.main(arguments)
    assert code == 141  # 128 and SIGPIPE, as a shell tells it
    assert capfd.readouterr().err == ""


def test_a_module_that_is_run_inspects_and_minds_the_pipe():
    command = [sys.executable, "-m", "mlx_gradscale.inspect", str(GOLDEN)]
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
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"mlx_gradscale.{name}", run_name="__main__")
    assert end.value.code == 0
    assert f"usage: mlx_gradscale.{name} " in capsys.readouterr().out


def test_the_package_imports_no_conversion():
    code = "import sys, mlx_gradscale; print('mlx_gradscale.convert' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
