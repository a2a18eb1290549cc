"""Imports go only backwards: what each room of the conversion half may know."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mlx_gradscale"
# room -> the rooms and modules that it may import
MAY_IMPORT = {
    "files": set(),
    "commands": {"files"},
    "torch_checkpoint": {"files"},
    "state_files": {"files", "torch_checkpoint"},
    "formats": {"files", "scale", "state_dict"},
    "run_folder": {
        *("files", "torch_checkpoint", "state_files"),
        *("scale", "state_tree", "masters", "remainder", "scaler", "optimizer"),
    },
    "checkpoint": {
        *("files", "run_folder", "distributed", "finite", "scale", "state_tree"),
        *("masters", "remainder", "scaler", "optimizer", "optimizer_state"),
    },
    "convert": {
        *("commands", "files", "torch_checkpoint", "state_files", "formats"),
        *("run_folder", "scaler", "optimizer", "remainder"),
    },
    "inspect": {"commands", "convert"},
}


def modules(room):
    folder = PACKAGE / room
    return folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{room}.py"]


def imported(path):
    """The rooms that a file imports, by relative imports, wherever they stand."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module or "").split(".")]
            names = [alias.name for alias in node.names]
            yield from [target[0]] if target[0] else names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_it_may_know(room):
    found = {name for path in modules(room) for name in imported(path)} - {room}
    assert found - MAY_IMPORT[room] == set()


def test_only_commands_and_convert_know_convert():
    rooms = [p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()]
    knowing = {
        room
        for room in rooms
        for path in modules(room)
        if "convert" in set(imported(path))
    }
    assert knowing - {"convert"} == {"inspect"}
