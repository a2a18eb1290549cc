"""What a small file can make the readers allocate, compute and write is bounded."""

import json
import pickle
import struct
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from tests.support.torch_files import integer, name, pickled, storage, tensor, text

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.convert import from_torch, read_run, write_run
from mlx_gradscale.files.arrays import read_arrays
from mlx_gradscale.files.text import table
from mlx_gradscale.inspect import describe
from mlx_gradscale.run_folder import values
from mlx_gradscale.run_folder.values import decode, encode
from mlx_gradscale.torch_checkpoint import CheckpointError, Limits, keys, legacy_reader
from mlx_gradscale.torch_checkpoint.limits import Budget

# A fiftieth of the defaults, so that a bomb takes a fiftieth of its time.
MEMORY, OPERATIONS = 20_000_000, 200_000


def called(function: str, argument: bytes, times: int) -> bytes:
    """The function applied to one remembered argument, again and again."""
    module, _, attribute = function.rpartition(".")
    start = name(module, attribute) + b"q\x00" + argument + b"\x85q\x01"
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
LATIN = name("_codecs", "encode") + b"q\x00" + text("x" * 500_000) + b"q\x01"
BOMBS = {
    "lists": b"(" + b"]" * 350_000 + b"t",
    "marks": b"(" * 350_000,
    "tuples": b"N" + b"\x85" * 350_000,
    "sets": b"(" + b"\x8f" * 350_000 + b"t",
    "dicts": b"(" + b"}" * 350_000 + b"t",
    "dicts of one": b"(" + b"}K\x00Ns" * 120_000 + b"t",
    "remembered": b"(" + b"]\x94" * 180_000 + b"t",
    "remembered far away": b"Nr" + struct.pack("<I", 2**31),
    "shared": b"(" + b"]q\x00h\x00" * 200_000 + b"t",
    "ordered": b"("
    + name("collections", "OrderedDict")
    + b"q\x00"
    + b"h\x00)R" * 120_000
    + b"t",
    "set of a remembered list": called("__builtin__.set", NUMBERS, 5000),
    "frozenset of one": called("__builtin__.frozenset", NUMBERS, 5000),
    "Counter of a remembered dict": called("collections.Counter", COUNTS, 5000),
    "bytearray of remembered bytes": called(
        "__builtin__.bytearray",
        b"B" + struct.pack("<I", 500_000) + bytes(500_000),
        5000,
    ),
    "bytearray of a remembered text": called(
        "__builtin__.bytearray", text("x" * 500_000), 5000
    ),
    "encode of a remembered text": b"(" + LATIN + b"h\x00h\x01\x85R" * 5000 + b"t",
    "Size of a remembered tuple": called(
        "torch.Size", b"(" + NUMBERS[2:-1] + b"t", 5000
    ),
    "tensors of remembered arguments": b"("
    + tensor()[:-1]
    + b"q\x01"
    + name("torch._utils", "_rebuild_tensor_v2")
    + b"q\x00"
    + b"h\x00h\x01R" * 100_000
    + b"t",
    "placeholders": b"(" + name("x", "Y") + b"q\x00" + b"h\x00)R" * 100_000 + b"t",
    "names": b"(" + name("x" * 900, "y") * 15_000 + b"t",
    "states": name("x", "Y") + b")R" + b"Nb" * 150_000,
    "items": name("x", "Y") + b")R" + b"(Ne" * 100_000,
    "names in names": b"("
    + name("x", "Y" * 150)
    + name("__builtin__", "getattr")
    + b"q\x00"
    + text("z" * 150)
    + b"q\x01"
    + b"h\x00h\x00h\x01\x86R" * 40_000
    + b"t",
    "wide text": b"(" + text("x" * 3_000_000 + "\U0001f600") * 6 + b"t",
    "doubled tuples": b"(" + doubled(22) + b"t",
    "a text very often": b"(" + text("x" * 1_000_000) + OFTEN,
    "a set very often": b"(\x8f" + NUMBERS[1:-1] + b"\x90" + OFTEN,
    "a long key very often": b"(}" + text("x" * 1_000_000) + b"Ns" + OFTEN,
}
MEASURE = """
import json, os, resource, sys
from mlx_gradscale import torch_checkpoint
def peak():
    if os.path.exists("/proc/self/status"):  # there ru_maxrss begins at the parent's
        with open("/proc/self/status") as status:
            return 1024 * next(int(s.split()[1]) for s in status if s[:5] == "VmHWM")
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found * (1 if sys.platform == "darwin" else 1024)
limits = torch_checkpoint.Limits(memory=int(sys.argv[1]), operations=int(sys.argv[2]))
before, said = peak(), {}
for path in sys.argv[3:]:
    try:
        torch_checkpoint.load(path, limits=limits)
        said[path] = "loaded", peak() - before
    except torch_checkpoint.CheckpointError as error:
        said[path] = str(error), peak() - before
print(json.dumps(said))
"""


def test_small_files_take_no_more_memory_than_they_are_allowed(tmp_path):
    paths = {tmp_path / f"{i}.pt": kind for i, kind in enumerate(BOMBS)}
    for path, kind in paths.items():
        path.write_bytes(pickled(BOMBS[kind]))
        assert path.stat().st_size < 20_000_000
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(MEMORY), str(OPERATIONS), *map(str, paths)],
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    for path, (said, grown) in json.loads(run.stdout).items():
        kind = paths[type(tmp_path)(path)]
        assert "limits." in said, kind
        # Besides the objects: the file, its text, and what MLX keeps for itself.
        assert grown < 1.5 * MEMORY + 40_000_000, kind


def test_inspect_tells_each_object_once(tmp_path):
    # Sixty namespaces, each holding the one before twice: 2**60 told in full.
    found = name("argparse", "Namespace") + b"q\x00"
    for i in range(60):
        both = text("a") + (b"h\x01" if i else b"N") + text("b") + b"h\x01" * bool(i)
        found += b"h\x00)R}(" + both + b"N" * (not i) + b"ubq\x01" + b"0" * (i < 59)
    path = tmp_path / "a.pt"
    path.write_bytes(pickled(b"(" + found + b"t"))
    start = time.monotonic()
    assert len(json.dumps(describe(path))) < 200_000
    assert time.monotonic() - start < 60  # only against a hang


def test_a_storage_key_is_short_in_old_files_too():
    def pickles(key: bytes) -> bytes:
        numbers = (legacy_reader.MAGIC, legacy_reader.VERSION, {})
        head = b"".join(pickle.dumps(number, 2) for number in numbers)
        one = tensor(of=storage(key=key.decode()))
        return head + b"\x80\x02" + one + b"." + pickle.dumps([key.decode()], 2)

    data = struct.pack("<q", 4) + bytes(16)
    assert torch_checkpoint.load(pickles(b"94") + data).tolist() == [0.0] * 4
    with pytest.raises(CheckpointError, match="unknown way"):
        torch_checkpoint.load(pickles(b"9" * 65) + data)


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
    "counted": b"("
    + name("collections", "Counter")
    + b"q\x00}"
    + whole(PATH, b"K\x01")
    + b"u\x85q\x01R"
    + b"h\x00h\x01R" * 3
    + b"t",
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


def test_keys_that_real_files_have_cost_nothing():
    def left(values: dict) -> int:
        budget = Budget()
        paid = keys.Keys(budget)
        target = {}
        for key in values:
            paid.add(target, key)
            target[key] = None
        return budget.limits.operations - budget.operations

    assert left(dict.fromkeys(range(100_000))) == 0  # an optimizer's
    assert left(dict.fromkeys(map(str, range(100_000)))) == 0
    assert left({30: 1, 60: 1, 90: 1, 0.5: 1, ("a", 1): 2}) < 10
    assert left(dict.fromkeys(range(0, 200_000, 10))) < 2_000_000  # losses by step


# The ways out.


def shared(value, times):
    return [value] * times


@pytest.mark.parametrize(
    "value",
    [
        shared("x" * 100_000, 100),
        shared(b"x" * 100_000, 100),
        shared({"x" * 100_000: 1}, 100),
        shared(mx.zeros(10_000, mx.float64), 100),
        shared(shared(shared([0] * 10, 30), 30), 30),
    ],
)
def test_training_json_is_bounded(value, tmp_path, monkeypatch):
    monkeypatch.setattr(values, "_MOST", 2**22)
    checkpoint = {"model": {"w": mx.ones((2, 2))}, "extra": value}
    with pytest.raises(ValueError, match=r"extra.*json would take over 4 MB"):
        write_run(tmp_path / "run", from_torch(checkpoint))
    assert not (tmp_path / "run").exists()


def test_an_array_that_comes_often_is_written_once(tmp_path):
    array = mx.arange(1000, dtype=mx.float32)
    checkpoint = {"model": {"w": mx.ones((2, 2))}, "a": [array] * 50, "b": array}
    write_run(tmp_path / "run", from_torch(checkpoint))
    assert (tmp_path / "run" / "extra.safetensors").stat().st_size < 5000
    back = read_run(tmp_path / "run").record.checkpoint
    assert back["b"] is back["a"][49]
    assert back["b"].tolist() == array.tolist()


def test_a_long_key_above_many_values(tmp_path):
    # Flattened with the path to each, these would be 30 GB of text.
    checkpoint = {"model": {"w": mx.ones((2, 2))}, "k" * 1_000_000: [0] * 30_000}
    write_run(tmp_path / "run", from_torch(checkpoint))
    assert (tmp_path / "run" / "training.json").stat().st_size < 5_000_000
    back = read_run(tmp_path / "run").record.checkpoint
    assert back["k" * 1_000_000] == [0] * 30_000
    assert len(table(("k" * 1_000_000, ""), [("x", 1)] * 100)) < 100_000


def test_training_json_pays_for_its_keys():
    pairs = [[value, None] for value in on_one_path(80_000, 17)]
    for held in ({"$dict": pairs}, {"$set": [key for key, _ in pairs]}):
        with pytest.raises(ValueError, match="operations"):
            decode(held, {})
    assert decode(encode({7: 1, (1, 2**70): {3}}, {}), {}) == {7: 1, (1, 2**70): {3}}


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[" + b"[]," * 9_000_000 + b"0]"])
def test_json_that_would_fill_the_memory(data, tmp_path):
    write_run(tmp_path / "run", from_torch({"model": {"w": mx.ones((2, 2))}}))
    (tmp_path / "run" / "training.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"training\.json is not JSON"):
        read_run(tmp_path / "run")


# MLX's reader.


def safetensors(path, header, size=16):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


def entry(start, end):
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def test_safetensors_that_overlap_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors(path, {"a": entry(0, 8), "b": entry(8, 16), "c": entry(8, 8)})
    assert sorted(read_arrays(path)[0]) == ["a", "b", "c"]
    for header in (
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 16), "b": entry(4, 8)},
        {"a": entry(0, 9), "b": entry(8, 16)},
    ):
        safetensors(path, header)
        with pytest.raises(ValueError, match=r"model\.safetensors .*overlap"):
            read_arrays(path)
        with pytest.raises(ValueError, match="overlap"):
            read_run(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 24) + b'{"a":{"data_offsets":0}}',
        struct.pack("<Q", 31) + b'{"a":{"data_offsets":[-8, "x"]}}'[:31],
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_safetensors_that_lie(data, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_arrays(tmp_path / "model.safetensors")
