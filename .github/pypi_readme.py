"""Make the README's relative links absolute, because on PyPI they lead nowhere.

python .github/pypi_readme.py https://github.com/OWNER/NAME v0.1.0
"""

import re
import sys
from pathlib import Path


def absolute(text: str, address: str, tag: str) -> str:
    """Return the text with links to files, and pictures, of the tag at the address."""
    address = address.rstrip("/")
    text = re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", rf"]({address}/blob/{tag}/\1)", text)
    return re.sub(
        r'\b(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{address}/raw/{tag}/\2"', text
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    readme = Path(__file__).parents[1] / "README.md"
    readme.write_text(absolute(readme.read_text(), *sys.argv[1:]))
