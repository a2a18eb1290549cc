"""Run hostile checkpoints through the commands, one at a time, at the default limits.

    python tools/bombs.py                all of them, about ten minutes
    python tools/bombs.py JSON zip       only those whose names contain JSON or zip

Each checkpoint must take at most 30 s of CPU time, and 1 GB of memory and of disk, and
the command must succeed, or print one error and exit with code 1. The checkpoints are
the bombs of the tests at the full size of the limits, and some that are just within the
limits.
"""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from convert import test_hostile as trees  # noqa: E402
from convert import test_inspect as shared  # noqa: E402
from support.convert_runs import Holder, forward, small, usual  # noqa: E402
from torch_checkpoint import test_limits as pickles  # noqa: E402

from mlx_gradscale import torch_checkpoint  # noqa: E402
from mlx_gradscale.convert.template_file import TEMPLATE  # noqa: E402
from tests.support.torch_files import (  # noqa: E402
    legacy,
    pack,
    pickled,
    tensor,
    text,
)
from tests.support.torch_files import name as path  # noqa: E402

SECONDS, BYTES = 30, 10**9
OPERATIONS = torch_checkpoint.Limits().operations
SCALE = 4  # times the size of the trees in the tests: 80,000 tensors
JSON_BYTES = 2**24 - 100
SMALL, MANY = "support.convert_runs:Small", "tools.bombs:many"
Files = dict[str, Any]


def many() -> Holder:
    """Return a model with 80,000 parameters, for the trees with as many tensors."""
    return Holder({f"p{i}": mx.zeros(1) for i in range(20_000 * SCALE)})


def nearly(value: bytes, price: float) -> bytes:
    """Return a pickle that repeats a value up to 97% of the limit on operations."""
    return pickled(b"(" + value * int(0.97 * OPERATIONS / price) + b"t")


def lists() -> bytes:
    return nearly(b"]", 9.125)


def dicts() -> bytes:
    return nearly(b"}K\x00Ns", 28.625)


def expanded(megabytes: int, count: int = 1) -> bytes:
    """Return the pickle of tensors of this total size that repeat one element."""
    size = megabytes * 2**18 // count
    views = [tensor(shape=(size - i,), strides=(0,)) for i in range(count)]
    named = [text(f"p{i}") + view for i, view in enumerate(views)]
    return pickled(b"}(" + b"".join(named) + b"u")


def wide_text(megabytes: float) -> bytes:
    """Return a text that takes four times its size in the file."""
    return text("x" * int(megabytes * 10**6) + "\U0001f600")


def chain(length: int) -> bytes:
    """Return names, each of which is the state of the one before."""
    return b"".join(path("x", str(i)) for i in range(length + 1)) + b"b" * length


def sparse(view: bytes, hole: int) -> tuple[bytes, int, bytes]:
    """Return a file with a hole before the zip directory, in three parts."""
    data = pack(
        {"data.pkl": b"\x80\x02}" + text("x") + view + b"s.", "data/0": bytes(16)}
    )
    at, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06") + 16
    place = (at + hole).to_bytes(4, "little")
    return data[:at], hole, data[at:end] + place + data[end + 4 :]


def parameters(megabytes: int, count: int) -> bytes:
    """Return the pickle of Parameters that are all the same expanded view."""
    view = tensor(shape=(megabytes * 2**18,), strides=(0,))
    made = path("torch._utils", "_rebuild_parameter") + b"q\x00(" + view + b"\x88"
    made += path("collections", "OrderedDict") + b")Rtq\x01"
    return pickled(b"}" + text("x") + b"(" + made + b"h\x00h\x01R" * count + b"ts")


def trainer(history: str) -> Files:
    state = f'{{"global_step": 1, "log_history": {history}}}'
    return {"model.pt": small()[0], "trainer_state.json": state.encode()}


def array(value: str, count: int) -> str:
    return f"[{','.join([value] * count)}]"


GETATTR = path("builtins", "getattr") + path("x", "Y")
INSPECT: dict[str, Callable[[], Files]] = {
    **{
        f"pickle: {name}": lambda make=make: {"a.pt": pickled(make(OPERATIONS))}
        for name, make in (pickles.BOMBS | pickles.COLLISIONS).items()
    },
    **{
        f"shared object: {name}": lambda made=made: {
            "a.pt": pickled(b"(" + made + b"q\x00" + b"h\x00" * 19_000 + b"t")
        }
        for name, made in shared.OBJECTS.items()
    },
    "within the limit: lists": lambda: {"a.pt": lists()},
    "within the limit: dicts": lambda: {"a.pt": dicts()},
    "within the limit: long integers": lambda: {
        "a.pt": nearly(b"\x8b\x00\x00\x10\x00" + b"\x01" * 2**20, 2**17 + 2)
    },
    "within the limit: zip records": lambda: {
        "a.pt": pack(
            {"data.pkl": b"\x80\x02N."} | dict.fromkeys(map(str, range(750_000)), b"")
        )
    },
    "legacy file of lists": lambda: {"a.pt": b"\x80\x02(" + b"]" * 2 * OPERATIONS},
    "legacy file of text and dicts": lambda: {
        "a.pt": legacy(b"(" + wide_text(70) + b"}K\x00Ns" * (OPERATIONS // 5) + b"t")
    },
    "chain of names": lambda: {"a.pt": pickled(chain(250_000))},
    **{
        f"name of wide text: {kind}": lambda make=make, named=named: {
            "a.pt": make(wide_text(78) + named)
        }
        for kind, make, named in (
            ("zip", pickled, text("y") + b"\x93"),
            ("twice", pickled, b"q\x00h\x00\x93"),
            ("legacy", legacy, text("y") + b"\x93"),
            ("getattr", lambda x: pickled(GETATTR + x), b"\x86R"),
        )
    },
    "folder of twenty files": lambda: {f"{i}.pt": lists() for i in range(20)},
    "folder of JSON files": lambda: {
        f"{i}.json": array('{"a":1}', JSON_BYTES // 8).encode() for i in range(5)
    },
}
CONVERT: dict[str, tuple[Callable[[], Files], str]] = {
    **{
        f"tree: {name}": (lambda name=name: {"a.pt": trees.bombs(SCALE)[name]()}, model)
        for name, model in {
            "colliding indices": SMALL,
            "colliding keys of the state": SMALL,
            "small integers that collide": SMALL,
            "paths of equal hash": SMALL,
            "models times optimizers": SMALL,
            "every order fits": MANY,
            "every subset fits": MANY,
            "a thousand groups": MANY,
            "flat groups of long lists": SMALL,
            "long names": SMALL,
            "names that no model has": SMALL,
            "many moments in no section": SMALL,
        }.items()
    },
    "tree: lists": (lambda: {"model.pt": small()[0], "scheduler.pt": lists()}, SMALL),
    "tree: dicts": (lambda: {"model.pt": small()[0], "scheduler.pt": dicts()}, SMALL),
    "tree: folder of twenty files": (
        lambda: {f"model_{i}.pt": lists() for i in range(20)},
        SMALL,
    ),
    "tree: expanded weights": (
        lambda: {"model.pt": expanded(500, 3)},
        "tools.bombs:wide",
    ),
    "tree: expanded tensors in two files": (
        lambda: {
            "model.pt": small()[0],
            "optimizer.pt": expanded(500),
            "scheduler.pt": expanded(500, 2),
        },
        SMALL,
    ),
    "tree: expanded view in a sparse file": (
        lambda: {
            "model.pt": small()[0],
            "scheduler.pt": sparse(
                tensor(shape=(375_000_000,), strides=(0,)) + b"\x85", 250_000_000
            ),
        },
        SMALL,
    ),
    "tree: Parameters of one view": (
        lambda: {"model.pt": small()[0], "scheduler.pt": parameters(400, 5)},
        SMALL,
    ),
    "tree: a view, text and dicts": (
        lambda: {
            "model.pt": small()[0],
            "scheduler.pt": pickled(
                (
                    b"}"
                    + text("x")
                    + tensor(shape=(500 * 2**18,), strides=(0,))
                    + b"\x85s"
                )
                + (text("y") + wide_text(30) + b"s")
                + (text("z") + b"(" + b"}K\x00Ns" * 150_000 + b"ts")
            ),
        },
        SMALL,
    ),
    # Templates for converting an MLX checkpoint to PyTorch.
    "template: lists": (lambda: {TEMPLATE: lists()}, SMALL),
    "template: dicts": (lambda: {TEMPLATE: dicts()}, SMALL),
    "JSON: empty objects": (lambda: trainer(array("{}", JSON_BYTES // 3)), SMALL),
    "JSON: objects": (lambda: trainer(array('{"a":1}', 470_000)), SMALL),
    "JSON: a million numbers": (lambda: trainer(array("1.5", 990_000)), SMALL),
    "JSON: a million keys": (
        lambda: trainer(json.dumps({str(i): i for i in range(990_000)})),
        SMALL,
    ),
    "JSON: nested": (lambda: trainer("[" * 100_000), SMALL),
}


def wide() -> Holder:
    """Return a model for the checkpoint of expanded weights."""
    size = 500 * 2**18 // 3
    return Holder({f"p{i}": mx.zeros(size - i) for i in range(3)})


def write(name: str, folder: Path) -> None:
    """Write the files of a hostile checkpoint to a new folder."""
    files = INSPECT[name]() if name in INSPECT else CONVERT[name][0]()
    folder.mkdir()
    if TEMPLATE in files:
        torch_checkpoint.save(folder / "usual.pt", usual())
        forward(folder / "usual.pt", folder / "run")
        (folder / "usual.pt").unlink()
        folder = folder / "run"
    for file, content in files.items():
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        elif isinstance(content, tuple):
            start, hole, end = content
            with open(folder / file, "wb") as opened:
                opened.write(start)
                opened.seek(hole, os.SEEK_CUR)
                opened.write(end)
        else:
            torch_checkpoint.save(folder / file, content)


def run(name: str, place: Path) -> tuple[float, int, str]:
    """Run a command on a checkpoint; return CPU seconds, peak bytes and outcome."""
    folder = place / "bomb"
    # Use another process: a child's peak memory starts at its parent's.
    builder = multiprocessing.Process(target=write, args=(name, folder))
    builder.start()
    builder.join()
    if builder.exitcode:
        sys.exit(f"Could not write the files of {name!r}.")
    [*files] = folder.iterdir()
    source = str(files[0] if len(files) == 1 else folder)
    arguments = ["inspect", source]
    if name in CONVERT:
        ends = [source, str(place / "out")]
        if files[0].is_dir():  # an MLX checkpoint with its template
            ends.reverse()
        arguments = ["convert", "--torch-path", ends[0], "--mlx-path", ends[1]]
        arguments += ["--model", CONVERT[name][1]]
    most = (4 * SECONDS, 4 * SECONDS)
    with open(place / "stderr", "w+") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "mlx_gradscale", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, most),
        )
        _, status, usage = os.wait4(child.pid, 0)
        stderr.seek(0)
        lines = [line for line in stderr if not line.startswith("note: ")]
    code = os.waitstatus_to_exitcode(status)
    ended = f"FAILED with exit code {code}"
    if code == 0 and not lines:
        ended = "accepted"
    elif code == 1 and len(lines) == 1 and lines[0].startswith("error: "):
        ended = f"refused: ...{lines[0][-70:].strip()}"
    seconds = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    written = sum(file.stat().st_size for file in (place / "out").rglob("*"))
    if seconds > SECONDS or max(peak, written) > BYTES:
        ended = f"FAILED: too expensive, {ended}"
    return seconds, peak, ended


def main() -> int:
    """Run the chosen checkpoints, and return 1 if any failed."""
    words = sys.argv[1:] or [""]
    results = []
    for name in [*INSPECT, *CONVERT]:
        if any(word in name for word in words):
            with tempfile.TemporaryDirectory() as place:
                seconds, peak, ended = run(name, Path(place))
            results.append((seconds, peak, ended.startswith("FAILED")))
            print(f"{name:44}{seconds:6.1f} s{peak / 1e6:6.0f} MB  {ended}", flush=True)
    times, peaks, failed = zip(*results, strict=True)
    print(
        f"worst of {len(results)}: {max(times):.1f} s, {max(peaks) / 1e6:.0f} MB; "
        f"{sum(failed)} failed"
    )
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
