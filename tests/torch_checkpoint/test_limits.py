"""What a small file can make the reader allocate and compute is bounded."""

import json
import struct
import subprocess
import sys
import time
from itertools import islice, product
from pathlib import Path

import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert.folder import read_torch
from mlx_gradscale.inspect import describe
from mlx_gradscale.torch_checkpoint import CheckpointError, Limits
from tests.support.torch_files import (
    integer,
    legacy,
    name,
    pack,
    pickled,
    storage,
    tensor,
    text,
)

ROOT = Path(__file__).parents[2]
# A fiftieth of the default, so that a bomb takes a fiftieth of its time and memory.
OPERATIONS = 200_000


def called(function: str, args: bytes, times: int, end: bytes = b"\x85") -> bytes:
    """The function applied to the same remembered arguments, again and again."""
    module, _, attribute = function.rpartition(".")
    start = name(module, attribute) + b"q\x00" + args + end + b"q\x01"
    return b"(" + start + b"h\x00h\x01R" * times + b"t"


NUMBERS = b"](" + b"".join(map(integer, range(5000))) + b"e"
COUNTS = b"}(" + b"".join(integer(i) + b"K\x01" for i in range(5000)) + b"u"
BYTES = b"B" + struct.pack("<I", 500_000) + bytes(500_000)
HOOKS = name("collections", "OrderedDict") + b")R"
PARAMETER = tensor() + b"\x88" + HOOKS
LATIN = text("x" * 500_000) + text("latin1")


def often(n: int) -> bytes:
    return b"q\x00" + b"h\x00" * (n // 60) + b"t"


# Pickles that take more than n operations, as functions of n.
BOMBS = {
    "lists": lambda n: b"(" + b"]" * 2 * n + b"t",
    "marks": lambda n: b"(" * 2 * n,
    "tuples": lambda n: b"N" + b"\x85" * 2 * n,
    "sets": lambda n: b"(" + b"\x8f" * 2 * n + b"t",
    "dicts of one": lambda n: b"(" + b"}K\x00Ns" * n + b"t",
    "remembered": lambda n: b"(" + b"]\x94" * n + b"t",
    "remembered far away": lambda n: b"Nr" + struct.pack("<I", 2**31),
    "set of a remembered list": lambda n: called("__builtin__.set", NUMBERS, n),
    "Counter of a remembered dict": lambda n: called("collections.Counter", COUNTS, n),
    "bytearray of bytes": lambda n: called("__builtin__.bytearray", BYTES, n),
    "encode of a text": lambda n: called("_codecs.encode", LATIN, n, b"\x86"),
    "states": lambda n: name("x", "Y") + b")R" + b"Nb" * n,
    "items": lambda n: name("x", "Y") + b")R" + b"(Ne" * n,
    "calls with many arguments": lambda n: called(
        "__builtin__.getattr", b"(" + b"N" * (n // 4) + b"t", n // 4, b""
    ),
    "wide text": lambda n: b"(" + text("x" * n + "\U0001f600") * 7 + b"t",
    "doubled tuples": lambda n: (
        b"()q\x00%bt"
        % b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(n.bit_length() + 4))
    ),
    "a text very often": lambda n: b"(" + text("x" * 1_000_000) + often(n),
    "a set very often": lambda n: b"(\x8f" + NUMBERS[1:-1] + b"\x90" + often(n),
    "a long key very often": lambda n: b"(}" + text("x" * 1_000_000) + b"Ns" + often(n),
}
MEASURE = """
import json, sys, time
from mlx_gradscale import torch_checkpoint
from tools.torch_checkpoint_fuzz import peak_memory
said = {}
for path in sys.argv[2:]:
    before, start = peak_memory(reset=True), time.process_time()
    limits = torch_checkpoint.Limits(operations=int(sys.argv[1]))
    try:
        torch_checkpoint.load(path, limits)
        outcome = "loaded"
    except torch_checkpoint.CheckpointError as error:
        outcome = str(error)
    said[path] = outcome, peak_memory() - before, time.process_time() - start
print(json.dumps(said))
"""


def test_small_files_stay_within_their_time_and_memory_limits(tmp_path):
    paths = {tmp_path / f"{i}.pt": kind for i, kind in enumerate(BOMBS)}
    for path, kind in paths.items():
        path.write_bytes(pickled(BOMBS[kind](OPERATIONS)))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(OPERATIONS), *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.stderr == ""
    for path, (said, grown, seconds) in json.loads(run.stdout).items():
        kind = paths[Path(path)]
        assert "limits.operations" in said, kind
        # Of 1 GB for 10 million operations; and the file, twice, and its text.
        allowed = 1e9 * OPERATIONS / 10_000_000 + 6 * Path(path).stat().st_size
        assert grown * 2**20 < allowed + 10_000_000, kind
        # Of 30 s, doubled for slow machines.
        assert seconds < 60 * OPERATIONS / 10_000_000, kind


ORDERED = called("collections.OrderedDict", b"", 1000, b")")
NAMED = b"(" + b"".join(name("x", str(i)) for i in range(1000)) + b"t"
UNKNOWN = called("x.Unknown", b"", 1000, b")")
PARAMETERS = called("torch._utils._rebuild_parameter", PARAMETER, 1000, b"\x87")
VIEWS = (
    b"\x80\x02("
    + (name("torch._utils", "_rebuild_tensor") + b"q\x00")
    + (storage(numel=1000) + b"q\x010(" + integer(1) * 32 + b"tq\x02")
    + (b"(" + integer(2**62) * 32 + b"tq\x03")
    + b"".join(b"h\x00(h\x01%bh\x02h\x03tR" % integer(i) for i in range(1000))
    + b"t."
)
VIEW_RECORDS = {"data.pkl": VIEWS, "data/0": bytes(4000)}
RECORDS = {"data.pkl": b"\x80\x02N."} | {str(i): b"" for i in range(5000)}
# Too few operations to read a file, and enough.
PRICES = {
    "lists": (pickled(b"]" * 100 + b"a" * 99), 950, 1100),
    "text": (pickled(text("x" * 8000)), 1250, 1400),
    "text in a legacy file": (legacy(text("x" * 8000)), 1250, 1400),
    "OrderedDicts": (pickled(ORDERED), 20_000, 26_000),
    "placeholders": (pickled(UNKNOWN), 36_000, 42_000),
    "names": (pickled(NAMED), 30_000, 40_000),
    "Parameters": (pickled(PARAMETERS), 20_000, 26_000),
    "views of many dimensions": (pack(VIEW_RECORDS), 45_000, 60_000),
    "zip directory": (pack(RECORDS), 40_000, 10_000_000),
}


@pytest.mark.parametrize("kind", PRICES)
def test_file_that_exceeds_the_operation_limit_loads_with_a_higher_limit(kind):
    data, few, enough = PRICES[kind]
    with pytest.raises(CheckpointError, match="more operations"):
        torch_checkpoint.load(data, Limits(operations=few))
    torch_checkpoint.load(data, Limits(operations=enough))


def test_default_limits_match_the_documentation():
    # A changed one is a decision: what a file may cost whoever opens it.
    assert Limits() == Limits(operations=10_000_000, tensor_bytes=2**29)


def test_files_read_with_one_limits_object_share_it():
    lists = pickled(b"(" + b"]" * 1000 + b"t")
    views = pickled(tensor(shape=(2**20,), strides=(0,)))
    for data, limits, says in (
        (lists, Limits(operations=22_000), "more operations"),
        (views, Limits(tensor_bytes=10 * 2**20), "limits.tensor_bytes"),
    ):
        for _ in range(2):
            torch_checkpoint.load(data, limits)
        with pytest.raises(CheckpointError, match=says):
            torch_checkpoint.load(data, limits)


def test_files_of_one_folder_share_a_limit(tmp_path):
    for i in range(3):  # each takes about 9,000 operations
        data = pickled(b"(" + b"]" * 1000 + b"t")
        (tmp_path / f"model_{i}.pt").write_bytes(data)
    enough, few = Limits(operations=30_000), Limits(operations=20_000)
    assert len(describe(tmp_path, enough)["entries"]) > 3
    errors = describe(tmp_path, few)["errors"]
    assert [*errors] == ["model_2.pt"]
    assert "more operations" in errors["model_2.pt"]
    limits = Limits(operations=18_000)
    with pytest.raises(CheckpointError, match="more operations"):
        read_torch(tmp_path, limits)
    # Limits may be used again, so convert takes a copy.
    assert limits == Limits(operations=18_000)


def test_object_shared_many_times_loads_with_the_default_limits():
    # A list of 250 numbers, 250 times: a kilobyte in the file, 62,500 numbers.
    numbers = b"](" + b"K\x07" * 250 + b"eq\x00"
    found = torch_checkpoint.load(pickled(b"(" + numbers + b"h\x00" * 249 + b"t"))
    assert all(part is found[0] for part in found)


# Keys that are in each other's way.


def whole(values: list[int] | range, value: bytes = b"N") -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", v) + value for v in values)


def pair_keys(count: int) -> bytes:
    # -1 and -2 have the same hash, and so has every tuple of them.
    numbers = b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff"
    keys = islice(product(numbers, repeat=16), count)
    return b"(" + b"".join(b"(" + b"".join(key) + b"tN" for key in keys) + b"u"


def path_of(n: int) -> list[int]:
    """More keys than n operations pay for, in places that a dict tries in turn."""
    places, count = [0], int(16 * n**0.5)
    while len(places) < count:
        places.append((5 * places[-1] + 1) % 2 ** (count.bit_length() + 1))
    return places


def again(key: int, n: int) -> bytes:
    return b"(" + integer(key) + b"q\x00N" + b"h\x00N" * (n // 50) + b"u"


def huge(value: int) -> bytes:
    data = value.to_bytes(2**19, "little")
    return b"\x8b" + struct.pack("<I", len(data)) + data


HUGE = 2 ** (2**22 - 2)
LONG = text("x" * 1_000_000)
COLLISIONS = {
    "whole numbers": lambda n: b"}" + whole(path_of(4 * n)) + b"u",
    # Slot 0 is taken by another key, and 0 tries the places of the path.
    "a small number again": lambda n: (
        b"}"
        + whole([2 ** (len(path_of(n)).bit_length() + 1), *path_of(n // 4)[1:]])
        + b"u"
        + again(0, 10 * n)
    ),
    # The hash of an integer is not cached, and these two have the same.
    "huge numbers": lambda n: (
        b"}("
        + (huge(HUGE) + b"N" + huge(HUGE + 2**61 - 1) + b"q\x00N")
        + b"h\x00N" * (n // 300)
        + b"u"
    ),
    "tuples": lambda n: b"}" + pair_keys(int(6 * n**0.5)),
    "members": lambda n: b"\x8f" + whole(path_of(4 * n), b"") + b"\x90",
    "long texts that are equal": lambda n: (
        b"}("
        + (LONG + b"q\x00N" + LONG + b"q\x01N")
        + b"h\x00Nh\x01N" * (n // 500)
        + b"u"
    ),
}


@pytest.mark.parametrize("kind", COLLISIONS)
def test_colliding_dict_keys_count_toward_the_operation_limit(kind):
    data, start = pickled(COLLISIONS[kind](1_000_000)), time.monotonic()
    with pytest.raises(CheckpointError, match="more operations"):
        torch_checkpoint.load(data, Limits(operations=1_000_000))
    assert time.monotonic() - start < 60  # only against a hang


def test_dict_keys_of_real_files_cost_few_operations():
    # Two instructions and two values for each key, and the size of the pickle.
    names = [text(str(i)) for i in range(100_000)]
    tuples = [key + text("x") + b"\x86" for key in names[:30_000]]
    for items, count, operations in (
        (whole(range(100_000)), 100_000, 2_000_000),
        (b"(" + b"".join(key + b"N" for key in names), 100_000, 2_000_000),
        (b"(" + b"".join(key + b"N" for key in tuples), 30_000, 2_000_000),
        (whole(range(0, 200_000, 10)), 20_000, 4_000_000),  # losses by step
    ):
        data = pickled(b"}" + items + b"u")
        assert len(torch_checkpoint.load(data, Limits(operations=operations))) == count
