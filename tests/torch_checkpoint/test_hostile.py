"""Files that are damaged or hostile raise a ``CheckpointError``."""

import copy
import gzip
import itertools
import pickle
import pickletools
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import (
    CheckpointError,
    Placeholder,
    plain_value,
    unpickler,
)
from tests.support.torch_files import (
    GOLDEN,
    bits,
    integer,
    legacy,
    name,
    pack,
    pickled,
    records,
    save_bytes,
    storage,
    tensor,
    text,
)

ZIP = (GOLDEN / "zip.pt").read_bytes()
LEGACY = (GOLDEN / "legacy.pt").read_bytes()


def refused(data: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        torch_checkpoint.load(data)


# The pickle.


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "builtins.eval", "__builtin__.exec", "builtins.getattr"),
        *("torch.load", "torch.nn.modules.linear.Linear", "torch._utils.__globals__"),
        *("numpy._core.multiarray._reconstruct", "functools.partial"),
        "mlx_gradscale.torch_checkpoint.save",
    ],
)
def test_unknown_names_become_placeholders_and_are_never_called(path):
    module, _, attribute = path.rpartition(".")
    shown = path.replace("__builtin__", "builtins")
    stacked = text(module) + text(attribute) + b"\x93"
    for named in (name(module, attribute), stacked):
        assert torch_checkpoint.load(pickled(named)).path == shown
        called = torch_checkpoint.load(pickled(named + b")R"))
        assert type(called) is Placeholder
        assert (called.path, called.args) == (shown, ())
        refused(pickled(named + b"NR"), "calls Placeholder with NoneType")


def test_storage_of_an_unknown_function_is_kept_for_the_way_back():
    data = pickled(name("torch._utils", "_rebuild_qtensor") + storage() + b"\x85R")
    found = torch_checkpoint.load(data)
    assert found.path == "torch._utils._rebuild_qtensor"
    assert records(save_bytes(found))["data/0"] == bytes(16)


def test_strings_that_are_too_long_or_not_printable_are_no_names():
    for long in (
        text("x") + text("a\x1bb") + b"\x93",
        text("x" * 999) + text("y") + b"\x93",
        text("x") + text("y" * 999) + b"\x93",
        name("builtins", "getattr") + Y + text("z" * 998) + b"\x86R",
    ):
        refused(pickled(long), "not a class or function")


@pytest.mark.parametrize("protocol", range(6))
def test_loading_a_hostile_pickle_runs_no_code(tmp_path, protocol):
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return Path.touch, (marker,)

    evil = pickle.dumps({"x": Evil()}, protocol=protocol)
    with suppress(CheckpointError):  # protocol 0 makes dicts in another way
        found = torch_checkpoint.load(pack({"data.pkl": evil}))["x"]
        assert found.path == "pathlib.Path.touch"
        assert isinstance(plain_value(found), Placeholder)
        str(found), repr(found), copy.copy(found)
        torch_checkpoint.load(save_bytes(found))
    assert not marker.exists()
    pickle.loads(evil)  # it would have
    assert marker.exists()


def test_unsupported_opcodes_are_refused():
    codes = {ord(op.code) for op in pickletools.opcodes}
    assert codes - set(unpickler._ACTIONS) == set(unpickler._REFUSED)
    for code in unpickler._REFUSED:
        refused(pickled(bytes([code])), "not an instruction")
    refused(pickled(b"\xff"), r"b'\\xff' is not an instruction")


ENCODE, ORDERED = name("_codecs", "encode"), name("collections", "OrderedDict")
Y = name("x", "Y")


@pytest.mark.parametrize(
    ("opcodes", "says"),
    [
        (b"", "damaged or cut off"),
        (b"t", "damaged or cut off"),
        (b"K\x01\x86", "damaged or cut off"),
        (b"a", "damaged or cut off"),
        (b"0", "damaged or cut off"),
        (b"NNa", "type NoneType"),
        (b"N(NNu", "type NoneType"),
        (b"N(N\x90", "type NoneType"),
        (b"}(Nu", "damaged or cut off"),
        (b"}]Ns", "key or set member has type list"),
        (b"}}" + text("x") + b"NsbN", "type dict"),
        (Y + b"Nb", "type Placeholder"),
        (b"h\x05", "index 5"),
        (b"Nq\x05h\x03", "index 3"),
        (b"X\xff\xff\xff\x7f", "cut off"),
        (b"\x8d" + b"\xff" * 8, "cut off"),
        (b"J\x01", "cut off"),
        (b"X\x01\x00\x00\x00\xff", "utf-8"),
        (b"\x95\xff", "cut off"),
        (b"\x80\x06", "protocol: 6"),
        (b"c" + b"x" * 2000 + b"\n", "not a class or function"),
        (b"NQ", "is not a storage"),
        (b"NNR", "calls NoneType"),
        (Y + b"N\x81", "with NoneType"),
        (ORDERED + b"NR", "with NoneType"),
        (ENCODE + text("x") + text("rot13") + b"\x86R", "is not Latin-1"),
        (ENCODE + text("€") + text("latin1") + b"\x86R", "latin-1"),
        (name("__builtin__", "set") + b"](]e\x85R", "set member has type list"),
        (ORDERED + b")R}" + text("items") + b"Nsb", "type OrderedDict"),
        (b"N" + b"\x85" * 2000, "nested too deeply"),
    ],
)
def test_malformed_pickles_are_refused(opcodes, says):
    refused(pickled(opcodes), says)


@pytest.mark.parametrize(
    "call",
    [
        name("torch._utils", "_rebuild_tensor_v2") + b")R",
        tensor(of=b"N"),
        name("__builtin__", "complex") + b"G" + bytes(8) + b"N\x86R",
        name("__builtin__", "bytearray") + integer(2**62) + b"\x85R",
        name("collections", "Counter") + b"]\x85R",
        name("__builtin__", "set") + b"]]\x86R",
        name("__builtin__", "set") + b")\x81",
        name("__builtin__", "getattr") + Y + b")R" + text("x") + b"\x86R",
    ],
)
def test_known_functions_are_not_called_with_other_arguments(call):
    found = torch_checkpoint.load(pickled(call))
    assert type(found) is Placeholder
    assert found.args is not None


def test_pickle_protocols_and_frames_that_python_writes_are_read():
    for protocol in (2, 3, 4, 5):
        data = pack({"data.pkl": bytes([0x80, protocol]) + b"N."})
        assert torch_checkpoint.load(data) is None
    frame = b"\x80\x04\x95" + (2).to_bytes(8, "little") + b"N."
    assert torch_checkpoint.load(pack({"data.pkl": frame})) is None
    assert torch_checkpoint.load(pickled(b"K\x07q\x05h\x05\x86")) == (7, 7)
    # Number 0 is taken, so MEMOIZE takes 1.
    assert torch_checkpoint.load(pickled(b"K\x07q\x00K\x08\x94h\x01\x87")) == (7, 8, 8)
    long = b"\x8b" + (300).to_bytes(4, "little") + b"\x01" * 300
    assert torch_checkpoint.load(pickled(long)).bit_length() == 2393
    texts_of_python_2 = pickled(b"}(U\x01aK\x01T\x01\x00\x00\x00bK\x02u")
    assert torch_checkpoint.load(texts_of_python_2) == {"a": 1, "b": 2}
    assert torch_checkpoint.load(pickled(tensor(metadata=b"}"))).size == 4


# Tensors.


@pytest.mark.parametrize(
    ("pickle", "says"),
    [
        (tensor(offset=1), "outside its storage of 4"),
        (tensor(offset=-1), "are invalid"),
        (tensor(shape=(5,)), "outside its storage"),
        (tensor(shape=(-4,)), "are invalid"),
        (tensor(strides=(-1,)), "are invalid"),
        (tensor(shape=(2, 2), strides=(3, 1)), "outside its storage"),
        (tensor(shape=(2,), strides=(2**62,)), "outside its storage"),
        (tensor(shape=(2, 2), strides=(1,)), "damaged or cut off"),
        (tensor(shape=(1,) * 33, strides=(1,) * 33), "are invalid"),
        (tensor(shape=(2**31,), strides=(0,)), "are invalid"),
        (tensor(shape=(2,), strides=(2**63,)), "are invalid"),
        (tensor(shape=(2**31 - 1,) * 3, strides=(0,) * 3), "more than 4 times"),
        (tensor(shape=(2**30, 2**10), strides=(0, 0)), "more than 4 times"),
        (tensor(of=storage(numel=5)), "has 16 bytes, not 20"),
        (tensor(of=storage(numel=2**62)), "has 16 bytes, not"),
        (tensor(of=storage(numel=-4)), "unknown type"),
        (tensor(of=storage(key="1")), "is missing"),
        (tensor(of=storage(key="../../etc/passwd")), "is missing"),
        (tensor(of=storage(kind="Size")), "unknown type"),
        (tensor(of=storage(kind="QInt8Storage")), r"QInt8Storage.*\.dequantize\(\)"),
        (tensor(of=b"(" + text("module") + b"tQ"), "whole model"),
        (tensor(of=storage(numel=16, kind="UntypedStorage")), "are invalid"),
        (tensor(metadata=name("torch", "x" * 41)), "are invalid"),
        (tensor(metadata=b"}" + text("neg") + b"\x88s"), r"\.resolve_neg\(\)"),
        (
            b"(" + tensor() + tensor(of=storage(kind="IntStorage")) + b"t",
            "has two types",
        ),
    ],
)
def test_impossible_tensors_are_refused(pickle, says):
    refused(pickled(pickle), says)


ONE = tensor()
SCALAR = name("numpy._core.multiarray", "scalar")


@pytest.mark.parametrize(
    "pickle",
    [
        tensor(metadata=ONE),
        b"}" + ONE + b"Ns",
        ONE + ONE + b"\x93",
        name("torch", "device") + ONE + b"\x85R",
        name("__builtin__", "bytearray") + text("a") + ONE + b"\x86R",
        ORDERED + b")R" + ONE + b"b",
        name("torch._utils", "_rebuild_parameter") + ONE + ONE + b"\x86R",
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + ONE * 7 + b"tR",
        name("torch._tensor", "_rebuild_from_type_v2") + b"(" + ONE * 4 + b"tR",
        name("numpy._core.numeric", "_frombuffer") + b"(" + ONE * 4 + b"tR",
        SCALAR
        + (name("numpy", "dtype") + text("f8") + b"\x85R(K\x03" + ONE + b"tb")
        + b"C\x08abcdefgh\x86R",
    ],
)
def test_tensor_in_any_position_loads_or_raises_checkpoint_error(pickle):
    # Comparing an array with text or None is an error in MLX, or gives an array.
    with suppress(CheckpointError):
        found = torch_checkpoint.load(pickled(pickle))
        plain_value(found)
        save_bytes(found)


def test_bool_bytes_other_than_0_are_true():
    data = b"\x80\x02" + tensor(of=storage(kind="BoolStorage")) + b"."
    found = torch_checkpoint.load(pack({"data.pkl": data, "data/0": b"\0\1\2\1"}))
    assert bits(found).tobytes() == b"\0\1\1\1"


def test_tensor_with_attributes_requires_a_known_function_and_class():
    plain = name("torch._utils", "_rebuild_tensor_v2")
    itself = name("torch._tensor", "_rebuild_from_type_v2")
    own, theirs = name("torch", "Tensor"), name("x", "TheirTensor")
    arguments = tensor()[len(plain) : -1]

    def made(function: bytes, kind: bytes) -> bytes:
        return pickled(itself + b"(" + function + kind + arguments + b"}tR")

    assert torch_checkpoint.load(made(plain, own)).tolist() == [0, 0, 0, 0]
    for function, kind in ((itself, own), (own, own), (theirs, own), (plain, theirs)):
        refused(made(function, kind), "unknown class")
    for function, kind in ((b"N", own), (plain, text("torch.Tensor"))):
        assert type(torch_checkpoint.load(made(function, kind))) is Placeholder
    wrapper = name("torch._utils", "_rebuild_wrapper_subclass")
    refused(made(wrapper, theirs), r"state_dict\.get_state_dict\(")


# The zip file.


def test_every_truncated_file_is_an_error():
    for data in (ZIP, LEGACY):
        for size in [*range(0, len(data), 97), len(data) - 1]:
            with pytest.raises(CheckpointError):
                torch_checkpoint.load(data[:size])


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (16, "<L", 1),  # checksum
        (24, "<L", 2**31),  # size
        (42, "<L", 2**31),  # place of the header
        (42, "<L", 1),
        (8, "<H", 1),  # encrypted
        (10, "<H", 8),  # compressed
    ],
)
def test_wrong_zip_directory_entries_are_refused(at, form, value):
    data = bytearray(pack({"data.pkl": b"\x80\x02N."}))
    struct.pack_into(form, data, data.index(b"PK\x01\x02") + at, value)
    with pytest.raises(CheckpointError):
        torch_checkpoint.load(bytes(data))


def test_records_before_the_start_of_the_file_are_refused(tmp_path):
    data = bytearray(pickled(tensor()))
    end = data.rindex(b"PK\x05\x06") + 16
    at = int.from_bytes(data[end : end + 4], "little")
    # zipfile takes the difference for data in front of the archive.
    data[end : end + 4] = (at + len(data)).to_bytes(4, "little")
    (tmp_path / "x.pt").write_bytes(data)
    for file in (bytes(data), tmp_path / "x.pt"):
        refused(file, "a record is damaged")


def test_errors_contain_no_terminal_control_characters():
    key = "\x1b[2J" + "é" * 50
    pickle = b"\x80\x02" + tensor(of=storage(key=key)) + b"."
    data = pack({"data.pkl": pickle, f"data/{key}": bytes(16)})
    assert torch_checkpoint.load(data).size == 4
    at = data.rindex(b"PK\x01\x02") + 10
    with pytest.raises(CheckpointError, match="compressed") as caught:
        torch_checkpoint.load(data[:at] + b"\x08" + data[at + 1 :])
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a file"),
        (b"hello", "not a file"),
        (gzip.compress(b"x", mtime=0), "not a file"),
        (pack({"readme.txt": b"x"}), r"'data\.pkl' is missing"),
        (pack({"data.pkl": b"\x80\x02N.", "byteorder": b"big"}), "big-endian"),
        (b"\x80\x02K\x07.", "did not write"),
        (b"\x80\x02K\x07.\x80\x02K\x07.", "did not write"),
    ],
    ids=itertools.count(),  # not the bytes: a zip file has the time in it
)
def test_files_of_other_kinds_are_refused_with_an_explanation(data, says):
    refused(data, says)


# Legacy files.


def one_storage(key: str, *, numel: int = 4, keys: list[str] | None = None) -> bytes:
    data = struct.pack("<q", numel) + bytes(16)
    return legacy(tensor(of=storage(key=key)), [key] if keys is None else keys, data)


def test_inconsistent_legacy_files_are_refused():
    assert torch_checkpoint.load(one_storage("94")).tolist() == [0.0] * 4
    refused(one_storage("94", numel=5), "storage has the wrong size")
    refused(one_storage("94", keys=["95"]), "storages do not match")
    refused(one_storage("94", keys=["94", "94"]), "storages do not match")
    refused(one_storage("94")[:-1], "storage has the wrong size")
    refused(LEGACY + b"x", "after the last storage")
    refused(
        LEGACY[:15].replace(b"\x6c\xfc", b"\x6d\xfc") + LEGACY[15:], "did not write"
    )
