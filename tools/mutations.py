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
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
# pytest's exit codes: 0 if all tests pass, 1 if one fails.
RESULTS = {0: "MISSED", 1: "caught"}


class Mutation(NamedTuple):
    """A change of one file, and the tests that should notice it."""

    file: str
    tests: list[str]
    old: str
    new: str

    def apply(self, project: Path) -> str:
        """Change the file, and return its former text."""
        path = project / "mlx_gradscale" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            sys.exit(f"{self.old!r} is not in {self.file} exactly once. Change {LIST}.")
        path.write_text(text.replace(self.old, self.new))
        return text


def read_mutations(patterns: list[str]) -> list[Mutation]:
    """Read the list, which has three lines for each mutation."""
    lines = [x for x in LIST.read_text().splitlines() if x and x[0] != "#"]
    found = []
    for where, old, new in zip(*[iter(lines)] * 3, strict=True):
        file, *tests = where.replace(":", "").split()
        found.append(Mutation(file, tests, old.strip("- "), new.strip("+ ")))
    return [x for x in found if not patterns or any(p in x.file for p in patterns)]


def run_tests(project: Path, tests: list[str]) -> tuple[str, str]:
    """Run tests until one fails; return the result and the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests]
    environment = os.environ | {"PYTHONPATH": str(project)}
    ended = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True
    )
    failures = [x for x in ended.stdout.splitlines() if x.startswith("FAILED")]
    first = failures[0].split(" - ")[0][7:] if failures else ""
    return RESULTS.get(ended.returncode, f"exit code {ended.returncode}"), first


def main(patterns: list[str]) -> int:
    mutations = read_mutations(patterns)
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".git", "__pycache__", "build")
        shutil.copytree(PROJECT, project, ignore=ignored)
        for mutation in mutations:  # all of them, before the first test
            text = mutation.apply(project)
            (project / "mlx_gradscale" / mutation.file).write_text(text)
        n_caught = 0
        for mutation in mutations:
            start, text = time.perf_counter(), mutation.apply(project)
            result, first = run_tests(project, mutation.tests)
            (project / "mlx_gradscale" / mutation.file).write_text(text)
            n_caught += result == "caught"
            seconds = f"{time.perf_counter() - start:.0f} s"
            print(
                f"{result:8}{seconds:>6}  {mutation.file}: {mutation.new}", flush=True
            )
            print(f"                by {first}" if first else "", flush=True)
    print(f"{n_caught} of {len(mutations)} mutations were caught.")
    return n_caught < len(mutations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
