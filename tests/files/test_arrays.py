"""Safetensors files round-trip bit-identically; hostile ones raise an error."""

import json
import random
import struct

import mlx.core as mx
import pytest
from support.helpers import bits

from mlx_gradscale.files.arrays import open_arrays, read_arrays, write_arrays

DTYPES = [
    *(mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32),
    *(mx.uint64, mx.int64, mx.float16, mx.bfloat16, mx.float32, mx.complex64),
]


def arrays():
    made = {str(d): mx.arange(6.0).reshape(2, 3).astype(d) for d in DTYPES}
    made["transposed"] = mx.arange(6).reshape(2, 3).T
    made["strided"] = mx.arange(12)[::2]
    made |= {"scalar": mx.array(7), "empty": mx.zeros((0, 3), mx.int8)}
    return made


def test_arrays_are_interchangeable_with_mlx_and_bit_identical(tmp_path):
    path, made = str(tmp_path / "a.safetensors"), arrays()
    write_arrays(path, made, {"format": "mlx"})
    assert bits(read_arrays(path)) == bits(made)
    loaded, metadata = mx.load(path, return_metadata=True)
    assert bits(loaded) == bits(made)
    assert metadata == {"format": "mlx"}
    mx.save_safetensors(path, made)  # writes null as metadata
    assert bits(read_arrays(path)) == bits(made)


def test_shapes_are_read_without_the_data(tmp_path):
    write_arrays(tmp_path / "a", {"w": mx.zeros((1000, 1000), mx.float16)})
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = open_arrays(tmp_path / "a")["w"]
    assert (found.shape, found.dtype) == ((1000, 1000), mx.float16)
    assert mx.get_peak_memory() - before < 1000


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"shape": shape, "dtype": dtype, "data_offsets": offsets}


def file_of(header, data=bytes(8)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HOSTILE = {
    "product beyond 2**64": {"a": entry([2**33, 2**33])},
    "dimension beyond 2**31": {"a": entry(), "b": entry([2**31, 0], offsets=[8, 8])},
    "negative dimensions": {"a": entry([-1, -2])},
    "text as shape": {"a": entry("2")},
    "many dimensions": {"a": entry([1] * 40, "F64")},
    "very many dimensions": {"a": entry([2**31 - 1] * 200_000)},
    "other size": {"a": entry([3])},
    "before the data": {"a": entry(offsets=[-8, 0])},
    "beyond the file": {"a": entry([4], offsets=[0, 16])},
    "one offset": {"a": entry(offsets=[8])},
    "dtype is a list": {"a": entry(dtype=["F32"])},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "a list": [1],
    "deep": b"[" * 10**5,
    "cut off": b'{"a": 1',
    "no UTF-8": b"\xff\xfe",
}
FILES = {kind: file_of(header) for kind, header in HOSTILE.items()}
FILES |= {"empty file": b"", "long header": struct.pack("<Q", 2**63) + b"{}"}


@pytest.mark.parametrize("kind", FILES)
def test_hostile_file_is_a_short_error(kind, tmp_path):
    (tmp_path / "a").write_bytes(FILES[kind])
    with pytest.raises(ValueError, match="cannot be read as safetensors") as caught:
        read_arrays(tmp_path / "a")
    assert len(str(caught.value)) < 400


def test_mutated_files_load_or_raise_value_error(tmp_path):
    chosen = random.Random(5)
    good = file_of({"a": entry(), "b": entry([2, 0], "I8", [8, 8])})
    header = len(good) - 8
    n_errors = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chosen.randint(1, 4)):
            data[chosen.randrange(header)] = chosen.choice(b'0123456789[]{}-,":.eF\xff')
        (tmp_path / "a").write_bytes(data)
        try:
            found = read_arrays(tmp_path / "a")
        except ValueError:
            n_errors += 1
        else:
            assert sum(x.nbytes for x in found.values()) <= 16
    assert n_errors > 300
