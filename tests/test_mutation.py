"""The script that changes one thing at a time finds what tests leave open."""

import json
import subprocess
import sys
from pathlib import Path

from mutants import mutants
from mutation import TESTS, known_survivors

SMALL = '''"""A module."""


def is_small(x: "int < 3") -> bool:
    """Tell whether it is."""
    return x < 10
'''
WEAK = "from small import is_small\n\n\ndef test():\n    assert is_small(3)\n"
STRONG = WEAK + "    assert is_small(9)\n    assert not is_small(10)\n"


def run(
    folder: Path, tests: str, *options: str, lines: str = ""
) -> subprocess.CompletedProcess:
    (folder / "small.py").write_text(SMALL)
    (folder / "test_small.py").write_text(tests)
    script = Path(__file__).with_name("mutation.py")
    command = [sys.executable, str(script), f"small.py{lines}"]
    command += ["--tests", "test_small.py", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_what_the_tests_do_not_ask_survives(tmp_path):
    done = run(tmp_path, WEAK)
    assert "small.py: 1 of 4 killed" in done.stdout, done.stderr
    for after in ("(x <= 10)", "x < (11)", "x < (9)"):
        assert f"  - return x < 10\n  + return {after}\n" in done.stdout
    assert done.returncode == 1
    assert (tmp_path / "small.py").read_text() == SMALL


def test_tests_of_both_sides_of_a_bound_kill_all(tmp_path):
    done = run(tmp_path, STRONG, "--mutants", "3", lines=":5,6")
    assert "small.py: 3 of 3 killed, 0 known; of 4" in done.stdout, done.stderr
    assert done.returncode == 0


def test_only_mutants_of_the_lines_that_are_asked_for(tmp_path):
    done = run(tmp_path, STRONG, lines=":5,7")
    assert "small.py: 0 of 0 killed, 0 known; of 0" in done.stdout, done.stderr


def test_the_table_names_what_is_there():
    root = Path(__file__).parent.parent
    for module, tests in TESTS.items():
        assert [path for path in (module, *tests) if not (root / path).is_file()] == []
        assert len(set(tests)) == len(tests)


def test_tests_that_fail_by_themselves_are_no_measure(tmp_path):
    done = run(tmp_path, WEAK + "    assert is_small(10)\n")
    assert "without a mutant" in done.stderr
    assert done.returncode == 1


def test_what_is_changed():
    source = (
        "def f(a: int = 1, b=True):\n"
        "    '''Says 5.'''\n"
        "    if not a and b is None:\n"
        "        raise ValueError(f'{a + 1} é')\n"
        "    a.x = 2 ** b\n"
        "    print(a)\n"
        "    return None\n"
    )
    found = {mutant.after for mutant in mutants(source)}
    assert found == {
        "def f(a: int = (2), b=True):",
        "def f(a: int = (0), b=True):",
        "def f(a: int = 1, b=(False)):",
        "if (not a or b is None):",
        "if (a) and b is None:",
        "if not a and (b is not None):",
        "pass",
        "a.x = (2 * b)",
        "a.x = (3) ** b",
        "a.x = (1) ** b",
    }
    for mutant in mutants(source):
        compile(mutant.source, "mutant", "exec")


def test_each_recorded_survivor_has_a_reason():
    path = Path(__file__).with_name("mutation_survivors.json")
    records = json.loads(path.read_text())
    assert len(records) == len(known_survivors())
    for record in records:
        assert record.keys() == {"module", "before", "after", "why"}
        assert record["module"] in TESTS
        assert record["before"] != record["after"]
        assert record["why"].endswith(".")
