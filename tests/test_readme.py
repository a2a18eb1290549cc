"""Every snippet of the README runs as it stands, from top to bottom."""

import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from pathlib import Path

import mlx_gradscale

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_python_snippets_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    snippets = blocks("python")
    assert len(snippets) >= 7
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    assert (tmp_path / "scaler.pt").exists()
    assert (tmp_path / "run.csv").exists()
    assert namespace["applied"].item() in (True, False)


def test_the_commands_and_files_it_names_are_there():
    extras = set(metadata("mlx_gradscale").get_all("Provides-Extra"))
    scripts = {script.name for script in entry_points(group="console_scripts")}
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    for line in commands:
        words = shlex.split(line)
        if words[0] == "pip":
            assert set(re.findall(r"\[(.*?)\]", line)[0].split(",")) <= extras
        else:
            assert words[0] in scripts
    for link in re.findall(
        r"\]\((?!http)([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README
    ):
        assert (ROOT / "".join(link)).exists(), link


def test_every_public_name_has_a_docstring():
    for name in mlx_gradscale.__all__:
        if not name.startswith("__"):
            assert getattr(mlx_gradscale, name).__doc__, name


def test_importing_the_package_imports_nothing_optional():
    code = (
        "import sys, mlx_gradscale, mlx_gradscale.diagnostics, mlx_gradscale.convert;"
        "print([m for m in ('torch', 'matplotlib', 'tqdm', 'mlx_lm') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert out.stdout.decode().strip() == "[]"
