"""The code blocks of README, guides and CONTRIBUTING run, and their links resolve."""

import re
import runpy
from pathlib import Path

import pytest
from support import pages

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md"))]
WITH_CODE = [
    pytest.param(path, marks=[pytest.mark.compiles] * (path.stem == "own_loop"))
    for path in PAGES
    if list(pages.blocks(path.read_text()))
]


def page_id(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", WITH_CODE, ids=page_id)
def test_code_blocks_of_page_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pages.run(path, {"__name__": "page"})


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_of_page_resolve(path):
    assert pages.dead_links(path) == []
    assert pages.dead_anchors(path) == []


def test_site_copies_every_picture_and_links_to_its_repository(monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    read_page = runpy.run_path(str(ROOT / "docs" / "conf.py"))["read_page"]
    for path in DOCS:
        page = [path.read_text()]
        read_page(
            None, path.relative_to(ROOT / "docs").with_suffix("").as_posix(), page
        )
        assert "<img" not in page[0], path  # Sphinx would not copy its file
        if path.name == "index.md" and path.parent.name == "docs":
            assert "(https://github.com/owner/name/blob/main/README.md)" in page[0]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_named_in_the_guides_for_developers_exist(page):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?|\w+\.py)`", text)
    package = ROOT / "mlx_gradscale"
    folders = [ROOT, ROOT / "tests", package, package / "core"]
    assert len(paths) > 20
    assert [x for x in paths if not any((each / x).exists() for each in folders)] == []


def test_every_example_is_on_the_index():
    page = (ROOT / "docs" / "index.md").read_text()
    shown = set(re.findall(r"^- \[(.*\.py)\]\(../examples/\1\)", page, re.MULTILINE))
    assert shown == {x.name for x in (ROOT / "examples").glob("*.py")}
