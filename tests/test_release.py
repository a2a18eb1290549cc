"""A release is stopped where tag, version, changelog and address do not agree."""

import importlib.util
import re
import shutil
from pathlib import Path

import pages
import pytest

import mlx_gradscale

ROOT = Path(__file__).parents[1]
ADDRESS = "https://github.com/owner/name"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".github" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def problems():
    pytest.importorskip("tomllib")  # the workflow has Python 3.11
    return script("check_release").problems


@pytest.fixture
def root(tmp_path):
    version = mlx_gradscale.__version__
    for name in ("CHANGELOG.md", "mlx_gradscale/_version.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "golden_saved" / version).mkdir(parents=True)
    pyproject = tmp_path / "pyproject.toml"
    text = re.sub(r"(?ms)^\[project\.urls\].*?(?=^\[)", "", pyproject.read_text())
    pyproject.write_text(f'{text}\n[project.urls]\nRepository = "{ADDRESS}"\n')
    return tmp_path


def test_a_release_that_agrees_goes_on(problems, root):
    assert problems(root, f"v{mlx_gradscale.__version__}", ADDRESS + "/") == []


def test_each_difference_is_told(problems, root):
    version = mlx_gradscale.__version__
    assert "tag" in problems(root, "v9.9.9", ADDRESS)[0]
    assert "urls" in problems(root, f"v{version}", "https://elsewhere")[0]
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 0.0.1\n")
    assert "CHANGELOG" in problems(root, f"v{version}", ADDRESS)[0]
    (root / "tests" / "golden_saved" / version).rmdir()
    assert "golden_saved" in problems(root, f"v{version}", ADDRESS)[1]


def test_no_link_of_the_readme_on_pypi_is_relative():
    readme = (ROOT / "README.md").read_text()
    text = script("pypi_readme").absolute(readme, ADDRESS, "v1.2.3")
    assert pages.LINK.search(readme)
    links = ["".join(found) for found in pages.LINK.findall(text)]
    assert [link for link in links if not link.startswith("https:")] == []
    assert f"]({ADDRESS}/blob/v1.2.3/docs/getting_started.md)" in text
    assert f'src="{ADDRESS}/raw/v1.2.3/examples/pictures/gradients-light.png"' in text


def test_the_issue_forms_ask_for_versions_by_a_command_that_runs():
    for name in ("bug.yml", "wrong_result.yml"):
        text = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text()
        (command,) = re.findall(r"`(mlx_gradscale --\w+)`", text)
        assert mlx_gradscale.__version__ in pages.run_command(command.split())
