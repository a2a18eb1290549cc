"""python .ci/check_skips.py LOG [--without-extras]: fail on skips that are not allowed.

LOG is the output of ``pytest -rs`` in an environment with the ``test-all`` extra, or
with ``test`` alone (``--without-extras``). If you add a test that is rightly skipped in
one of them, add its reason to the list.
"""

import re
import sys
from pathlib import Path

# (file, reason), as regular expressions that have to match from the start.
ALLOWED = [
    # .ci/interop installs what these need.
    (r"tests/interop/", r""),
    (r"tests/support/hf_trainer\.py", r""),  # called by tests/interop
    # On a Mac.
    (r"", r"Only Linux on x86_64 can flush subnormals"),
    (r"", r"memory is measured on Linux"),
]
WITHOUT_EXTRAS = [
    (r"", r".*(PyTorch|mlx-lm|mypy is not installed|the examples are)"),
    (r"", r"could not import '(torch|mlx_lm|tomllib)[.\w]*'"),
    (r"", r"unable to import module .*lora_training\.py"),  # its doctests
]
_LINE = re.compile(r"^SKIPPED \[\d+\] ([^:]+):?\d*: (.*)$", re.MULTILINE)


def not_allowed(log: str, allowed: list[tuple[str, str]]) -> list[str]:
    """Return a line for each skip that has no entry in the list."""
    return [
        f"{file}: {reason}"
        for file, reason in _LINE.findall(log)
        if not any(re.match(a, file) and re.match(b, reason) for a, b in allowed)
    ]


if __name__ == "__main__":
    match sys.argv[1:]:
        case [path]:
            allowed = ALLOWED
        case [path, "--without-extras"]:
            allowed = ALLOWED + WITHOUT_EXTRAS
        case _:
            sys.exit(__doc__)
    if found := not_allowed(Path(path).read_text(), allowed):
        sys.exit("\n".join(["Tests were skipped without being allowed to:", *found]))
