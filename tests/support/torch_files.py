"""Compare what was loaded with PyTorch's or numpy's, and build files by hand."""

import io
import pickle
import runpy
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import plain_value

GOLDEN = Path(__file__).parent.parent / "golden" / "torch"
CONTENTS = runpy.run_path(str(GOLDEN / "make_golden.py"))


def bits(array: mx.array) -> np.ndarray:
    """The array in numpy; bfloat16 as the uint16 of its bits."""
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array)


def assert_same_bits(actual: mx.array, expected: np.ndarray, where: str = "") -> None:
    assert isinstance(actual, mx.array), where
    values = bits(actual)
    assert values.shape == expected.shape, where
    assert values.dtype == expected.dtype, where
    assert values.tobytes() == np.ascontiguousarray(expected).tobytes(), where


def assert_equals_torch(actual: Any, expected: Any, where: str = "obj") -> None:
    """``actual`` is what ``load`` should make of PyTorch's ``expected``."""
    import torch

    if isinstance(expected, torch.Tensor):
        plain = expected.detach().resolve_conj().resolve_neg().contiguous()
        if plain.dtype == torch.bfloat16:
            assert actual.dtype == mx.bfloat16
            plain = plain.view(torch.uint16)
        assert_same_bits(actual, plain.numpy(), where)
    elif isinstance(expected, torch.dtype):
        assert str(actual) == str(expected), where
    elif isinstance(expected, torch.device):
        assert actual.path == "torch.device", where
        assert actual.args == (expected.type, expected.index), where
    elif isinstance(expected, dict):
        assert type(actual) is type(expected), where
        assert list(actual) == list(expected), where
        for key in expected:
            assert_equals_torch(actual[key], expected[key], f"{where}[{key!r}]")
        if isinstance(expected, OrderedDict) and hasattr(expected, "_metadata"):
            assert actual._metadata == expected._metadata
    elif isinstance(expected, torch.Size):
        assert actual.path == "torch.Size", where
        assert plain_value(actual) == tuple(expected), where
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected), where
        assert len(actual) == len(expected), where
        for i, item in enumerate(expected):
            assert_equals_torch(actual[i], item, f"{where}[{i}]")
    elif isinstance(expected, set):
        assert type(actual) is set, where
        assert actual == expected, where
    else:
        assert type(actual) is type(expected), where
        assert repr(actual) == repr(expected), where  # tells -0.0 and nan too


def nested_values(leaves: st.SearchStrategy) -> st.SearchStrategy:
    """Plain values and these leaves, in containers of every kind."""
    wide = st.integers(-(2**63), 2**63 - 1)
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-(2**300), 2**300)
        | st.floats()
        | st.text(st.characters())
        | st.binary()
        | st.binary().map(bytearray)
        | st.complex_numbers()
        | st.sets(st.text() | st.integers(-(2**63), 2**63))
        | st.text().map(Counter)
    )

    def contained(inner: st.SearchStrategy) -> st.SearchStrategy:
        lists = st.lists(inner, max_size=4)
        keyed = st.dictionaries(st.text() | wide | st.none(), inner, max_size=4)
        return lists | lists.map(tuple) | keyed | keyed.map(OrderedDict)

    return st.recursive(plain | leaves, contained, max_leaves=12)


def torch_bytes(obj: Any, **options: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    return buffer.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    """The records of a checkpoint, without their folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()
        }


def pack(contents: dict[str, bytes], folder: str = "archive") -> bytes:
    """A zip file as a general tool writes it: stored, no alignment, no zip64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            archive.writestr(f"{folder}/{name}", data)
    return buffer.getvalue()


def pickled(*parts: bytes) -> bytes:
    """A checkpoint whose pickle is these opcodes, with a storage 0 of 16 bytes."""
    return pack({"data.pkl": b"\x80\x02" + b"".join(parts) + b".", "data/0": bytes(16)})


def legacy(body: bytes, keys: Sequence[str] = (), data: bytes = b"") -> bytes:
    """A file in the format before PyTorch 1.6, whose object is these opcodes."""
    numbers = (0x1950A86A20F9469CFC6C, 1001, {})
    head = b"".join(pickle.dumps(number, 2) for number in numbers)
    return head + b"\x80\x02" + body + b"." + pickle.dumps([*keys], 2) + data


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value: int) -> bytes:
    data = value.to_bytes(17, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage") -> bytes:
    return (
        b"("
        + text("storage")
        + name("torch", kind)
        + text(key)
        + text("cpu")
        + integer(numel)
        + b"tQ"
    )


def tensor(
    offset: int = 0,
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    of: bytes | None = None,
    metadata: bytes = b"",
) -> bytes:
    def sizes(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(integer, values)) + b"t"

    return (
        name("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + (storage() if of is None else of)
        + integer(offset)
        + sizes(shape)
        + sizes(strides)
        + b"\x89"
        + name("collections", "OrderedDict")
        + b")R"
        + metadata
        + b"tR"
    )


def save_bytes(obj: Any) -> bytes:
    """The file that ``save`` writes."""
    buffer = io.BytesIO()
    torch_checkpoint.save(buffer, obj)
    return buffer.getvalue()
