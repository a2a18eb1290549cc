"""Every command by every name: what it says when it is asked, and when it is not."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_gradscale import __version__
from mlx_gradscale.__main__ import COMMANDS, main

GOLDEN = Path(__file__).parent / "golden_convert"


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert main([]) == 2


def test_a_wrong_word_is_named(capsys):
    assert main(["nonsense\x1b[2J"]) == 2
    assert r"no command 'nonsense\x1b[2J'" in capsys.readouterr().err


def test_the_version(capsys):
    assert main(["--version"]) == 0
    mlx = importlib.metadata.version("mlx")
    assert capsys.readouterr().out == f"mlx_gradscale {__version__}, MLX {mlx}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example(name, capsys):
    if name == "lora":
        pytest.importorskip("mlx_lm")
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert "example: mlx_gradscale" in " ".join(capsys.readouterr().out.split())


def test_arguments_reach_the_command(capsys):
    assert main(["inspect", str(GOLDEN / "conv_sgd.pt")]) == 0
    assert "SGD" in capsys.readouterr().out
    run = [sys.executable, "-m", "mlx_gradscale", "inspect", "no.pt"]
    assert subprocess.run(run, capture_output=True).returncode == 1


def test_each_command_is_a_script_and_so_are_all():
    text = (GOLDEN.parents[1] / "pyproject.toml").read_text()
    scripts = text.partition("[project.scripts]\n")[2].partition("\n\n")[0]
    found = {line.partition(" = ")[0].strip('"') for line in scripts.splitlines()}
    assert found == {
        "mlx_gradscale",
        *(f"mlx_gradscale.{name}" for name in COMMANDS if name != "run"),
    }
