"""py.typed is a promise: a user's script is checked by a strict type checker."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_users_script_passes_a_strict_type_checker(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n")
    options = ["--strict", f"--config-file={config}", "--follow-imports=silent"]
    # MLX says of few of its names that others may use them, and types few functions.
    options += ["--implicit-reexport", "--untyped-calls-exclude=mlx"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, TESTS / "support" / "typed_user.py"],
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
