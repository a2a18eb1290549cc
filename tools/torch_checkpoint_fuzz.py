"""Fuzz the checkpoint reader: every file is a sound object or a CheckpointError.

    python tools/torch_checkpoint_fuzz.py --mutants 100000

Mutants of real files (PyTorch's own, from tests/golden), pickles put together from
random instructions, zip fields with hostile numbers, and bombs: remembered arguments
that are copied again and again, values that are shared, keys that are in each other's
way. A mutant passes if ``load`` returns a tree of plain values, placeholders, and
arrays that can be computed with, which ``save`` and ``load`` give again, or raises
``CheckpointError``; any other exception, more than ``--seconds`` or more than
``--megabytes`` for one file is a failure and is written to a file. The files may ask
for a sixteenth of what is the default, so that a bomb is over soon. Where PyTorch is
installed and reads a mutant too, the values have to be its values.
"""

import argparse
import collections
import contextlib
import io
import random
import resource
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import (
    CheckpointError,
    Limits,
    Placeholder,
    TensorShape,
    plain_value,
    tensors,
)
from mlx_gradscale.torch_checkpoint.foreign import TorchName

LIMITS = Limits(operations=2**19, tensor_bytes=2**26)
GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

# Numbers at which sizes, counts and signs go wrong.
EDGES = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16]
EDGES += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

_NAMES = """
torch._utils _rebuild_tensor_v2
torch._utils _rebuild_tensor_v3
torch._utils _rebuild_parameter
torch._tensor _rebuild_from_type_v2
torch FloatStorage
torch LongStorage
torch BoolStorage
torch BFloat16Storage
torch.storage UntypedStorage
torch Tensor
torch uint16
torch float16
torch Size
torch device
collections OrderedDict
collections Counter
_codecs encode
__builtin__ set
__builtin__ frozenset
__builtin__ bytearray
__builtin__ complex
os system
argparse Namespace
numpy._core.multiarray scalar
numpy._core.multiarray _reconstruct
numpy dtype
pathlib PosixPath
datetime datetime
collections defaultdict
__builtin__ getattr
copy_reg _reconstructor
mlx_gradscale.torch_checkpoint TensorShape
"""
NAMES = [f"c{line}\n".replace(" ", "\n").encode() for line in _NAMES.split("\n")[1:-1]]
# What makes a copy of an argument of this kind.
COPIES = {
    "text": [NAMES[16], NAMES[19]],
    "bytes": [NAMES[19]],
    "list": [NAMES[17], NAMES[18]],
    "tuple": [NAMES[12]],
    "dict": [NAMES[15]],
}
REBUILD, STORAGES, ORDERED_DICT = NAMES[0], NAMES[4:9], NAMES[14]


def seeds() -> list[bytes]:
    """The golden files, those that can be read more often than the others."""
    files = []
    for path in sorted(GOLDEN.glob("*.pt")):
        files += [path.read_bytes()] * (1 if "refused" in path.name else 4)
    # torch.load(weights_only=True) reads no empty bytes and no frozenset.
    everything = torch_checkpoint.load(GOLDEN / "zip.pt")
    del everything["plain"]["frozenset"]
    return files + [save_bytes(everything)] * 8


# Mutations: from a file, and others to mix in, to another file.


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def set_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] = rng.choice([0, 1, 127, 128, 255, 46, 82])
    return bytes(changed)


def set_number(data: bytes, rng: random.Random) -> bytes:
    """An edge value over two, four or eight bytes, as a size or a count would be."""
    size = rng.choice([2, 4, 8])
    at = rng.randrange(max(1, len(data) - size))
    value = (rng.choice(EDGES) % 2 ** (8 * size)).to_bytes(size, "little")
    return data[:at] + value + data[at + size :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def remove(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 2, 4, 64, 1000]) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 2, 4, 64, 1000])
    return data[: at + size] + data[at : at + size] * rng.choice([1, 1, 9]) + data[at:]


def unpack(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(records: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def in_the_pickle(data: bytes, rng: random.Random) -> bytes:
    """Change the pickle only, in a zip file that is sound around it."""
    if not data.startswith(b"PK"):
        return set_number(data[:4000], rng) + data[4000:]
    records = unpack(data)
    name = next(name for name in records if name.endswith("/data.pkl"))
    change = rng.choice([flip_bits, set_bytes, set_number, remove, repeat, swap_opcode])
    records[name] = change(records[name], rng) or b"."
    return pack(records)


def swap_opcode(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + instruction(rng) + data[at + rng.choice([0, 1, 2, 3]) :]


def in_the_directory(data: bytes, rng: random.Random) -> bytes:
    """An edge value in a field of a header, an entry or the end of the zip file."""
    marks = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
    found = [at for mark in marks for at in _all(data, mark)]
    if not found:
        return set_number(data, rng)
    at = rng.choice(found) + 4 + 2 * rng.randrange(24)
    size = rng.choice([2, 4, 8])
    value = (rng.choice([*EDGES, *found]) % 2 ** (8 * size)).to_bytes(size, "little")
    return data[:at] + value + data[at + size :]


def _all(data: bytes, part: bytes) -> Iterator[int]:
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + 1)


def number(rng: random.Random, most: int = 8) -> bytes:
    value = rng.choice(EDGES) if rng.random() < 0.1 else rng.randrange(most)
    return b"\x8a\x09" + value.to_bytes(9, "little")


def text(rng: random.Random) -> bytes:
    value = rng.choice([b"", b"0", b"a", b"storage", b"cpu", b"_metadata", b"conj"])
    return b"X" + struct.pack("<I", len(value)) + value


def storage(rng: random.Random) -> bytes:
    key = b"X\x01\0\0\0" + rng.choice([b"0", b"1", b"2"])
    location = b"X\x03\0\0\0cpu"
    kind = rng.choice(STORAGES)
    return b"(X\x07\0\0\0storage" + kind + key + location + number(rng) + b"tQ"


def sizes(rng: random.Random, count: int, most: int) -> bytes:
    return b"(" + b"".join(number(rng, most) for _ in range(count)) + b"t"


def tensor(rng: random.Random) -> bytes:
    count = rng.randrange(4)
    shape, strides = sizes(rng, count, 4), sizes(rng, count, 3)
    hooks = b"\x89" + ORDERED_DICT + b")R"
    return (
        REBUILD + b"(" + storage(rng) + number(rng, 2) + shape + strides + hooks + b"tR"
    )


_SIMPLE = b"N()]}tRbsaeuQ.01\x81\x92\x85\x86\x87\x88\x89\x8f\x90\x91\x94"


def instruction(rng: random.Random) -> bytes:
    """One instruction of a pickle, or a few that belong together."""
    kind = rng.randrange(12)
    if kind < 6:
        return bytes([rng.choice(_SIMPLE)])
    if kind < 8:
        return rng.choice([b"q", b"h"]) + bytes([rng.randrange(6)])
    if kind == 8:
        return rng.choice([number, text, storage, tensor])(rng)
    return rng.choice(NAMES) if kind < 11 else rng.randbytes(1)


def value(rng: random.Random, depth: int = 0) -> bytes:
    """A value that makes sense, with an instruction that does not now and then."""
    noise = instruction(rng) if rng.random() < 0.01 else b""
    if depth < 4 and rng.random() < 0.1:
        return noise + foreign(rng, depth)
    if depth > 3 or rng.random() < 0.6:
        leaf = rng.choice([number, text, tensor, lambda _: b"N", lambda _: b"\x88"])
        return noise + leaf(rng)
    items = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if rng.random() < 0.5:
        start, end = rng.choice([(b"](", b"e"), (b"(", b"t")])
        return noise + start + b"".join(items) + end
    start = rng.choice([b"}(", ORDERED_DICT + b")R("])
    return noise + start + b"".join(text(rng) + item for item in items) + b"u"


def foreign(rng: random.Random, depth: int) -> bytes:
    """An object of a class that is not known, with a state and items."""
    args = (
        b"(" + b"".join(value(rng, depth + 1) for _ in range(rng.randrange(3))) + b"t"
    )
    made = rng.choice(NAMES[21:]) + args + rng.choice([b"R", b"R", b"\x81"])
    put = b"q" + bytes([rng.randrange(6)])
    steps = [
        b"}" + text(rng) + b"h" + put[1:] + b"sb",
        b"(" + value(rng, depth + 1) + text(rng) + b"tb",
        value(rng, depth + 1) + b"a",
        b"(" + text(rng) + value(rng, depth + 1) + b"u",
        b"",
    ]
    return made + put + b"".join(rng.choices(steps, k=rng.randrange(3)))


def random_pickle(data: bytes, rng: random.Random) -> bytes:
    """Nothing of the file is left: random instructions and three small storages."""
    if rng.random() < 0.7:
        pickle = value(rng)
    else:
        pickle = b"".join(instruction(rng) for _ in range(rng.randrange(1, 30)))
    storages = {f"x/data/{i}": bytes([i % 2]) * 8 * (i + 1) for i in range(3)}
    pickle = b"\x80\x02" + pickle + b"."
    return pack({"x/data.pkl": pickle, "x/version": b"3\n", **storages})


def many(rng: random.Random) -> int:
    return 2 ** rng.randrange(15)


def long_value(rng: random.Random, kind: str) -> bytes:
    """A long text, bytes, or a container of numbers that may collide."""
    count = many(rng)
    if kind in ("text", "bytes"):
        data = rng.choice([b"x", "é\U0001f600".encode()]) * count
        return (b"X" if kind == "text" else b"B") + struct.pack("<I", len(data)) + data
    keys = colliding(rng, count)
    if kind == "dict":
        return b"}(" + b"".join(key + b"K\x01" for key in keys) + b"u"
    start, end = {
        "list": (b"](", b"e"),
        "tuple": (b"(", b"t"),
        "set": (b"\x8f(", b"\x90"),
    }[kind]
    return start + b"".join(keys) + end


def colliding(rng: random.Random, count: int) -> list[bytes]:
    """Numbers or tuples that are tried one after the other, or hash alike."""
    kind = rng.randrange(5)
    if kind == 0:
        return [b"J" + struct.pack("<i", i) for i in range(count)]
    if kind == 1:
        keys, at, size = [], 0, 2 * count
        for i in range(count):
            keys.append(
                b"J" + struct.pack("<i", at + rng.choice([0, 0, size * i % 2**20]))
            )
            at = (5 * at + 1) % size
        return keys
    if kind == 2:
        return [
            b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") for i in range(count)
        ]
    if kind == 3:
        return [
            b"G" + struct.pack(">d", 2.0 ** (61 * (i % 16)) * (1 + i // 16))
            for i in range(count)
        ]
    ends = b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff"
    return [
        b"(" + b"".join(ends[i >> j & 1] for j in range(14)) + b"t"
        for i in range(count)
    ]


def bomb(data: bytes, rng: random.Random) -> bytes:
    """A name called with a remembered value, or the value itself, very often."""
    kind = rng.choice(["text", "bytes", "list", "tuple", "set", "dict"])
    value = long_value(rng, kind) + b"q\x01"
    called = rng.choice(COPIES.get(kind, NAMES) if rng.random() < 0.8 else NAMES)
    if rng.random() < 0.3:  # doubled: each holds the one before twice
        value += b"".join(
            b"h\x01" + rng.choice([b"\x86", b"\x86", b"\x85"]) + b"q\x01"
            if i % 2
            else b"h\x01"
            for i in range(2 * rng.randrange(40))
        )
    arguments = (
        b"h\x01" + rng.choice([b"\x85", b"", b"X\x06\0\0\0latin1\x86"]) + b"q\x02"
    )
    again = rng.choice([b"h\x00h\x02R", b"h\x01", b"h\x00h\x02Rq\x01", b"]q\x03h\x03"])
    if rng.random() < 0.2:
        again = b"}h\x01Ns"
    pickle = (
        b"\x80\x02(" + called + b"q\x00" + value + arguments + again * many(rng) + b"t."
    )
    return pack({"x/data.pkl": pickle, "x/version": b"3\n"})


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flip_bits,
    set_bytes,
    set_number,
    cut,
    remove,
    repeat,
    in_the_pickle,
    in_the_pickle,
    in_the_pickle,
    in_the_directory,
    in_the_directory,
    random_pickle,
    random_pickle,
    bomb,
]


def apply(
    mutate: Callable[[bytes, random.Random], bytes], data: bytes, rng: random.Random
) -> bytes:
    try:
        return mutate(data, rng) or b"\0"
    except Exception:  # an earlier mutation broke the zip file for zipfile
        return flip_bits(data, rng)


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """How each was made, and its bytes; the same ones for the same seed."""
    rng = random.Random(seed)
    files = seeds()
    for _ in range(count):
        data = rng.choice(files)
        chosen = rng.choices(MUTATIONS, k=rng.choice([1, 1, 1, 2, 3]))
        for mutate in chosen:
            data = apply(mutate, data, rng)
        yield "+".join(mutate.__name__ for mutate in chosen), data


# The judgement.


def check_sound(value: Any, seen: set[int] | None = None) -> None:
    """Raises if this is not a tree of plain values, placeholders and arrays that work.

    Only placeholders may form rings; ``seen`` are those that are known.
    """
    seen = set() if seen is None else seen
    plain = (str, int, float, bool, type(None), bytes, bytearray, complex, TorchName)
    if isinstance(value, TensorShape):
        hash(value)
    elif isinstance(value, mx.array):
        used = value.astype(mx.float32).sum() if value.size < 2**20 else value[:0]
        mx.eval(used)
    elif isinstance(value, Placeholder):
        if id(value) in seen:
            return
        seen.add(id(value))
        str(value)
        plain_value(value)
        held = [value.callee, value.args]
        for item in held + [item for _, items in value.edits for item in items]:
            check_sound(item, seen)
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        if id(value) in seen:
            return
        if len(seen) and type(value) is not tuple:
            seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else ():
            hash(key)
            check_sound(key, seen)
            check_sound(item, seen)
        for item in value if not isinstance(value, dict) else ():
            check_sound(item, seen)
    elif type(value) not in plain:
        raise AssertionError(f"a {type(value).__name__} came out of load()")


def save_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch_checkpoint.save(file, value)
    return file.getvalue()


def check_way_back(value: Any) -> None:
    """Raises if a file of this object is not read as the same object."""
    once = save_bytes(value)
    again = save_bytes(torch_checkpoint.load(once, float64=mx.float64))
    # The members of a set come in another order, and their numbers with them.
    counts = [collections.Counter(unpack(x)["archive/data.pkl"]) for x in (once, again)]
    if counts[0] != counts[1]:
        raise AssertionError("what is saved is not what was loaded")


def differs_from_torch(value: Any, expected: Any, torch: Any) -> bool:
    if isinstance(value, Placeholder):  # only names: PyTorch refuses all that is more
        named = getattr(expected, "__name__", type(expected).__name__)
        return not value.is_name or named not in (value.name, "StorageType")
    if isinstance(expected, torch.Tensor):
        if expected.numel() > 2**20 or not isinstance(value, mx.array):
            return not isinstance(value, mx.array)
        plain = expected.detach().resolve_conj().resolve_neg().contiguous()
        if plain.dtype == torch.bfloat16:
            value, plain = value.view(mx.uint16), plain.view(torch.uint16)
        return np.array(value).tobytes() != plain.numpy().tobytes()
    if isinstance(expected, dict):
        return list(map(repr, value)) != list(map(repr, expected)) or any(
            differs_from_torch(value[key], expected[key], torch) for key in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(value) != len(expected) or any(
            differs_from_torch(a, b, torch)
            for a, b in zip(value, expected, strict=True)
        )
    if isinstance(expected, (torch.dtype, torch.device)):
        return value != str(expected)
    if isinstance(expected, set):
        return value != expected
    return repr(value) != repr(expected)


def judge(data: bytes, torch: Any = None) -> str:
    """ "refused", "loaded", or "same as torch"; anything else is raised."""
    # The checksums of every other file in a thread, as if its tensors were large.
    tensors._LARGE = (2**20, 1)[len(data) % 2]
    try:
        value = torch_checkpoint.load(data, limits=LIMITS)
    except CheckpointError:
        return "refused"
    finally:
        tensors._LARGE = 2**20
    torch_checkpoint.shapes(data, LIMITS)
    check_sound(value)
    check_way_back(value)
    if torch is None:
        return "loaded"
    try:
        expected = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:
        return "loaded"
    if differs_from_torch(value, expected, torch):
        raise AssertionError("load() and torch.load() read different values")
    return "same as torch"


class Peak:
    """The most memory that the process has had since ``reset``, where Linux tells it.

    Elsewhere it is the most since the process began.
    """

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.start = self._now()

    def grown(self) -> float:
        return (self._now() - self.start) / 1e6

    def _now(self) -> int:
        try:
            status = Path("/proc/self/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])
        except OSError:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak


def run(
    count: int, seed: int, seconds: int, megabytes: int, torch: Any
) -> collections.Counter:
    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"a file took over {seconds} s")

    # The processor's time: the machine may have other things to do.
    signal.signal(signal.SIGPROF, too_slow)
    outcomes: collections.Counter = collections.Counter()
    slowest = largest = (0.0, "")
    peak = Peak()
    for i, (how, data) in enumerate(mutants(count, seed)):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        peak.reset()
        start = time.process_time()
        try:
            outcome = judge(data, torch)
            grown = peak.grown()
            if grown > megabytes:
                raise MemoryError(f"a file took {grown:.0f} MB")
            outcomes[outcome] += 1
            largest = max(largest, (grown, how))
        except BaseException as error:
            kept = Path(f"fuzz_failure_{seed}_{i}.pt")
            kept.write_bytes(data)
            print(f"FAILURE {kept} ({how}): {type(error).__name__}: {error}")
            outcomes["FAILED"] += 1
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, (time.process_time() - start, how))
        if (i + 1) % 10_000 == 0:
            print(f"{i + 1:>8} {dict(outcomes)}", flush=True)
    print("slowest {:.2f} s ({}), largest {:.0f} MB ({})".format(*slowest, *largest))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=20, help="for one file")
    parser.add_argument("--megabytes", type=int, default=200, help="for one file")
    parser.add_argument("--no-torch", action="store_true", help="do not compare")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        torch = None
    if args.no_torch:
        torch = None
    for data in seeds():  # so that the memory measured is that of the mutants
        judge(data, torch)
    start = time.perf_counter()
    outcomes = run(args.mutants, args.seed, args.seconds, args.megabytes, torch)
    print(f"{sum(outcomes.values())} mutants in {time.perf_counter() - start:.0f} s:")
    for outcome, count in sorted(outcomes.items()):
        print(f"  {outcome:<15}{count:>8}")
    sys.exit(outcomes["FAILED"] > 0)


if __name__ == "__main__":
    main()
