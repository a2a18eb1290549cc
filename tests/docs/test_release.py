"""A release stops where tag, version, changelog and repository do not agree."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import mlx_gradscale

ROOT = Path(__file__).parents[2]
ADDRESS = "https://github.com/owner/name"
VERSION = mlx_gradscale.__version__


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".github" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def problems(tmp_path):
    pytest.importorskip("tomllib")  # Python 3.11, which the workflow has
    (tmp_path / "mlx_gradscale").mkdir()
    shutil.copy(ROOT / "mlx_gradscale" / "_version.py", tmp_path / "mlx_gradscale")
    pyproject = (ROOT / "pyproject.toml").read_text()
    text = script("project_urls").with_urls(pyproject, ADDRESS)
    (tmp_path / "pyproject.toml").write_text(text)
    changelog = f"# Changelog\n\n## {VERSION} (2026-11-17)\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)

    def check(tag=f"v{VERSION}", address=ADDRESS):
        return script("check_release").problems(tmp_path, tag, address)

    check.root = tmp_path
    return check


def test_release_whose_versions_agree_has_no_problems(problems):
    assert problems() == []
    assert problems(address=ADDRESS + "/") == []


def test_each_disagreement_of_a_release_is_reported(problems):
    assert "tag" in problems(tag="v9.9.9")[0]
    assert "urls" in problems(address="https://elsewhere")[0]
    changelog = problems.root / "CHANGELOG.md"
    changelog.write_text(f"# Changelog\n\n## {VERSION} (unreleased)\n")
    assert "CHANGELOG" in problems()[0]


def test_readme_has_no_relative_links_on_pypi():
    text = '[a](docs/x.md) [b](https://b) <img src="p.png"> [c](#here)'
    assert script("pypi_readme").absolute(text, ADDRESS, "v1") == (
        f'[a]({ADDRESS}/blob/v1/docs/x.md) [b](https://b) <img src="{ADDRESS}/raw/v1/'
        'p.png"> [c](#here)'
    )


@pytest.mark.parametrize(
    "path", [*(ROOT / ".github" / "workflows").iterdir()], ids=lambda path: path.name
)
def test_workflow_pins_actions_by_commit_and_has_least_permissions(path):
    text = path.read_text()
    assert "\npermissions:\n  contents: read\n\n" in text  # for every job, by default
    writes = {"deploy": ["pages", "id-token"], "publish": ["id-token"]}
    for job in re.split(r"\n(?=  \w+:\n)", text.partition("\njobs:\n")[2]):
        name = job.split(":")[0].strip()
        assert re.findall(r"([\w-]+): write", job) == writes.get(name, [])
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
