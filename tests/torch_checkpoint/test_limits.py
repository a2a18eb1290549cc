"""What a small file can make the reader allocate is bounded."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError, unpickler
from tests.support.torch_files import (
    integer,
    legacy,
    name,
    pack,
    pickled,
    save_bytes,
    storage,
    tensor,
    text,
    torch_bytes,
)

ROOT = Path(__file__).parents[2]
# A twentieth of the real bound, so that a bomb takes a twentieth of its memory.
WORK = unpickler.MAX_WORK // 20


def called(function: str, args: bytes, times: int, end: bytes = b"\x85") -> bytes:
    """The function applied to the same remembered arguments, again and again."""
    module, _, attribute = function.rpartition(".")
    start = name(module, attribute) + b"q\x00" + args + end + b"q\x01"
    return b"(" + start + b"h\x00h\x01R" * times + b"t"


NUMBERS = b"](" + b"".join(map(integer, range(5000))) + b"e"
COUNTS = b"}(" + b"".join(integer(i) + b"K\x01" for i in range(5000)) + b"u"
BYTES = b"B" + struct.pack("<I", 500_000) + bytes(500_000)
LATIN = text("x" * 500_000) + text("latin1")
LONG = "\U0001f600" * 990
VIEW = (
    name("torch._utils", "_rebuild_tensor")
    + (b"q\x00(" + storage(numel=4) + b"q\x01" + integer(0) + b"q\x02")
    + (integer(1) + b"\x85q\x03" + b"h\x03t")
    + b"R"
)
# Pickles that exceed a bound of n instructions, as functions of n.
BOMBS = {
    "lists": lambda n: b"(" + b"]" * n + b"t",
    "marks": lambda n: b"(" * n,
    "tuples": lambda n: b"N" + b"\x85" * n,
    "sets": lambda n: b"(" + b"\x8f" * n + b"t",
    "frozensets": lambda n: b"(" + b"(\x91" * n + b"t",
    "dicts of one": lambda n: b"(" + b"}K\x00Ns" * n + b"t",
    "remembered": lambda n: b"(N" + b"\x94" * n + b"t",
    "numbers": lambda n: b"(" + b"J\x00\x00\x00\x10" * n + b"t",
    "set of a remembered list": lambda n: called("__builtin__.set", NUMBERS, n // 999),
    "Counter of a dict": lambda n: called("collections.Counter", COUNTS, n // 999),
    "bytearray of bytes": lambda n: called("__builtin__.bytearray", BYTES, n // 999),
    "encode of a text": lambda n: called("_codecs.encode", LATIN, n // 999, b"\x86"),
    "OrderedDicts": lambda n: called("collections.OrderedDict", b"", n, b")"),
    "placeholders": lambda n: called("x.Y", b"", n, b")"),
    "placeholders with long names": lambda n: called(f"x.{LONG}", b"", n, b")"),
    "inner classes with long names": lambda n: called(
        "__builtin__.getattr", name("x", LONG) + text("Y"), n, b"\x86"
    ),
    "states": lambda n: name("x", "Y") + b")R" + b"Nb" * n,
    "items": lambda n: name("x", "Y") + b")R" + b"(Ne" * n,
    "views": lambda n: (
        b"(" + (VIEW + b"h\x00(h\x01h\x02h\x03h\x03tR" * (n // 5)) + b"t"
    ),
    "doubled tuples": lambda n: b"N" + b"q\x00h\x00\x86" * n,
}
MEASURE = """
import json, sys
from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import unpickler
from tools.torch_checkpoint_fuzz import peak_memory
unpickler.MAX_WORK = int(sys.argv[1])
said = {}
for path in sys.argv[2:]:
    before = peak_memory(reset=True)
    try:
        torch_checkpoint.load(path)
        outcome = "loaded"
    except torch_checkpoint.CheckpointError as error:
        outcome = str(error)
    said[path] = outcome, peak_memory() - before
print(json.dumps(said))
"""


def measure(work: int, paths: list[Path]) -> dict[str, tuple[str, float]]:
    """The outcome of each file, and the peak memory in MB."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(work), *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.stderr == ""
    return json.loads(run.stdout)


def test_pickles_of_too_many_instructions_are_refused_in_bounded_memory(tmp_path):
    paths = {tmp_path / f"{i}.pt": kind for i, kind in enumerate(BOMBS)}
    for path, kind in paths.items():
        path.write_bytes(pickled(BOMBS[kind](WORK)))
    for path, (said, grown) in measure(WORK, list(paths)).items():
        assert "pickle instructions" in said, paths[Path(path)]
        # A twentieth of 1 GiB, and what the allocator keeps of the file before.
        assert grown < 2**10 / 20 + 10, paths[Path(path)]


def test_pickle_of_the_full_size_takes_less_than_1_gib(tmp_path):
    path = tmp_path / "a.pt"
    # The most memory: wide text, and the most costly instructions, within both bounds.
    count = unpickler.MAX_WORK // 4 - 10
    wide = text("x" * (unpickler.MAX_PICKLE - 5 * count - 200) + "\U0001f600")
    start = name("x", "Y") + b"q\x00)q\x01"
    path.write_bytes(pickled(b"(" + wide + start + b"h\x00h\x01\x81" * count + b"t"))
    ((said, grown),) = measure(unpickler.MAX_WORK, [path]).values()
    assert said == "loaded"
    assert grown < 2**10


def test_pickle_of_more_than_64_mib_is_refused():
    long = text("x" * unpickler.MAX_PICKLE)
    with pytest.raises(CheckpointError, match="more than 67,108,864 bytes"):
        torch_checkpoint.load(pickled(long))
    with pytest.raises(CheckpointError, match="cut off"):
        torch_checkpoint.load(legacy(long))


def test_byte_arrays_are_not_allocated_before_they_are_read():
    data = pack({"data.pkl": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc."})
    with pytest.raises(CheckpointError, match="cut off"):
        torch_checkpoint.load(data)


def test_zip_directory_of_more_than_16_mib_is_refused():
    entry = b"PK\x01\x02" + bytes(42)
    count = 2**24 // len(entry) + 1
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 0, 0, 0)
    data = bytearray(b"PK\x03\x04" + entry * count + end)
    struct.pack_into("<2L", data, len(data) - 10, len(entry) * count, 4)
    with pytest.raises(CheckpointError, match="zip directory"):
        torch_checkpoint.load(bytes(data))


@pytest.mark.parametrize("times", [1, 3])
def test_tensors_of_more_than_four_times_the_file_are_refused(times):
    views = b"".join(tensor(shape=(2**20 + i,), strides=(0,)) for i in range(times))
    data = {"data.pkl": b"\x80\x02(" + views + b"t.", "data/0": bytes(16)}
    enough = times * 2**20 - 2**18  # 1 MiB is free
    assert len(torch_checkpoint.load(pack(data | {"hole": bytes(enough)}))) == times
    with pytest.raises(CheckpointError, match="more than 4 times"):
        torch_checkpoint.shapes(pack(data | {"hole": bytes(enough - 2000)}))


def test_equal_views_are_one_array_and_count_once():
    view = tensor(shape=(2**17,), strides=(0,))
    found = torch_checkpoint.load(pickled(b"(" + view * 100 + b"t"))
    assert all(array is found[0] for array in found)


def test_checkpoint_of_100_000_tensors_is_read():
    torch = pytest.importorskip("torch")
    weight = torch.zeros(2)
    data = torch_bytes({f"layers.{i}.weight": weight[:1] for i in range(100_000)})
    assert len(torch_checkpoint.shapes(data)) == 100_000


def test_values_that_double_themselves_are_copied_once():
    found = torch_checkpoint.load(pickled(b"]" + b"q\x00h\x00\x86" * 60))
    assert found[0] is found[1]
    assert len(save_bytes(found)) < 5000
