"""Fuzz the checkpoint reader: each file must load or raise CheckpointError.

    python tools/torch_checkpoint_fuzz.py --mutants 100000

Mutants are real files (most from PyTorch, in tests/golden/torch) with changed bytes
or zip fields, and pickles of random instructions. A mutant passes if ``load`` raises
``CheckpointError``, or returns a tree of plain values, placeholders and usable arrays
that survives ``save`` and ``load``. A mutant fails if it raises another exception or
takes more than ``--megabytes``; it is then written to a file. If PyTorch is installed
and also reads a mutant, both must read the same values.
"""

import argparse
import collections
import contextlib
import io
import random
import resource
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
    Placeholder,
    plain_value,
)
from mlx_gradscale.torch_checkpoint.objects import Storage

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "torch"
# Edge values for sizes and counts.
EDGES = [0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16]
EDGES += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def names(paths: str) -> list[bytes]:
    """Return the pickle instructions that push these names."""
    pairs = (path.rpartition(".") for path in paths.split())
    return [f"c{module}\n{name}\n".encode() for module, _, name in pairs]


STORAGES = names(
    "torch.FloatStorage torch.LongStorage torch.BoolStorage torch.BFloat16Storage "
    "torch.storage.UntypedStorage"
)
REBUILD, ORDERED_DICT = names("torch._utils._rebuild_tensor_v2 collections.OrderedDict")
FOREIGN = names(
    "os.system argparse.Namespace numpy._core.multiarray.scalar numpy.dtype "
    "numpy._core.multiarray._reconstruct pathlib.PosixPath collections.defaultdict "
    "__builtin__.getattr copy_reg._reconstructor"
)
OTHERS = names(
    "_codecs.encode __builtin__.bytearray __builtin__.set __builtin__.frozenset "
    "torch.Size collections.Counter torch.Tensor torch._utils._rebuild_tensor_v3 "
    "torch._utils._rebuild_parameter torch._tensor._rebuild_from_type_v2 torch.uint16 "
    "torch.float16 torch.device __builtin__.complex"
)
NAMES = [*STORAGES, REBUILD, ORDERED_DICT, *FOREIGN, *OTHERS]


def seeds() -> list[bytes]:
    """Return the files to mutate; readable golden files appear several times."""
    files = []
    for path in sorted(GOLDEN.glob("*.pt")):
        files += [path.read_bytes()] * (1 if "refused" in path.name else 4)
    # torch.load(weights_only=True) does not read empty bytes or a frozenset.
    everything = torch_checkpoint.load(GOLDEN / "zip.pt")
    del everything["plain"]["frozenset"]
    return files + [save_bytes(everything)] * 8


def save_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch_checkpoint.save(file, value)
    return file.getvalue()


# Mutations of a file.


def set_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(changed))
        flipped = changed[at] ^ 1 << rng.randrange(8)
        changed[at] = rng.choice([flipped, flipped, 0, 1, 127, 128, 255, 46, 82])
    return bytes(changed)


def set_number(data: bytes, rng: random.Random, at: int | None = None) -> bytes:
    """Overwrite two, four or eight bytes, as in a size or count, with an edge value."""
    size = rng.choice([2, 4, 8])
    at = rng.randrange(max(1, len(data) - size)) if at is None else at
    value = (rng.choice(EDGES) % 2 ** (8 * size)).to_bytes(size, "little")
    return data[:at] + value + data[at + size :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(data: bytes, rng: random.Random) -> bytes:
    """Remove a piece, repeat it, or replace it with an instruction."""
    at, size = rng.randrange(len(data)), rng.choice([1, 2, 3, 4, 64, 1000])
    piece = data[at : at + size]
    new = rng.choice([b"", piece * 2, piece * 9, instruction(rng)])
    return data[:at] + new + data[at + size :]


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
    """Change only the pickle of a zip file, or the start of a legacy file."""
    if not data.startswith(b"PK"):
        return set_number(data[:4000], rng) + data[4000:]
    records = unpack(data)
    name = next(name for name in records if name.endswith("/data.pkl"))
    change = rng.choice([set_bytes, set_number, splice])
    records[name] = change(records[name], rng) or b"."
    return pack(records)


def in_the_directory(data: bytes, rng: random.Random) -> bytes:
    """Put an edge value in a field of a header, an entry or the end of a zip file."""
    mark = rng.choice([b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"])
    places = len(data.split(mark))
    at = len(mark.join(data.split(mark)[: rng.randrange(places) + 1]))
    return set_number(data, rng, at + 4 + 2 * rng.randrange(24))


def number(rng: random.Random, most: int = 8) -> bytes:
    value = rng.choice(EDGES) if rng.random() < 0.1 else rng.randrange(most)
    return b"\x8a\x09" + value.to_bytes(9, "little")


def text(rng: random.Random) -> bytes:
    value = rng.choice([b"", b"0", b"a", b"storage", b"cpu", b"_metadata", b"conj"])
    return b"X" + struct.pack("<I", len(value)) + value


def tensor(rng: random.Random) -> bytes:
    count = rng.randrange(4)
    key = b"X\x01\0\0\0" + rng.choice([b"0", b"1", b"2"])
    start = REBUILD + b"((X\x07\0\0\0storage" + rng.choice(STORAGES) + key
    view = b"X\x03\0\0\0cpu" + number(rng) + b"tQ" + number(rng, 2)
    shape = b"".join(number(rng, 4) for _ in range(count))
    strides = b"".join(number(rng, 3) for _ in range(count))
    hooks = b"\x89" + ORDERED_DICT + b")R"
    return start + view + b"(" + shape + b"t(" + strides + b"t" + hooks + b"tR"


def instruction(rng: random.Random) -> bytes:
    """Return one pickle instruction, or a few that belong together."""
    kind = rng.randrange(12)
    if kind < 6:
        simple = b"N()]}tRbsaeuQ.01\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x94"
        return bytes([rng.choice(simple)])
    if kind < 8:
        return rng.choice([b"q", b"h"]) + bytes([rng.randrange(6)])
    if kind == 8:
        return rng.choice([number, text, tensor])(rng)
    return rng.choice(NAMES) if kind < 11 else rng.randbytes(1)


def value(rng: random.Random, depth: int = 0) -> bytes:
    """Return the pickle of a random value, occasionally with a stray instruction."""
    noise = instruction(rng) if rng.random() < 0.01 else b""
    if depth > 3 or rng.random() < 0.55:
        leaf = rng.choice([number, text, tensor, lambda _: b"N", lambda _: b"\x88"])
        return noise + leaf(rng)
    items = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    kind = rng.choice([0, 0, 1, 1, 2])
    if kind == 0:
        start, end = rng.choice([(b"](", b"e"), (b"(", b"t")])
        return noise + start + b"".join(items) + end
    if kind == 1:
        start = rng.choice([b"}(", ORDERED_DICT + b")R("])
        return noise + start + b"".join(text(rng) + item for item in items) + b"u"
    # An object of an unknown class, with a state and items.
    made = rng.choice(FOREIGN) + b"(" + b"".join(items) + b"t"
    made += rng.choice([b"R", b"\x81"])
    put = bytes([rng.randrange(6)])
    steps = [
        b"}" + text(rng) + b"h" + put + b"sb",
        b"(" + value(rng, depth + 1) + text(rng) + b"tb",
        value(rng, depth + 1) + b"a",
        b"(" + text(rng) + value(rng, depth + 1) + b"u",
    ]
    return noise + made + b"q" + put + b"".join(rng.choices(steps, k=rng.randrange(3)))


def random_pickle(data: bytes, rng: random.Random) -> bytes:
    """Return a new file with a random pickle and three small storages."""
    if rng.random() < 0.7:
        pickle = value(rng)
    else:
        pickle = b"".join(instruction(rng) for _ in range(rng.randrange(1, 30)))
    storages = {f"x/data/{i}": bytes([i % 2]) * 8 * (i + 1) for i in range(3)}
    pickle = b"\x80\x02" + pickle + b"."
    return pack({"x/data.pkl": pickle, "x/version": b"3\n", **storages})


Mutation = Callable[[bytes, random.Random], bytes]
MUTATIONS: list[Mutation] = [set_bytes, set_bytes, set_number, cut, splice, splice]
MUTATIONS += [in_the_pickle] * 3 + [in_the_directory] * 2 + [random_pickle] * 2


def apply(mutate: Mutation, data: bytes, rng: random.Random) -> bytes:
    try:
        return mutate(data, rng) or b"\0"
    except Exception:  # an earlier mutation broke the zip file for zipfile
        return set_bytes(data, rng)


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield the mutations and the bytes of each mutant, the same for the same seed."""
    rng = random.Random(seed)
    files = seeds()
    for _ in range(count):
        data = rng.choice(files)
        chosen = rng.choices(MUTATIONS, k=rng.choice([1, 1, 1, 2, 3]))
        for mutate in chosen:
            data = apply(mutate, data, rng)
        yield "+".join(mutate.__name__ for mutate in chosen), data


# Checks.


def check_sound(value: Any, seen: set[int]) -> None:
    """Raise unless this is a tree of plain values, placeholders and usable arrays."""
    plain = (str, int, float, bool, type(None), bytes, bytearray, complex)
    if isinstance(value, mx.array):
        mx.eval(value.astype(mx.float32).sum() if value.size < 2**20 else value[:0])
        return
    if isinstance(value, Storage) or type(value) in plain:
        return
    if not isinstance(value, (Placeholder, dict, list, tuple, set, frozenset)):
        raise AssertionError(f"a {type(value).__name__} came out of load()")
    if id(value) in seen:
        return
    seen.add(id(value))
    held = [*value] if not isinstance(value, Placeholder) else [value.callee]
    if isinstance(value, Placeholder):
        str(value), plain_value(value)
        held += [value.args, *(item for _, items in value.edits for item in items)]
    elif isinstance(value, dict):
        held += value.values()
    for item in held:
        check_sound(item, seen)


def check_way_back(once: bytes, read: Callable[[bytes], Any]) -> None:
    """Raise if an object changes when it is read and saved again."""
    files = unpack(once), unpack(save_bytes(read(once)))
    for records in files:
        # Compare byte counts, because sets, and so memo indices, may be reordered.
        pickled = collections.Counter(records["archive/data.pkl"])
        records["archive/data.pkl"] = repr(sorted(pickled.items())).encode()
    if files[0] != files[1]:
        raise AssertionError(f"save() and {read.__name__}() changed the object")


def differs_from_torch(value: Any, expected: Any, torch: Any) -> bool:
    if isinstance(expected, torch.dtype):
        return str(value) != str(expected)
    if isinstance(expected, torch.device):
        made = type(expected)(*value.args)
        return value.path != f"torch.{made.__class__.__name__}" or made != expected
    if isinstance(expected, torch.Size):
        return plain_value(value) != tuple(expected)
    if isinstance(expected, torch.Tensor) and isinstance(value, Placeholder):
        return expected.layout is torch.strided  # sparse tensors become placeholders
    if isinstance(value, Storage):  # load() does not read one that is no tensor's
        return not isinstance(expected, (torch.TypedStorage, torch.UntypedStorage))
    if isinstance(value, Placeholder):  # PyTorch refuses all but names
        named = getattr(expected, "__name__", type(expected).__name__)
        return value.args is not None or named not in (value.name, "StorageType")
    if isinstance(expected, torch.Tensor):
        if expected.numel() > 2**20 or not isinstance(value, mx.array):
            return not isinstance(value, mx.array)
        plain = expected.detach().resolve_conj().resolve_neg().contiguous()
        if plain.dtype == torch.bool:  # whose bytes may be others than 0 and 1
            plain = plain.view(torch.uint8) != 0
        if plain.dtype == torch.bfloat16:
            value, plain = value.view(mx.uint16), plain.view(torch.uint16)
        return np.array(value).tobytes() != plain.numpy().tobytes()
    if isinstance(expected, dict):
        return list(map(repr, value)) != list(map(repr, expected)) or any(
            differs_from_torch(value[key], expected[key], torch) for key in expected
        )
    if isinstance(expected, (list, tuple)):
        pairs = zip(value, expected, strict=False)
        differs = any(differs_from_torch(a, b, torch) for a, b in pairs)
        return len(value) != len(expected) or differs
    return (
        value != expected
        if isinstance(expected, set)
        else repr(value) != repr(expected)
    )


def judge(data: bytes, torch: Any = None) -> str:
    """Return "refused", "loaded" or "same as torch"; raise if the mutant fails."""
    try:
        value = torch_checkpoint.load(data)
        # This also reads storages that no tensor uses, which may be damaged.
        copied = save_bytes(torch_checkpoint.shapes(data))
    except CheckpointError:
        return "refused"
    check_sound(value, set())
    check_way_back(copied, torch_checkpoint.shapes)
    check_way_back(save_bytes(value), torch_checkpoint.load)
    if torch is None:
        return "loaded"
    try:
        expected = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        differs_from_torch(value, expected, torch)
    except Exception:  # also a RecursionError, if an object contains itself
        return "loaded"
    if differs_from_torch(value, expected, torch) and data.startswith(b"PK"):
        # PyTorch returns uninitialized memory for a record that is marked as a folder.
        file = io.BytesIO(pack(unpack(data)))
        expected = torch.load(file, weights_only=True, map_location="cpu")
    if differs_from_torch(value, expected, torch):
        raise AssertionError("load() and torch.load() read different values")
    return "same as torch"


def peak_memory(reset: bool = False) -> float:
    """Return peak memory in MB since the last reset (off Linux, since the start)."""
    with contextlib.suppress(OSError):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 1024)


def run(args: argparse.Namespace, torch: Any) -> collections.Counter[str]:
    outcomes: collections.Counter[str] = collections.Counter()
    slowest = largest = (0.0, "")
    for i, (how, data) in enumerate(mutants(args.mutants, args.seed)):
        before, start = peak_memory(reset=True), time.process_time()
        try:
            outcome = judge(data, torch)
            grown = peak_memory() - before
            largest = max(largest, (grown, how))
            if grown > args.megabytes:
                raise MemoryError(f"a file took {grown:.0f} MB")
        except Exception as error:
            outcome = "FAILED"
            kept = Path(f"fuzz_failure_{args.seed}_{i}.pt")
            kept.write_bytes(data)
            print(f"FAILURE {kept} ({how}): {type(error).__name__}: {error}")
        outcomes[outcome] += 1
        slowest = max(slowest, (time.process_time() - start, how))
    print("slowest {:.2f} s ({}), largest {:.0f} MB ({})".format(*slowest, *largest))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=200, help="limit per file")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        torch = None
    for data in seeds():  # warm up: only the mutants' memory should count
        judge(data, torch)
    outcomes = run(args, torch)
    for outcome, count in sorted(outcomes.items()):
        print(f"  {outcome:<15}{count:>8}")
    sys.exit(outcomes["FAILED"] > 0)


if __name__ == "__main__":
    main()
