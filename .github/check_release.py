"""Stop a release whose tag, version, changelog and repository do not agree.

python .github/check_release.py v0.1.0 https://github.com/OWNER/NAME
"""

import re
import sys
from pathlib import Path

import tomllib


def problems(root: Path, tag: str, address: str) -> list[str]:
    """Return a sentence for each thing to fix before the release."""
    found = []
    text = (root / "mlx_gradscale" / "_version.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', text)[1]
    if tag != f"v{version}":
        found.append(f"The tag is {tag}, and _version.py has {version}.")
    dated = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no '## {version} (YYYY-MM-DD)'.")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    urls = [url.rstrip("/") for url in project.get("urls", {}).values()]
    if address.rstrip("/") not in urls:
        found.append(f"[project.urls] in pyproject.toml does not have {address}.")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit("\n".join(problems(Path(__file__).parents[1], *sys.argv[1:])))
