"""What a message or a page tells the user to type exists after one import."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import mlx_gradscale

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bmlx_gradscale(?:\.[A-Za-z_]\w*)+")
# The names of commands, not of Python objects.
COMMANDS = {"mlx_gradscale.lora", "mlx_gradscale.git"}
MODULES = {
    *("convert", "diagnostics", "distributed", "ema", "float32"),
    *("plot", "torch_checkpoint"),
}

RESOLVE = """
import json, sys
import mlx_gradscale
for name in json.load(sys.stdin):
    eval(name)
assert {"torch", "matplotlib", "tqdm", "mlx_lm"}.isdisjoint(sys.modules)
"""


def names_in_messages():
    for path in (ROOT / "mlx_gradscale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from NAME.findall(node.value)


def names_in_pages():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        yield from NAME.findall(path.read_text())


def test_every_documented_name_exists_after_one_import_of_nothing_optional():
    names = {*names_in_messages(), *names_in_pages()} - COMMANDS
    assert names >= {f"mlx_gradscale.{module}" for module in MODULES}
    command = [sys.executable, "-c", RESOLVE]
    subprocess.run(command, input=json.dumps(sorted(names)), text=True, check=True)


def test_dir_of_the_package_lists_only_public_names():
    modules = MODULES - {"float32"}
    assert dir(mlx_gradscale) == sorted({*mlx_gradscale.__all__, *modules})
    assert {"importlib", "mlx", "core", "files"}.isdisjoint(dir(mlx_gradscale))
    for name in dir(mlx_gradscale):
        assert getattr(mlx_gradscale, name)
