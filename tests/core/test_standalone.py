"""Imports go only backwards: each room knows what ARCHITECTURE.md says, and all of it.

The table there is the map; the imports are read from the sources.
"""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlx_gradscale"
# Whatever folder they are in, they stand on the top floor.
COMMANDS = ("command.py", "__main__.py")


def table():
    """room -> the rooms that it imports, in the order of the page."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = re.search(r"^## Rooms\n(.*?)^## ", text, re.M | re.S)[1]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", section, re.M)
    return {room: re.findall(r"`(\w+)`", imports) for room, imports in rows}


MAP = table()


def room_of(path):
    inside = path.relative_to(PACKAGE)
    if path.name in COMMANDS or inside.parts == ("__init__.py",):
        return None
    return inside.parts[0].removesuffix(".py")


def imported(path):
    """The rooms that a file imports, by relative imports, wherever they stand."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *filter(None, (node.module or "").split("."))]
            yield from target[:1] or [alias.name for alias in node.names]


def imports():
    found = {room: set() for room in MAP}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        if room not in (None, "_version"):
            found.setdefault(room, set()).update(imported(path))
    return {room: names - {room, "_version"} for room, names in found.items()}


FOUND = imports()


def test_the_map_has_every_room_and_no_other():
    assert sorted(MAP) == sorted(FOUND)


@pytest.mark.parametrize("room", MAP)
def test_a_room_imports_what_the_map_says(room):
    # A type of scaler.py, which calibration.py makes methods for.
    only_for_types = {"scaler"} if room == "calibration" else set()
    assert sorted(FOUND[room] - only_for_types) == sorted(MAP[room])


@pytest.mark.parametrize("room", MAP)
def test_it_imports_only_from_rooms_above(room):
    above = list(MAP)[: list(MAP).index(room)]
    assert set(MAP[room]) <= set(above)


def test_every_file_that_the_map_names_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in re.findall(r"`([\w/]+\.(?:py|toml))`", text):
        places = (ROOT / name, PACKAGE / name)
        assert any(place.exists() for place in places), name
