"""What a small file can make the reader allocate and compute is bounded."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError, Limits
from tests.support.torch_files import integer, name, pack, pickled, tensor, text

# A fiftieth of the default, so that a bomb takes a fiftieth of its time and memory.
OPERATIONS = 200_000


def called(function: str, args: bytes, times: int, end: bytes = b"\x85") -> bytes:
    """The function applied to the same remembered arguments, again and again."""
    module, _, attribute = function.rpartition(".")
    start = name(module, attribute) + b"q\x00" + args + end + b"q\x01"
    return b"(" + start + b"h\x00h\x01R" * times + b"t"


def doubled(levels: int) -> bytes:
    return b")q\x00" + b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
        for i in range(levels)
    )


NUMBERS = b"](" + b"".join(map(integer, range(5000))) + b"e"
COUNTS = b"}(" + b"".join(integer(i) + b"K\x01" for i in range(5000)) + b"u"
OFTEN = b"q\x00" + b"h\x00" * 3000 + b"t"
BYTES = b"B" + struct.pack("<I", 500_000) + bytes(500_000)
SIZES = b"(" + NUMBERS[2:-1] + b"t"
HOOKS = name("collections", "OrderedDict") + b")R"
TENSOR_ARGS = tensor().removeprefix(name("torch._utils", "_rebuild_tensor_v2"))[:-1]
BOMBS = {
    "lists": b"(" + b"]" * 350_000 + b"t",
    "marks": b"(" * 350_000,
    "tuples": b"N" + b"\x85" * 350_000,
    "sets": b"(" + b"\x8f" * 350_000 + b"t",
    "dicts of one": b"(" + b"}K\x00Ns" * 120_000 + b"t",
    "remembered": b"(" + b"]\x94" * 180_000 + b"t",
    "remembered far away": b"Nr" + struct.pack("<I", 2**31),
    "ordered": called("collections.OrderedDict", b"", 120_000, b")"),
    "set of a remembered list": called("__builtin__.set", NUMBERS, 5000),
    "Counter of a remembered dict": called("collections.Counter", COUNTS, 5000),
    "bytearray of remembered bytes": called("__builtin__.bytearray", BYTES, 5000),
    "encode of a remembered text": called(
        "_codecs.encode", text("x" * 500_000) + text("latin1"), 5000, b"\x86"
    ),
    "Size of a remembered tuple": called("torch.Size", SIZES, 5000),
    "Parameters of a remembered tensor": called(
        "torch._utils._rebuild_parameter", tensor() + b"\x88" + HOOKS, 100_000, b"\x87"
    ),
    "tensors of remembered arguments": called(
        "torch._utils._rebuild_tensor_v2", TENSOR_ARGS, 100_000, b""
    ),
    "placeholders": b"(" + name("x", "Y") + b"q\x00" + b"h\x00)R" * 100_000 + b"t",
    "names": b"(" + b"".join(name("x" * 900, str(i)) for i in range(15_000)) + b"t",
    "states": name("x", "Y") + b")R" + b"Nb" * 150_000,
    "items": name("x", "Y") + b")R" + b"(Ne" * 100_000,
    "names in names": called(
        "__builtin__.getattr", name("x", "Y" * 150) + text("z" * 150), 60_000, b"\x86"
    ),
    "wide text": b"(" + text("x" * 3_000_000 + "\U0001f600") * 6 + b"t",
    "doubled tuples": b"(" + doubled(22) + b"t",
    "a text very often": b"(" + text("x" * 1_000_000) + OFTEN,
    "a set very often": b"(\x8f" + NUMBERS[1:-1] + b"\x90" + OFTEN,
    "a long key very often": b"(}" + text("x" * 1_000_000) + b"Ns" + OFTEN,
}
MEASURE = """
import json, os, resource, sys, time
from mlx_gradscale import torch_checkpoint
def peak():
    if os.path.exists("/proc/self/status"):  # there ru_maxrss begins at the parent's
        with open("/proc/self/status") as status:
            return 1024 * next(int(s.split()[1]) for s in status if s[:5] == "VmHWM")
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found * (1 if sys.platform == "darwin" else 1024)
limits = torch_checkpoint.Limits(operations=int(sys.argv[1]))
said = {}
for path in sys.argv[2:]:
    if os.path.exists("/proc/self/clear_refs"):
        open("/proc/self/clear_refs", "w").write("5")
    before, start = peak(), time.process_time()
    try:
        torch_checkpoint.load(path, limits)
        outcome = "loaded"
    except torch_checkpoint.CheckpointError as error:
        outcome = str(error)
    said[path] = outcome, peak() - before, time.process_time() - start
print(json.dumps(said))
"""


def test_small_files_take_no_more_time_and_memory_than_they_are_allowed(tmp_path):
    paths = {tmp_path / f"{i}.pt": kind for i, kind in enumerate(BOMBS)}
    for path, kind in paths.items():
        path.write_bytes(pickled(BOMBS[kind]))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(OPERATIONS), *map(str, paths)],
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    for path, (said, grown, seconds) in json.loads(run.stdout).items():
        kind = paths[Path(path)]
        assert "limits.operations" in said, kind
        # Of 1 GB for 10 million operations; and the file, twice, and its text.
        allowed = 1e9 * OPERATIONS / 10_000_000 + 6 * Path(path).stat().st_size
        assert grown < allowed + 10_000_000, kind
        # Of 30 s, doubled for slow machines.
        assert seconds < 60 * OPERATIONS / 10_000_000, kind


@pytest.mark.parametrize(
    ("function", "args", "end", "price"),
    [
        ("collections.OrderedDict", b"", b")", 7),
        ("x.Unknown", b"", b")", 7),
        ("torch._utils._rebuild_parameter", tensor() + b"\x88" + HOOKS, b"\x87", 27),
    ],
)
def test_calls_cost_what_they_take(function, args, end, price):
    data = pickled(called(function, args, 1000, end))
    with pytest.raises(CheckpointError, match="operations"):
        torch_checkpoint.load(data, Limits(operations=1000 * price))
    torch_checkpoint.load(data, Limits(operations=1000 * price + 5000))


def test_a_zip_directory_of_many_records_is_paid_for():
    data = pack({"data.pkl": b"\x80\x02N."} | {str(i): b"" for i in range(5000)})
    assert torch_checkpoint.load(data) is None
    with pytest.raises(CheckpointError, match="more than 40000 operations"):
        torch_checkpoint.load(data, Limits(operations=40_000))


def test_the_limit_on_operations_holds_and_can_be_raised():
    lists = pickled(b"]" * 100 + b"a" * 99)
    long = pickled(text("x" * 8000))
    for data, most in ((lists, 450), (long, 1400)):
        with pytest.raises(CheckpointError, match=f"more than {most - 150} operations"):
            torch_checkpoint.load(data, Limits(operations=most - 150))
        torch_checkpoint.load(data, Limits(operations=most))
    with pytest.raises(CheckpointError, match="over 128 deep"):
        torch_checkpoint.load(pickled(b"N" + b"\x85" * 129))


def test_the_defaults_are_what_the_documents_say():
    # A changed one is a decision: what a file may cost whoever opens it.
    assert Limits() == Limits(operations=10_000_000, tensor_bytes=2**29)
    with pytest.raises(AttributeError):
        Limits().operations = 1


def test_a_shared_container_counts_where_it_is_deepest():
    inner = b"K\x01" + b"\x85" * 100 + b"q\x00"
    outer = b"h\x00" + b"\x85" * 100
    with pytest.raises(CheckpointError, match="over 128 deep"):
        torch_checkpoint.load(pickled(inner + outer + b"\x86"))


def test_what_is_shared_a_lot_is_read_with_the_defaults():
    # A list of 250 numbers, 250 times: a kilobyte in the file, 62,500 numbers.
    numbers = b"](" + b"K\x07" * 250 + b"eq\x00"
    found = torch_checkpoint.load(pickled(b"(" + numbers + b"h\x00" * 249 + b"t"))
    assert all(part is found[0] for part in found)


# Keys that are in each other's way.


def on_one_path(count: int, bits: int) -> list[int]:
    """Whole numbers that fill the places a dict tries one after the other."""
    places, at = [], 0
    for _ in range(count):
        places.append(at)
        at = (5 * at + 1) % 2**bits
    return places


def whole(values: list[int], value: bytes = b"N") -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", v) + value for v in values)


def pair_keys(count: int) -> bytes:
    # -1 and -2 have the same hash, and so has every tuple of them.
    def key(i: int) -> bytes:
        bits = (b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff")
        return b"(" + b"".join(bits[i >> j & 1] for j in range(14)) + b"tN"

    return b"(" + b"".join(map(key, range(count))) + b"u"


PATH = on_one_path(16_000, 15)
AGAIN = b"(" + integer(3 * 2**15) + b"q\x00N" + b"h\x00N" * 20_000 + b"u"
COLLISIONS = {
    "whole numbers": b"}" + whole(on_one_path(30_000, 16)) + b"u",
    "one of them again": b"}" + whole(PATH) + b"u" + AGAIN,
    "texts among them": b"}"
    + whole(PATH)
    + b"".join(text(str(i)) + b"N" for i in range(20_000))
    + b"u",
    "multiples of a prime": b"}("
    + b"".join(integer(i * (2**61 - 1)) + b"N" for i in range(8000))
    + b"u",
    "tuples": b"}" + pair_keys(6000),
    "members": b"\x8f" + whole(on_one_path(30_000, 16), b"") + b"\x90",
    "counted again": called(
        "collections.Counter", b"}" + whole(on_one_path(8000, 14), b"K\x01") + b"u", 3
    ),
    "sets of a remembered list": called(
        "__builtin__.set", b"]" + whole(on_one_path(8000, 14), b"") + b"e", 3
    ),
    "long texts that are equal": b"}("
    + (text("x" * 1_000_000) + b"q\x00N" + text("x" * 1_000_000) + b"q\x01N")
    + b"h\x00Nh\x01N" * 2000
    + b"u",
}
MILLION = Limits(operations=1_000_000)


@pytest.mark.parametrize("kind", COLLISIONS)
def test_keys_whose_hashes_collide_are_paid_for(kind):
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="more than 1000000 operations"):
        torch_checkpoint.load(pickled(COLLISIONS[kind]), limits=MILLION)
    assert time.monotonic() - start < 60  # only against a hang


def test_keys_that_real_files_have_cost_little():
    def dict_of(keys: list[bytes]) -> bytes:
        return pickled(b"}(" + b"".join(key + b"N" for key in keys) + b"u")

    def whole_numbers(*bounds: int) -> list[bytes]:
        return [b"J" + struct.pack("<i", i) for i in range(*bounds)]

    # Two instructions and two values for each key, and the size of the pickle.
    limits = Limits(operations=550_000)
    optimizer = torch_checkpoint.load(dict_of(whole_numbers(100_000)), limits)
    assert len(optimizer) == 100_000
    names = dict_of([text(str(i)) for i in range(100_000)])
    assert len(torch_checkpoint.load(names, limits)) == 100_000
    merges = dict_of([text(str(i)) + text("x") + b"\x86" for i in range(30_000)])
    assert len(torch_checkpoint.load(merges, limits)) == 30_000
    losses_by_step = dict_of(whole_numbers(0, 200_000, 10))
    assert len(torch_checkpoint.load(losses_by_step, Limits(operations=4_000_000)))
