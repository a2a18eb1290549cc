"""Write [project.urls] of the repository that builds a release, if there are none.

python .github/project_urls.py https://github.com/OWNER/NAME
"""

import sys
from pathlib import Path


def with_urls(text: str, address: str) -> str:
    """Return a pyproject.toml that has [project.urls]."""
    if "\n[project.urls]" in text:
        return text
    address = address.rstrip("/")
    urls = {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return f"{text.rstrip()}\n\n[project.urls]\n{lines}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    pyproject.write_text(with_urls(pyproject.read_text(), sys.argv[1]))
