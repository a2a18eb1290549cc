"""Change one detail of the package at a time, and check that a test fails.

    python -m tools.mutations [PATTERN ...]

``mutations.txt`` lists the changes: a file of the package and the tests of its part,
the text to replace, which must occur exactly once in the file, and its replacement.
The tests run with ``pytest -x`` in a copy of the project. If no test fails, a promise
has no test. Patterns select mutations by file, such as ``checkpoint``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
# pytest's exit codes: 0 if all tests pass, 1 if one fails.
RESULTS = {0: "MISSED", 1: "caught"}


def read_mutations(patterns: list[str]) -> list[tuple[str, list[str], str, str]]:
    """Return file, tests, text and replacement of each; raise if one is out of date."""
    lines = [x for x in LIST.read_text().splitlines() if x and x[0] != "#"]
    found = []
    for where, old, new in zip(*[iter(lines)] * 3, strict=True):
        file, tests = where.split(": ")
        old, new = old.removeprefix("- "), new.removeprefix("+ ")
        if (PROJECT / "mlx_gradscale" / file).read_text().count(old) != 1:
            sys.exit(f"{old!r} is not in {file} exactly once. Change {LIST}.")
        if not patterns or any(pattern in file for pattern in patterns):
            found.append((file, tests.split(), old, new))
    return found


def run_tests(project: Path, tests: list[str]) -> tuple[str, str]:
    """Run tests until one fails; return the result and the first failure."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    failures = [x for x in ended.stdout.splitlines() if x.startswith("FAILED")]
    first = failures[0].split(" - ")[0][7:] if failures else "no test"
    return RESULTS.get(ended.returncode, f"exit code {ended.returncode}"), first


def main(patterns: list[str]) -> int:
    mutations, results = read_mutations(patterns), []
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".git", "__pycache__", "build")
        shutil.copytree(PROJECT, project, ignore=ignored)
        for file, tests, old, new in mutations:
            start, path = time.perf_counter(), project / "mlx_gradscale" / file
            text = path.read_text()
            path.write_text(text.replace(old, new))
            result, first = run_tests(project, tests)
            path.write_text(text)
            seconds = f"{time.perf_counter() - start:.0f} s"
            print(
                f"{result:8}{seconds:>6}  {file}: {new}\n{'':16}by {first}", flush=True
            )
            results.append(result)
    print(f"{results.count('caught')} of {len(results)} mutations were caught.")
    return results.count("caught") < len(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
