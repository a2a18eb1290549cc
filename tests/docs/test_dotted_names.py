"""Whatever a message or a page tells the user to type exists after one import."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bmlx_gradscale(?:\.[A-Za-z_]\w*)+")
# The names of commands, not of Python objects.
COMMANDS = {"mlx_gradscale.lora", "mlx_gradscale.git"}

RESOLVE = """
import json, sys
import mlx_gradscale
missing = []
for name in json.load(sys.stdin):
    try:
        eval(name)
    except AttributeError as error:
        missing.append(f"{name}: {error}")
print(*missing, sep="\\n")
"""


def names_in_messages():
    for path in (ROOT / "mlx_gradscale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from NAME.findall(node.value)


def names_in_pages():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        yield from NAME.findall(path.read_text())


def test_every_dotted_name_in_a_message_or_page_exists_after_importing_the_package():
    names = {*names_in_messages(), *names_in_pages()} - COMMANDS
    assert "mlx_gradscale.diagnostics.explain_overflow" in names
    ended = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(sorted(names)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stdout.strip(), ended.stdout
