"""python .ci/check_skips.py LOG [--without-extras]: fail on skips that are not allowed.

LOG is the output of ``pytest -rs`` in an environment with the ``test-all`` extra, or
with ``test`` alone (``--without-extras``). If you add a test that is rightly skipped in
one of them, add its reason to the list.
"""

import re
import sys
from pathlib import Path

# Regular expressions that match a reason from its start.
ON_A_MAC = [r"memory is measured on Linux"]
WITHOUT_EXTRAS = [
    r".*(PyTorch|mlx-lm|mypy is not installed|the examples are)",
    r"could not import '(torch|mlx_lm|tomllib)[.\w]*'",
    r"unable to import module .*lora_training\.py",  # its doctests
]
_LINE = re.compile(r"^SKIPPED \[\d+\] ([^:]+):?\d*: (.*)$", re.MULTILINE)


def not_allowed(log: str, allowed: list[str]) -> list[str]:
    """Return a line for each skip whose reason is not in the list."""
    return [
        f"{file}: {reason}"
        for file, reason in _LINE.findall(log)
        if not any(re.match(pattern, reason) for pattern in allowed)
    ]


if __name__ == "__main__":
    match sys.argv[1:]:
        case [path]:
            allowed = ON_A_MAC
        case [path, "--without-extras"]:
            allowed = ON_A_MAC + WITHOUT_EXTRAS
        case _:
            sys.exit(__doc__)
    if found := not_allowed(Path(path).read_text(), allowed):
        sys.exit("\n".join(["Tests were skipped without being allowed to:", *found]))
