"""Check a release, and point its metadata to the repository that builds it.

    python .github/prepare_release.py v0.1.0 https://github.com/OWNER/NAME

It stops if tag, version and changelog disagree. Then it writes [project.urls], if there
are none, and makes the README's links absolute, because on PyPI they lead nowhere.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return a sentence for each thing to fix before the release."""
    found = []
    if tag != f"v{version}":
        found.append(f"The tag is {tag}, and _version.py has {version}.")
    dated = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no '## {version} (YYYY-MM-DD)'.")
    return found


def with_urls(pyproject: str, address: str) -> str:
    """Return a pyproject.toml that has [project.urls]."""
    if "\n[project.urls]" in pyproject:
        return pyproject
    urls = {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return f"{pyproject.rstrip()}\n\n[project.urls]\n{lines}"


def with_absolute_links(readme: str, address: str, tag: str) -> str:
    """Return the text with links to files, and pictures, of the tag at the address."""
    links = r"\]\((?!https?:|#)([^)\s]+)\)"
    readme = re.sub(links, rf"]({address}/blob/{tag}/\1)", readme)
    pictures = r'\b(src|srcset)="(?!https?:)([^"]+)"'
    return re.sub(pictures, rf'\1="{address}/raw/{tag}/\2"', readme)


def main(tag: str, address: str) -> None:
    """Check and change the files of this checkout."""
    text = (ROOT / "mlx_gradscale" / "_version.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', text)[1]
    if found := problems(tag, version, (ROOT / "CHANGELOG.md").read_text()):
        sys.exit("\n".join(found))
    pyproject, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    pyproject.write_text(with_urls(pyproject.read_text(), address))
    readme.write_text(with_absolute_links(readme.read_text(), address, tag))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
