"""What ``save`` writes is what ``torch.save`` would, and PyTorch reads it back."""

import gzip
import io
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tests.support.torch_files import (
    CONTENTS,
    GOLDEN,
    assert_equals_torch,
    assert_same_bits,
    bits,
    records,
    torch_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import writer, zip_writer

DTYPES = [
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.float64,
    mx.complex64,
    mx.bool_,
    mx.uint8,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.uint16,
    mx.uint32,
    mx.uint64,
]
ID = ".data/serialization_id"


def random_array(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(0, 100, shape)
    with mx.stream(mx.cpu):  # float64 exists only there
        return mx.array(values).astype(dtype)


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return random_array(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))


values = st.recursive(
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
    | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9) | st.none(), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(obj=values)
def test_pytorch_reads_back_what_was_saved(obj):
    torch = pytest.importorskip("torch")
    data = save_bytes(obj)
    assert_equals_torch(obj, torch.load(io.BytesIO(data), weights_only=True))


@settings(deadline=None, max_examples=150)
@given(obj=values)
def test_there_and_back_gives_the_same_bytes(obj):
    torch = pytest.importorskip("torch")
    ours = save_bytes(obj)
    read = torch.load(io.BytesIO(ours), weights_only=True)
    theirs = torch_bytes(read)
    back = torch_checkpoint.load(theirs, float64=mx.float64)
    assert_equals_torch(back, read)
    again = records(save_bytes(back))
    # Equal sets need not list their members in one order, so leave the pickle out.
    for name, data in records(ours).items():
        if name not in ("data.pkl", ID):
            assert again[name] == data == records(theirs)[name], name


def test_a_file_is_pytorchs_own_byte_for_byte(tmp_path):
    torch = pytest.importorskip("torch")
    obj = {
        "model": torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)
        ).state_dict(),
        "dtypes": [
            torch.ones(2, 3).to(dtype)
            for dtype in (torch.bfloat16, torch.uint16, torch.int64, torch.bool)
        ],
        "shapes": [torch.zeros(s) for s in ((), (0,), (3, 0, 2), (1, 2, 3, 4, 5))],
        "numbers": [0, -1, 255, 256, 65535, 65536, 2**31, -(2**39), 2**39, 10**50],
        "others": [1.5, True, None, "größe", b"\x00\xff", 2j, (1,), (1, 2, 3, 4)],
        "batches": [list(range(n)) for n in (0, 1, 2, 999, 1000, 1001, 2000, 2001)]
        + [dict.fromkeys(range(n)) for n in (0, 1, 2, 999, 1000, 1001, 2000, 2001)]
        + [
            OrderedDict.fromkeys(range(n))
            for n in (0, 1, 2, 999, 1000, 1001, 2000, 2001)
        ],
        "bytearray": bytearray(b"abc"),
        "empty bytearray": bytearray(),
        "counter": Counter(["one", "two", "one"]),
        "set": {7},
    }
    theirs, ours = tmp_path / "a" / "run.pt", tmp_path / "b" / "run.pt"
    theirs.parent.mkdir()
    ours.parent.mkdir()
    torch.save(obj, theirs)
    torch_checkpoint.save(ours, torch_checkpoint.load(theirs))
    expected, actual = theirs.read_bytes(), ours.read_bytes()
    # All but the id, which PyTorch makes of hashes of its own: its 40 digits, and
    # its checksum after it and in the directory.
    number = records(expected)[ID]
    with zipfile.ZipFile(theirs) as archive:
        checksum = archive.getinfo(f"run/{ID}").CRC.to_bytes(4, "little")
    with zipfile.ZipFile(ours) as archive:
        own = archive.getinfo(f"run/{ID}").CRC.to_bytes(4, "little")
    actual = actual.replace(records(actual)[ID], number).replace(own, checksum)
    assert actual == expected


def test_golden_files_go_round_without_pytorch():
    everything = torch_checkpoint.load(GOLDEN / "zip.pt")
    everything["plain"].pop("frozenset")
    again = torch_checkpoint.load(save_bytes(everything))
    for name, expected in CONTENTS["DTYPES"].items():
        assert_same_bits(again["dtypes"][name], expected)
    for name, expected in CONTENTS["VIEWS"].items():
        assert_same_bits(again["views"][name], np.asarray(expected))
    for name, value in everything["plain"].items():
        assert again["plain"][name] == value


def test_the_archive_is_a_sound_zip_file():
    obj = {"a": mx.arange(100_000), "empty": mx.zeros((0,)), "b": mx.ones((3,))}
    data = save_bytes(obj)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            lengths = struct.unpack_from("<2H", data, info.header_offset + 26)
            assert (info.header_offset + 30 + sum(lengths)) % 64 == 0
    names = list(records(data))
    assert names[:4] == [
        "data.pkl",
        ".format_version",
        ".storage_alignment",
        "byteorder",
    ]
    assert names[4:7] == ["data/0", "data/1", "data/2"]
    assert names[7:] == ["version", ID]


def test_equal_objects_give_equal_files():
    def make():
        return {"w": mx.arange(5), "lr": 0.1}

    assert save_bytes(make()) == save_bytes(make())


def test_sharing_by_identity_stays():
    torch = pytest.importorskip("torch")
    w, group = mx.ones((1000,)), {"lr": 0.1}
    data = save_bytes({"a": w, "b": w, "c": [w], "g": [group, group]})
    assert [name for name in records(data) if name.startswith("data/")] == ["data/0"]
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert back["a"].data_ptr() == back["b"].data_ptr() == back["c"][0].data_ptr()
    assert back["g"][0] is back["g"][1]
    ours = torch_checkpoint.load(data)
    assert ours["a"] is ours["b"] is ours["c"][0]


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a.T,
        lambda a: a[::2, 1::3],
        lambda a: a[::-1],
        lambda a: mx.broadcast_to(a[:1], a.shape),
        lambda a: a[5:, 7],
        lambda a: a + 1,
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.complex64, mx.uint8])
def test_views_and_lazy_arrays(make, dtype, monkeypatch):
    monkeypatch.setattr(writer, "CHUNK", 256)  # so that there are many chunks
    array = make(random_array((40, 30), dtype))
    back = torch_checkpoint.load(save_bytes([array]))[0]
    assert back.dtype == dtype
    assert_same_bits(back, bits(mx.contiguous(array)))


def test_numpy_arrays():
    torch = pytest.importorskip("torch")
    arrays = {
        "f8": np.linspace(0, 1, 5),
        "c16": np.array([1 + 2j]),
        "big-endian": np.arange(5, dtype=">i4"),
        "strided": np.arange(12).reshape(3, 4)[:, ::2],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "bool": np.array([True, False]),
        "0-d": np.array(3, np.uint16),
    }
    data = save_bytes(arrays)
    for name, tensor in torch.load(io.BytesIO(data), weights_only=True).items():
        assert np.array_equal(tensor.numpy(), arrays[name]), name
        assert tensor.numpy().dtype == arrays[name].dtype.newbyteorder("="), name


def test_beyond_4_gib_the_headers_are_pytorchs(tmp_path):
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = [40, 5 * 2**30, 400, 2**32 - 1, 12]
    with FakeTensorMode():
        obj = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    path = tmp_path / "sparse.pt"
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(obj, path)

    directory = b""
    end = 0
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            name, size, start = info.filename.encode(), info.file_size, end
            assert info.header_offset == start
            for written in (
                zip_writer.local_header(name, size, start),
                None,  # the data
                zip_writer.sizes_after(size, start, info.CRC),
            ):
                file.seek(end)
                assert written is None or file.read(len(written)) == written
                end += size if written is None else len(written)
            directory += zip_writer.directory_entry(name, size, start, info.CRC)
        assert end > 9 * 2**30
        file.seek(end)
        count = len(archive.infolist())
        assert file.read() == directory + zip_writer.end_records(
            end, len(directory), count
        )


def test_anything_writable_will_do(tmp_path):
    obj = {"x": mx.arange(3)}
    with gzip.open(tmp_path / "x.pt.gz", "wb") as file:
        torch_checkpoint.save(file, obj)
    with gzip.open(tmp_path / "x.pt.gz", "rb") as file:
        assert torch_checkpoint.load(file.read())["x"].tolist() == [0, 1, 2]

    class Slow(io.RawIOBase):
        """Takes a few bytes at a time, as a pipe does."""

        data = b""

        def write(self, data):
            self.data += bytes(data[:7])
            return len(data[:7])

    slow = Slow()
    torch_checkpoint.save(slow, obj)
    assert slow.data == save_bytes(obj)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Point(1, 2), r"is a Point.*named tuple"),
        (nn.Linear(1, 1), r"is a Linear.*parameters"),
        (np.float32(1), r"numpy float32.*\.item\(\)"),
        (np.array(["x"]), r"array of <U1"),
        (np.array([object()]), r"array of object"),
        (frozenset({1}), "frozenset"),
        (defaultdict(list), "defaultdict"),
        (object(), "is a object"),
        (2 ** (8 * 255), "255 bytes"),
        ({(1, (2, 3)): 1}, r"member is of type tuple"),
        ({frozenset(): 1}, r"member is of type frozenset"),
        (mx.float16, "is a Dtype"),
        (len, "is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value, says, tmp_path):
    path = tmp_path / "x.pt"
    with pytest.raises(TypeError, match=r"obj\['state'\]\[1\].*" + says):
        torch_checkpoint.save(path, {"state": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_cycles_and_deep_nesting_are_refused():
    cycle = []
    cycle.append({"again": cycle})
    with pytest.raises(TypeError, match=r"obj\[0\]\['again'\] contains itself"):
        save_bytes(cycle)
    deep = []
    for _ in range(127):
        deep = [deep]
    assert torch_checkpoint.load(save_bytes(deep)) == deep
    with pytest.raises(TypeError, match="nested over 128 deep"):
        save_bytes([deep])


def test_swapped_arguments_are_explained():
    with pytest.raises(TypeError, match="takes a path"):
        torch_checkpoint.save({"x": 1}, "x.pt")


def test_state_dict_metadata_comes_back():
    torch = pytest.importorskip("torch")
    model = torch.nn.BatchNorm1d(2)
    loaded = torch_checkpoint.load(torch_bytes(model.state_dict()))
    data = save_bytes(loaded)
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert back._metadata == model.state_dict()._metadata
    model.load_state_dict(back, strict=True)
    loaded.note = "x"
    with pytest.raises(TypeError, match="attributes besides _metadata"):
        save_bytes(loaded)
