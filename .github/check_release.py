"""Stop a release whose tag, version, changelog and address do not agree.

python .github/check_release.py v0.1.0 https://github.com/OWNER/NAME
"""

import re
import sys
from pathlib import Path

import tomllib


def problems(root: Path, tag: str, address: str) -> list[str]:
    """Return a sentence for each thing that has to be mended before the release."""
    found = []
    text = (root / "mlx_gradscale" / "_version.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', text)[1]
    if tag != f"v{version}":
        found.append(f"The tag is {tag}, and _version.py has {version}.")
    headings = re.findall(
        r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    if version not in headings:
        found.append(f"CHANGELOG.md has no section for {version}.")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    urls = [url.rstrip("/") for url in project.get("urls", {}).values()]
    if address.rstrip("/") not in urls:
        found.append(f"[project.urls] in pyproject.toml does not have {address}.")
    if not (root / "tests" / "golden_saved" / version).is_dir():
        found.append(
            f"tests/golden_saved has no files of {version}: run make_saved.py."
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit("\n".join(problems(Path(__file__).parents[1], *sys.argv[1:])))
