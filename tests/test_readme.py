"""Every snippet of the README runs as it stands, from top to bottom."""

import re
import subprocess
import sys
from pathlib import Path

import pages

import mlx_gradscale

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_snippets_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    languages = [language for language, _, _ in pages.blocks(README.read_text())]
    assert languages.count("python") >= 3
    pages.run(README, namespace)
    assert (tmp_path / "scaler.pt").exists()
    assert namespace["step_reached"] == 10
    assert namespace["applied"].item() in (True, False)


def test_what_it_links_to_is_there():
    assert pages.dead_links(README) == []


def test_it_is_short_and_leads_to_every_guide_and_example():
    text = README.read_text()
    assert len(text.splitlines()) <= 175
    # Pages that are another file, or made by a test, have their own links.
    others = ("index", "architecture", "benchmarks", "changelog", "contributing")
    others += ("security", "compatibility", "checkpoint_sources")
    for path in (ROOT / "docs").glob("*.md"):
        assert f"docs/{path.name}" in text or path.stem in others, path
    guides = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    for name in examples - {"overflowing.py"}:  # a part of another
        assert f"examples/{name}" in text + guides, name


def test_ci_finds_the_two_commands():
    for command in ("&& pytest", "&& python examples/quickstart.py"):
        (line,) = re.findall(f"^.*{command}.*$", README.read_text(), re.MULTILINE)
        assert line.startswith("pip install -e ")


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
