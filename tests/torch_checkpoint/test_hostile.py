"""Every way a file can lie is met with a ``CheckpointError``, soon and in bounds."""

import copy
import pickle
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest
from tests.support.torch_files import (
    GOLDEN,
    integer,
    name,
    pack,
    pickled,
    records,
    storage,
    tensor,
    text,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import (
    CheckpointError,
    Limits,
    Placeholder,
    plain_value,
)

ZIP = (GOLDEN / "zip.pt").read_bytes()
LEGACY = (GOLDEN / "legacy.pt").read_bytes()


def refused(data: bytes, says: str, **options) -> None:
    with pytest.raises(CheckpointError, match=says):
        torch_checkpoint.load(data, **options)


# The pickle.


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "posix.system",
        "builtins.eval",
        "__builtin__.exec",
        "builtins.getattr",
        "builtins.__import__",
        "subprocess.Popen",
        "torch.load",
        "torch.hub.load",
        "torch.nn.modules.linear.Linear",
        "numpy._core.multiarray._reconstruct",
        "mlx_gradscale.torch_checkpoint.save",
        "functools.partial",
        "torch._utils.__globals__",
    ],
)
def test_names_outside_the_table_are_kept_and_not_used(path):
    module, _, attribute = path.rpartition(".")
    shown = path.replace("__builtin__", "builtins")
    stacked = text(module) + text(attribute) + b"\x93"
    for named in (name(module, attribute), stacked):
        assert torch_checkpoint.load(pickled(named)).path == shown
        called = torch_checkpoint.load(pickled(named + b")R"))
        assert type(called) is Placeholder
        assert (called.path, called.args) == (shown, ())
        refused(pickled(named + b"NR"), "makes an object")


@pytest.mark.parametrize(
    "path",
    [
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_of_tomorrow",
        "torch.QInt8Storage",
        "torch.cuda.FloatStorage",
        "torch._utils._rebuild_tensor_v2.__globals__",
    ],
)
def test_names_that_stand_for_tensors_are_refused_by_name(path):
    module, _, attribute = path.rpartition(".")
    refused(pickled(name(module, attribute) + b")R"), path.replace(".", r"\."))


@pytest.mark.parametrize("path", [("", "x"), ("x", ""), ("x", "y..z"), ("x", "a\x1bb")])
def test_names_that_are_none(path):
    refused(pickled(text(path[0]) + text(path[1]) + b"\x93"), "is no name")
    refused(pickled(text("x" * 2000) + text("y") + b"\x93"), "is no name")


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(tmp_path, protocol):
    marker = tmp_path / "executed"
    evil = pickle.dumps({"x": _Evil(marker)}, protocol=protocol)
    with suppress(CheckpointError):  # protocols 0 and 1 are not read
        found = torch_checkpoint.load(pack({"data.pkl": evil}))["x"]
        assert found.path == "pathlib.Path.touch"
        assert isinstance(plain_value(found), Placeholder)
        str(found), repr(found), copy.copy(found)
        torch_checkpoint.load(save_bytes(found))
    assert not marker.exists()
    pickle.loads(evil)  # it would have
    assert marker.exists()


def test_opcodes_outside_the_table_are_refused_by_name():
    import pickletools

    from mlx_gradscale.torch_checkpoint.pickle_opcodes import STEPS

    refused_names = {
        op.name for op in pickletools.opcodes if op.code not in map(chr, STEPS)
    }
    assert refused_names == {
        *("INT", "LONG", "LONG4", "FLOAT", "STRING", "UNICODE"),
        *("LIST", "DICT", "DUP", "PUT", "GET"),
        *("EXT1", "EXT2", "EXT4", "OBJ", "INST"),
        *("PERSID", "NEXT_BUFFER", "READONLY_BUFFER", "STOP"),
    }
    for op in pickletools.opcodes:
        if op.name in refused_names - {"STOP"}:
            refused(pickled(op.code.encode("latin1")), f"opcode {op.name} ")
    refused(pickled(b"\xff"), "opcode 0xff")


@pytest.mark.parametrize(
    ("opcodes", "says"),
    [
        (b"", "stops in the middle"),
        (b"NN", "stops in the middle"),
        (b"(N", "stops in the middle"),
        (b"t", "empty stack"),
        (b"K\x01\x86", "empty stack"),
        (b"(\x85", "empty stack"),
        (b"q\x00", "empty stack"),
        (b"a", "empty stack"),
        (b"NNa", "appends to a NoneType"),
        (b"}NNse", "empty stack"),
        (b"N(NNu", "sets items of a NoneType"),
        (b"}(Nu", "sets items of a dict"),
        (b"}]Ns", "key or set member is of type list"),
        (b"N(N\x90", "adds to a NoneType"),
        (b"h\x05", "refers to object 5"),
        (b"X\xff\xff\xff\x7f", "cut off"),
        (b"\x8d" + b"\xff" * 8, "cut off"),
        (b"X\x01\x00\x00\x00\xff", "UTF-8"),
        (b"\x95" + b"\xff" * 8, "cut off"),
        (b"\x80\x06", "protocol 6"),
        (b"\x80\x00", "protocol 0"),
        (b"cno newline", "does not end"),
        (b"c" + b"x" * 2000 + b"\n", "does not end"),
        (b"NQ", "other than a storage"),
        (b"NNR", "calls NoneType"),
        (name("torch", "FloatStorage") + b")R", r"calls torch\.FloatStorage"),
        (name("collections", "OrderedDict") + b"NR", "calls collections"),
        (name("torch", "Size") + b"K\x01\x85R", r"torch\.Size with arguments"),
        (name("torch._utils", "_rebuild_tensor_v2") + b")R", "with 0 arguments"),
        (name("__builtin__", "complex") + b"(NNtR", "other types"),
        (name("__builtin__", "complex") + b"G" + bytes(8) + b"N\x86R", "other types"),
        (name("__builtin__", "complex") + b"NG" + bytes(8) + b"\x86R", "other types"),
        (
            name("_codecs", "encode") + text("x") + text("rot13") + b"\x86R",
            "other types",
        ),
        (
            name("_codecs", "encode") + text("€") + text("latin1") + b"\x86R",
            "beyond 255",
        ),
        (name("__builtin__", "set") + b"N\x85R", "not a list"),
        (name("__builtin__", "bytearray") + integer(2**62) + b"\x85R", "other types"),
        (b"0", "empty stack"),
        (b"1", "empty stack"),
        (b"N)\x81", "makes an object of a NoneType"),
        (name("torch", "Tensor") + b")\x81", "makes an object of a Name"),
        (name("x", "Y") + b"N\x81", "makes an object"),
        (name("x", "Y") + b")N\x92", "makes an object"),
        (name("x", "Y") + b")R(NNNu", "sets items of a Placeholder"),
        (name("collections", "defaultdict") + b"K\x01\x85R", "other types"),
        (name("torch", "device") + text("a:b") + b"\x85R", "other types"),
        (storage(), "bare storage"),
        (b"}}" + text("x") + b"NsbN", "state of a dict"),
        (
            name("collections", "OrderedDict") + b")R}" + text("items") + b"Nsb",
            "attributes other than _metadata",
        ),
    ],
)
def test_senseless_pickles(opcodes, says):
    refused(pickled(opcodes), says)


def test_cycles_are_refused():
    refused(pickled(b"]q\x00h\x00a"), r"\[0\].*contains itself")
    refused(pickled(b"}q\x00" + text("x") + b"h\x00s"), r"\['x'\].*contains itself")
    refused(pickled(b"]q\x00h\x00\x85a"), "contains itself")
    metadata = b")Rq\x00}" + text("_metadata") + b"h\x00sb"
    refused(pickled(name("collections", "OrderedDict") + metadata), "contains itself")


def test_limits_hold():
    refused(pickled(b"N" + b"\x85" * 129), "nested over 128")
    assert torch_checkpoint.load(pickled(b"N" + b"\x85" * 128))
    lists = pickled(b"]" * 100 + b"a" * 99)
    refused(lists, "more than 150 operations", limits=Limits(operations=150))
    refused(lists, "more than 5000 bytes of memory", limits=Limits(memory=5000))
    long = pickled(b"N" + b"q\x00" * 100)
    refused(long, r"data\.pkl has 204 bytes", limits=Limits(pickle_bytes=200))
    refused(long, "directory has 122 bytes", limits=Limits(pickle_bytes=100))
    refused(ZIP, "more than 3 records", limits=Limits(records=3))


def test_a_shared_container_counts_where_it_is_deepest():
    inner = b"K\x01" + b"\x85" * 100 + b"q\x00"
    outer = b"h\x00" + b"\x85" * 100
    refused(pickled(inner + outer + b"\x86"), "nested over 128")


def test_doubling_references_are_refused():
    # Forty lists, each the previous one twice: 2**40 values for whoever walks it.
    laughs = b"]q\x00" + b"".join(
        b"(h" + bytes([i]) + b"h" + bytes([i]) + b"tq" + bytes([i + 1])
        for i in range(40)
    )
    refused(pickled(b"(" + laughs + b"t"), "when what is shared is written out")


# Tensors.


@pytest.mark.parametrize(
    ("pickle", "says"),
    [
        (tensor(offset=1), "outside its storage of 4"),
        (tensor(offset=2**62), "outside its storage"),
        (tensor(offset=-1), "do not fit"),
        (tensor(shape=(5,)), "outside its storage"),
        (tensor(shape=(-4,)), "not a tuple of sizes"),
        (tensor(strides=(-1,)), "not a tuple of sizes"),
        (tensor(shape=(2, 2), strides=(3, 1)), "outside its storage"),
        (tensor(shape=(2,), strides=(2**62,)), "outside its storage"),
        (tensor(shape=(2, 2), strides=(1,)), "do not fit"),
        (tensor(shape=(1,) * 65, strides=(1,) * 65), "more than 64 dimensions"),
        (tensor(shape=(2**31,), strides=(0,)), "beyond 2147483647"),
        (tensor(shape=(2**31 - 1,) * 3, strides=(0,) * 3), "overflows 64 bits"),
        (tensor(shape=(0,) + (2**31 - 1,) * 3, strides=(0,) * 4), "overflows 64 bits"),
        (tensor(shape=(2**30, 2**10), strides=(0, 0)), "four times its size"),
        (tensor(of=storage(numel=5)), "should have 5 elements"),
        (tensor(of=storage(numel=2**62)), "should have"),
        (tensor(of=storage(numel=-4)), "unknown way"),
        (tensor(of=storage(key="1")), "does not hold the tensor's data"),
        (tensor(of=storage(key="../../etc/passwd")), "does not hold"),
        (tensor(of=storage(key="0" * 65)), "unknown way"),
        (tensor(of=b"N"), "not a storage"),
        (
            b"(" + tensor() + tensor(of=storage(kind="IntStorage")) + b"t",
            r"\[1\].*used as torch.float32 and as torch.int32",
        ),
        (tensor(of=storage(kind="BoolStorage", numel=16), shape=(16,)), "_"),
    ],
)
def test_tensors_that_reach_outside(pickle, says):
    if says == "_":  # sixteen zeros are a fine bool tensor
        assert torch_checkpoint.load(pickled(pickle)).sum().item() == 0
    else:
        refused(pickled(pickle), says)


def test_bool_bytes_other_than_0_and_1():
    data = b"\x80\x02" + tensor(of=storage(kind="BoolStorage")) + b"."
    refused(pack({"data.pkl": data, "data/0": b"\x00\x01\x02\x01"}), "bool")


@pytest.mark.parametrize("bit", [b"\x89", b"N", b"K\x01"])
def test_metadata_that_pytorch_would_not_write(bit):
    # PyTorch takes {"neg": False} for negative: what is meant cannot be told.
    metadata = b"}" + text("neg") + bit + b"s"
    refused(pickled(tensor(metadata=metadata)), "metadata other than conj and neg")
    negative = torch_checkpoint.load(
        pickled(tensor(metadata=b"}" + text("neg") + b"\x88s"))
    )
    assert str(negative.tolist()) == "[-0.0, -0.0, -0.0, -0.0]"


def test_a_negative_bool_tensor():
    bools = storage(kind="BoolStorage", numel=16)
    pickle = tensor(of=bools, metadata=b"}" + text("neg") + b"\x88s")
    refused(pickled(pickle), "bool tensor is marked as negative")


def test_many_views_of_one_storage_are_bounded():
    # Each view is another one, so none is the same array twice.
    views = b"".join(
        tensor(shape=(2**20, 2**6 - i), strides=(0, 0)) for i in range(1, 40)
    )
    refused(pickled(b"(" + views + b"t"), "four times its size")
    within = torch_checkpoint.load(pickled(tensor(shape=(2**10,), strides=(0,))))
    assert within.shape == (2**10,)
    mx.eval(within + 1)


# The zip file.


def test_every_cut_is_an_error():
    for data in (ZIP, LEGACY):
        for size in [*range(0, len(data), 97), len(data) - 1]:
            with pytest.raises(CheckpointError):
                torch_checkpoint.load(data[:size])


def test_compressed_records_are_refused():
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N.")
        archive.writestr("x/data/0", bytes(1_000_000))
    refused(buffer.getvalue(), "compressed")


def directory_of(data: bytes) -> tuple[int, int]:
    """Where the central directory is, in a file without zip64."""
    end = data.rindex(b"PK\x05\x06")
    size, start = struct.unpack_from("<2L", data, end + 12)
    return start, size


def test_overlapping_records_are_refused():
    data = bytearray(pack({"data.pkl": b"\x80\x02N.", "a": b"AAAA", "b": b"BBBB"}))
    start, _ = directory_of(data)
    entries = [i for i in range(start, len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    # The data of "a" grows over the record "b".
    struct.pack_into("<2L", data, entries[1] + 20, 20, 20)
    refused(bytes(data), "overlap")


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (20, 2**31, "outside the file|overlap|compressed"),
        (24, 2**31, "compressed"),
        (42, 2**31, "outside the file"),
        (42, 1, "damaged header"),
        (28, 60000, "damaged"),
        (8, 1, "compressed or encrypted"),
        (10, 8, "compressed or encrypted"),
        (34, 1, "damaged"),
        (38, 0x10, "folder with data"),
    ],
)
def test_directory_entries_that_lie(at, value, says):
    data = bytearray(pack({"data.pkl": b"\x80\x02N."}))
    start, _ = directory_of(data)
    form = "<H" if at in (8, 10, 28, 34) else "<L"
    struct.pack_into(form, data, start + at, value)
    if at == 20:
        struct.pack_into(form, data, start + 24, value)
    refused(bytes(data), says)


def test_names_that_differ_or_repeat():
    data = pack({"data.pkl": b"\x80\x02N.", "data/0": b"x"})
    at = data.index(b"archive/data/0")
    refused(data[:at] + b"archive/data/1" + data[at + 14 :], "two names")
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = pack_twice()
    refused(twice, r"two records 'x/data\.pkl'\.")


def test_a_record_is_named_shortly_and_without_commands_to_a_terminal():
    data = pack({"data.pkl": b"\x80\x02N.", "\x1b[2J" + "é" * 100: b"x"})
    central = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    with pytest.raises(CheckpointError) as caught:
        torch_checkpoint.load(data[: central + 10] + b"\x08" + data[central + 11 :])
    said = str(caught.value)
    assert r"The record 'archive/\x1b[2J\xe9" in said
    assert said.isascii()
    assert said.isprintable()
    assert said.count(r"\xe9") < 80


def pack_twice() -> bytes:
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N.")
        archive.writestr("x/data.pkl", b"\x80\x02N.")
    return buffer.getvalue()


@pytest.mark.parametrize("count", [0, 1, 100, 2**16 - 1])
def test_directory_counts_that_lie(count):
    data = bytearray(pack({"data.pkl": b"\x80\x02N.", "data/0": b"x"}))
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<2H", data, end + 8, count, count)
    with pytest.raises(CheckpointError, match="directory"):
        torch_checkpoint.load(bytes(data))


def test_data_after_the_pickle_and_unknown_byte_orders():
    refused(pack({"data.pkl": b"\x80\x02N.N."}), "after the end")
    contents = {"data.pkl": b"\x80\x02N.", "byteorder": b"middle"}
    refused(pack(contents), "byte order b'middle'")
    refused(
        pack({**contents, "byteorder": b"x" * 17}), "byte order b'xxxxxxxxxxxxxxxx'"
    )


# Sequential files.


def test_sequential_files_that_lie():
    refused(LEGACY + b"x", "after the last storage")
    magic = LEGACY[:15]
    refused(magic.replace(b"\x6c\xfc", b"\x6d\xfc") + LEGACY[15:], "not a PyTorch")
    sizes = [
        i for i in range(len(LEGACY) - 8) if LEGACY[i : i + 8] == b"\x06" + bytes(7)
    ]
    grown = LEGACY[: sizes[0]] + b"\x07" + LEGACY[sizes[0] + 1 :]
    with pytest.raises(CheckpointError):
        torch_checkpoint.load(grown)


# Random bytes, and random bytes in the right places.


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_random_pickles(opcodes):
    with suppress(CheckpointError):
        torch_checkpoint.load(pack({"data.pkl": opcodes, "data/0": bytes(16)}))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04"]), st.binary())
def test_random_files(start, rest):
    with pytest.raises(CheckpointError):
        torch_checkpoint.load(start + rest)


def test_the_golden_pickle_itself_is_intact():
    # The cases above are refused for what they change, not for what they keep.
    assert "data.pkl" in records(ZIP)
    assert torch_checkpoint.load(pickled(tensor())).tolist() == [0.0] * 4
