"""Every code block of the documentation runs as it stands, page by page."""

from pathlib import Path
from pkgutil import resolve_name

import pages
import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
WITH_CODE = [path for path in DOCS if list(pages.blocks(path.read_text()))]


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", WITH_CODE, ids=named)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pages.run(path, {"__name__": "page"})


@pytest.mark.parametrize("path", [*DOCS, ROOT / "CONTRIBUTING.md"], ids=named)
def test_no_link_of_a_page_is_dead(path):
    assert pages.dead_links(path) == []


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md"], ids=named)
def test_the_names_of_a_page_are_there(path):
    for name in pages.names(path):
        resolve_name(name)


def test_the_commands_for_contributors_are_there():
    pages.run(ROOT / "CONTRIBUTING.md", {})


def test_a_wrong_page_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```output\n2\n```\n")
    with pytest.raises(AssertionError):
        pages.run(page, {})
    page.write_text("```sh\npython -m mlx_gradscale plot FILE.csv --blue\n```\n")
    with pytest.raises(AssertionError, match="--blue"):
        pages.run(page, {})
    page.write_text("```ruby\n```\n")
    with pytest.raises(AssertionError, match="ruby"):
        pages.run(page, {})
    page.write_text("[gone](gone.md) [there](page.md#here) [far](https://mlx.dev)\n")
    assert pages.dead_links(page) == ["gone.md"]
    page.write_text("Call `mlx_gradscale.guard.nothing`.\n")
    assert pages.names(page) == {"mlx_gradscale.guard.nothing"}
