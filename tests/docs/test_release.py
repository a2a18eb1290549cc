"""A release whose tag, version and changelog disagree stops; workflows are safe."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

GITHUB = Path(__file__).parents[2] / ".github"
ADDRESS = "https://github.com/owner/name"
spec = spec_from_file_location("prepare_release", GITHUB / "prepare_release.py")
prepare_release = module_from_spec(spec)
spec.loader.exec_module(prepare_release)


@pytest.mark.parametrize(
    ("tag", "date", "expected"),
    [
        ("v1.2", "2026-11-17", []),
        ("v1.3", "2026-11-17", ["The tag is v1.3, and _version.py has 1.2."]),
        ("v1.2", "unreleased", ["CHANGELOG.md has no '## 1.2 (YYYY-MM-DD)'."]),
    ],
)
def test_release_needs_one_version_and_a_dated_changelog(tag, date, expected):
    changelog = f"# Changelog\n\n## 1.2 ({date})\n"
    assert prepare_release.problems(tag, "1.2", changelog) == expected


def test_release_uses_urls_of_its_repository_unless_they_are_set():
    text = prepare_release.with_urls('[project]\nname = "x"\n', ADDRESS)
    assert f'\n[project.urls]\nRepository = "{ADDRESS}"\n' in text
    assert prepare_release.with_urls(text, "https://elsewhere") == text


def test_readme_has_no_relative_links_on_pypi():
    text = '[a](docs/x.md) [b](https://b) <img src="p.png"> [c](#here)'
    assert prepare_release.with_absolute_links(text, ADDRESS, "v1") == (
        f'[a]({ADDRESS}/blob/v1/docs/x.md) [b](https://b) <img src="{ADDRESS}/raw/v1/'
        'p.png"> [c](#here)'
    )


@pytest.mark.parametrize(
    "path", [*(GITHUB / "workflows").iterdir()], ids=lambda path: path.name
)
def test_workflow_pins_actions_by_commit_and_has_minimal_permissions(path):
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
