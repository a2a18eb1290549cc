"""Mutation testing: change one thing in a module; do its tests notice?

python tests/mutation.py [MODULE[:LINE,LINE]...] [--mutants N] [--seed N]
python tests/mutation.py MODULE --tests FILE...

Each module of the table below, or the named ones, is changed in a temporary copy of the
project, and its tests are run until one fails. What survives is a missing test, or is
recorded with the reason why no test can tell, in mutation_survivors.json.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

from kernel_store import STORE
from mutants import Mutant, mutants

HERE = Path(__file__).parent
_TORCH = "mlx_gradscale/torch_checkpoint"
# The quickest first: the tests stop at the first that fails. And all that judge the
# module, or a survivor would say nothing.
_READER = [
    f"tests/torch_checkpoint/test_checkpoint_{name}.py"
    for name in ("bounds", "hostile", "golden", "foreign", "load", "budget")
]
TESTS = {
    "mlx_gradscale/scale.py": [
        "tests/test_scale_bounds.py",
        "tests/test_scaler_misuse.py",
        "tests/test_scale.py",
        "tests/test_scaler_machine.py",
        "tests/test_scaler.py",
    ],
    "mlx_gradscale/finite.py": [
        "tests/test_finite_edges.py",
        "tests/test_finite.py",
        "tests/test_first_step.py",
    ],
    **{
        f"mlx_gradscale/guard/{name}.py": [
            "tests/test_mlx_private_names.py",
            "tests/test_guard_in_place.py",
            "tests/test_guard_classes.py",
            "tests/test_interrupts.py",
            "tests/test_optimizer.py",
            "tests/test_first_step.py",
            "tests/test_guard.py",
            "tests/test_optimizer_remainder.py",
            "tests/test_vector_code.py",
        ]
        for name in ("step", "select", "fitting", "initialization", "mlx_optimizers")
    },
    "mlx_gradscale/precision/differentiation.py": [
        "tests/test_scaler_misuse.py",
        "tests/test_scaled_loss.py",
        "tests/test_calibration.py",
        "tests/test_precision.py",
        "tests/test_true_gradients.py",
        "tests/test_interrupts.py",
        "tests/test_forward.py",
    ],
    **{
        f"{_TORCH}/{name}.py": _READER
        for name in (
            *("limits", "zip_reader", "pickle_reader", "pickle_opcodes"),
            *("keys", "tensors", "storages"),
        )
    },
    # Names of dtypes and devices come from training.json too.
    f"{_TORCH}/pickle_allowlist.py": [*_READER, "tests/test_convert_foreign.py"],
}
# Imported once, before a process is forked for each mutant: most of a run's time.
PRELOADED = ("pytest", "hypothesis", "mlx.nn", "mlx.optimizers", "numpy", "torch")
# A mutant may loop for ever, or take all memory where it lost a limit.
MOST_MEMORY = 2**33


class Project:
    """A temporary copy of a project whose tests are run, each time in a fork.

    Args:
        root (Path): The project.
        folder (Path): An empty folder for the copy.
        module (str): The source to change.
        tests (list): Test files.
    """

    def __init__(self, root: Path, folder: Path, module: str, tests: list[str]):
        self.folder, self.log, self.tests = folder / "project", folder / "log", tests
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache")
        shutil.copytree(root, self.folder, ignore=ignored)
        self.module = self.folder / module
        self.source = self.module.read_text()
        self.seconds, self.used = 600, 0.0
        if not self.passes():
            raise SystemExit(f"{self.log.read_text()}\nThat was without a mutant.")
        self.seconds = int(2 * self.used) + 10
        # Bytecode of it would be taken for a mutant of the same size and second.
        Path(cache_from_source(str(self.module))).unlink(missing_ok=True)
        sys.dont_write_bytecode = True

    def kills(self, mutant: Mutant) -> bool:
        """Whether the tests fail, or do not come to an end, with this mutant."""
        self.module.write_text(mutant.source)
        try:
            return not self.passes()
        finally:
            self.module.write_text(self.source)

    def passes(self) -> bool:
        process = os.fork()
        if not process:
            self._run_tests()
        _, status, usage = os.wait4(process, 0)
        self.used = usage.ru_utime + usage.ru_stime
        return status == 0

    def _run_tests(self) -> None:
        import pytest

        code = 70
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            # Of the processor, not of the clock: the machine may be busy.
            resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds))
            signal.alarm(30 * self.seconds)  # for what waits for ever
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path[:0] = [str(self.folder)]
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            options += ["-p", "no:xdist"]  # in the order that they are given
            # Of what was imported before; the project makes warnings errors.
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = int(pytest.main([*options, *self.tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def known_survivors() -> dict[tuple[str, str, str], str]:
    """The reason for each recorded mutant that no test can kill."""
    records = json.loads((HERE / "mutation_survivors.json").read_text())
    return {(r["module"], r["before"], r["after"]): r["why"] for r in records}


def print_score(root: Path, where: str, tests: list[str], most: int, seed: int) -> int:
    """Print the score of a sample of a module's mutants; return how many live on."""
    module, _, lines = where.partition(":")
    chosen = mutants((root / module).read_text())
    wanted = set(map(int, lines.split(","))) if lines else {m.line for m in chosen}
    chosen = [m for m in chosen if m.line in wanted]
    total = len(chosen)
    chosen = random.Random(seed).sample(chosen, min(most, total))
    known = known_survivors()
    killed = equivalent = 0
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        project = Project(root, Path(folder), module, tests)
        for mutant in sorted(chosen, key=lambda mutant: mutant.line):
            if (module, mutant.before, mutant.after) in known:
                equivalent += 1
            elif project.kills(mutant):
                killed += 1
                print(f"{module}:{mutant.line} killed", file=sys.stderr, flush=True)
            else:
                survivors.append(mutant)
                print(f"{module}:{mutant.line} survived", flush=True)
                print(f"  - {mutant.before}\n  + {mutant.after}", flush=True)
    counts = f"{killed} of {killed + len(survivors)} killed"
    print(f"{module}: {counts}, {equivalent} known; of {total}", flush=True)
    return len(survivors)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE[:LINE,LINE]")
    parser.add_argument("--tests", nargs="+", help="default: those of the table")
    parser.add_argument("--mutants", type=int, default=15, help="at most, of a module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in PRELOADED[:2] if options.tests else PRELOADED:
        with suppress(ImportError):
            import_module(name)
    # Kernels of mutants are of no use to anybody else; those that are there save time.
    store = Path(tempfile.gettempdir(), STORE)
    with tempfile.TemporaryDirectory() as kernels:
        if store.is_dir():
            # Without those that other tests are making, which vanish meanwhile.
            made = shutil.ignore_patterns("*.part")
            shutil.copytree(store, Path(kernels, STORE), ignore=made)
        os.environ["TMPDIR"] = tempfile.tempdir = kernels
        left = 0
        for where in options.modules or TESTS:
            tests = options.tests or TESTS[where.partition(":")[0]]
            left += print_score(Path.cwd(), where, tests, options.mutants, options.seed)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
