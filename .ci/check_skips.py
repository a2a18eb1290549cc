"""python .ci/check_skips.py LOG: fail on every skipped test that is not allowed here.

LOG is what ``pytest -rs`` printed where all extras are installed. Whoever adds a skip
that is right in this environment adds its reason to the list.
"""

import re
import sys
from pathlib import Path

# (file, reason), as regular expressions that have to match from the start.
ALLOWED = [
    # .ci/interop installs what these need.
    (r"tests/interop/", r""),
    (r"", r"Only Linux on x86_64 can flush subnormals"),
]
_LINE = re.compile(r"^SKIPPED \[\d+\] ([^:]+):?\d*: (.*)$", re.MULTILINE)


def not_allowed(log: str) -> list[str]:
    """Return a line for each skip that has no entry in the list."""
    return [
        f"{file}: {reason}"
        for file, reason in _LINE.findall(log)
        if not any(re.match(a, file) and re.match(b, reason) for a, b in ALLOWED)
    ]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if found := not_allowed(Path(sys.argv[1]).read_text()):
        sys.exit("\n".join(["Tests were skipped without being allowed to:", *found]))
