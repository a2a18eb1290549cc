"""Every command: what it prints and how it ends."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from mlx_gradscale import __main__ as dispatcher
from mlx_gradscale import __version__
from mlx_gradscale.commands import run_command

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "golden" / "convert" / "conv_sgd.pt"


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", str(CHECKPOINT)],
        *([name, "--help"] for name in dispatcher.COMMANDS),
        ["--help"],
    ],
    ids=" ".join,
)
def test_closed_pipe_ends_a_command_without_a_message(arguments, capfd):
    if arguments[0] == "lora":
        pytest.importorskip("mlx_lm")
    # Nobody reads standard output, as after ``| head`` has seen enough.
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output, redirect_stdout(output):
        code = dispatcher.main(arguments)
    assert code == 141  # 128 plus SIGPIPE, as a shell reports it
    assert capfd.readouterr().err == ""


def test_expected_error_prints_one_line_and_others_are_raised(capsys):
    def fail():
        raise ValueError("the path\nis wrong\x1b[2J")

    assert run_command(fail, (ValueError,)) == 1
    assert capsys.readouterr().err == "error: the path is wrong\\x1b[2J\n"
    with pytest.raises(ValueError, match="is wrong"):
        run_command(fail, (KeyError,))


def test_ctrl_c_ends_a_command_with_exit_code_130(capsys):
    def interrupt():
        raise KeyboardInterrupt

    assert run_command(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_importing_the_package_does_not_import_convert():
    code = "import sys, mlx_gradscale; print('mlx_gradscale.convert' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, [f"\n  {name} " for name in dispatcher.COMMANDS]),
        ([], 2, ["usage: mlx_gradscale COMMAND"]),
        (["nonsense\x1b[2J"], 2, [r"'nonsense\x1b[2J' is not a command."]),
        (["--version"], 0, [__version__, importlib.metadata.version("mlx")]),
        (["inspect", str(CHECKPOINT)], 0, ["conv_sgd.pt"]),
        (["inspect", "no.pt"], 1, ["no.pt"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_command_prints_and_returns_the_exit_code(arguments, code, said, capsys):
    assert dispatcher.main(arguments) == code
    output = "".join(capsys.readouterr())
    assert all(text in output for text in said)


@pytest.mark.parametrize("name", dispatcher.COMMANDS)
def test_help_of_each_command_has_an_example(name, capsys):
    if name == "lora":
        pytest.importorskip("mlx_lm")
    with pytest.raises(SystemExit) as stopped:
        dispatcher.main([name, "--help"])
    assert stopped.value.code == 0
    assert "example: mlx_gradscale" in " ".join(capsys.readouterr().out.split())


def test_installed_scripts_are_mlx_gradscale_and_mlx_gradscale_lora():
    tomllib = pytest.importorskip("tomllib")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"mlx_gradscale", "mlx_gradscale.lora"}
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
