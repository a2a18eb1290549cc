"""What ``save`` writes is what ``torch.save`` would, and PyTorch reads it back."""

import argparse
import dataclasses
import io
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError, tensors, writer
from tests.support.torch_files import (
    GOLDEN,
    assert_equals_torch,
    assert_same_bits,
    bits,
    nested_values,
    records,
    save_bytes,
    torch_bytes,
)

NAMES = "float32 float16 bfloat16 float64 complex64 bool_ uint8 int8 int16 int32 int64"
DTYPES = [getattr(mx, x) for x in f"{NAMES} uint16 uint32 uint64".split()]


def random_array(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(0, 100, shape)
    with mx.stream(mx.cpu):  # float64 exists only there
        return mx.array(values).astype(dtype)


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    return random_array(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))


@settings(deadline=None, max_examples=150)
@given(obj=nested_values(arrays()))
def test_pytorch_reads_saved_objects_unchanged(obj):
    torch = pytest.importorskip("torch")
    data = save_bytes(obj)
    assert_equals_torch(obj, torch.load(io.BytesIO(data), weights_only=True))


def test_objects_shared_by_identity_stay_shared():
    torch = pytest.importorskip("torch")
    w, group = mx.ones((1000,)), {"lr": 0.1}
    data = save_bytes({"a": w, "b": w, "c": [w], "g": [group, group]})
    assert [name for name in records(data) if name.startswith("data/")] == ["data/0"]
    back = torch.load(io.BytesIO(data), weights_only=True)
    assert back["a"].data_ptr() == back["b"].data_ptr() == back["c"][0].data_ptr()
    assert back["g"][0] is back["g"][1]
    ours = torch_checkpoint.load(data)
    assert ours["a"] is ours["b"] is ours["c"][0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.complex64, mx.uint8])
def test_views_and_lazy_arrays_are_saved_bit_identically(dtype):
    a = random_array((40, 30), dtype)
    made = [a.T, a[::2, 1::3], a[::-1], mx.broadcast_to(a[:1], a.shape), a[5:, 7]]
    for array in [*made, a + 1]:
        back = torch_checkpoint.load(save_bytes([array]))[0]
        assert back.dtype == dtype
        assert_same_bits(back, bits(mx.contiguous(array)))


def test_numpy_arrays_of_any_layout_are_saved_as_tensors():
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


def test_saved_pickle_equals_the_pickle_of_pytorch_byte_for_byte():
    torch = pytest.importorskip("torch")
    # Python's pickler writes dicts and lists of 1000 n or 1000 n + 1 items otherwise.
    counts = (0, 1, 2, 999, 1002, 2999)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    layer = torch.nn.Linear(2, 3)
    layer.bias.requires_grad_(False)
    obj = {
        "model": model.state_dict(),
        "object": argparse.Namespace(layer=layer, tied=layer.weight),
        "dtypes": [
            torch.ones(2, 3).to(dtype)
            for dtype in (torch.bfloat16, torch.uint16, torch.int64, torch.bool)
        ],
        "shapes": [torch.zeros(s) for s in ((), (0,), (3, 0, 2), (1, 2, 3, 4, 5))],
        "numbers": [0, -1, 255, 256, 65535, 65536, 2**31, -(2**39), 2**39, 10**700],
        "others": [1.5, True, None, "größe", b"\x00\xff", 2j, (1,), (1, 2, 3, 4)],
        "batches": [
            *(list(range(n)) for n in counts),
            *(dict.fromkeys(range(n)) for n in counts),
            *(OrderedDict.fromkeys(range(n)) for n in counts),
        ],
        "bytearray": [bytearray(b"abc"), bytearray()],
        "counter": Counter(["one", "two", "one"]),
        "sets": [{7}, frozenset({8})],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
    }
    theirs = torch_bytes(obj)
    ours = records(save_bytes(torch_checkpoint.shapes(theirs)))
    assert ours.items() >= {
        (key, data) for key, data in records(theirs).items() if key.startswith("data")
    }


def test_lazy_tensors_are_saved_with_their_dtypes_storages_and_strides():
    torch = pytest.importorskip("torch")
    base = torch.arange(12.0)
    obj = {
        "views": [base.view(3, 4).T, base[::2], base[3]],
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex128),
        "empty": torch.zeros(0, 3),
    }
    for is_zip in (True, False):
        theirs = torch_bytes(obj, _use_new_zipfile_serialization=is_zip)
        back = torch.load(io.BytesIO(save_bytes(torch_checkpoint.shapes(theirs))))
        assert back["views"][0].data_ptr() == back["views"][1].data_ptr()
        assert back["views"][0].stride() == (1, 4)
        assert back["views"][2] == 3
        assert back["float8"].dtype == torch.float8_e4m3fn
        assert torch.equal(back["float8"].float(), torch.ones(3))
        assert torch.equal(back["complex"], obj["complex"])


def test_tensor_whose_values_were_replaced_is_read_and_saved_with_its_flags():
    old = torch_checkpoint.shapes(save_bytes(mx.zeros((2,))))
    for array in (mx.arange(4) * 2, np.arange(0, 8, 2, dtype=np.float64)):
        new = dataclasses.replace(old, is_parameter=True).replace(array)
        assert new.read().tolist() == [0, 2, 4, 6]
        back = torch_checkpoint.shapes(save_bytes(new))
        assert back.read().tolist() == [0, 2, 4, 6]
        assert (back.is_parameter, back.dtype) == (True, new.dtype)


def test_records_are_stored_and_aligned_and_pytorch_maps_them(tmp_path):
    torch = pytest.importorskip("torch")
    obj = {"a": mx.arange(100_000), "empty": mx.zeros((0,)), "b": mx.ones((3,))}
    path = tmp_path / "x.pt"
    torch_checkpoint.save(path, obj)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.filename.startswith("x/")
            assert info.compress_type == zipfile.ZIP_STORED
            lengths = struct.unpack_from("<2H", data, info.header_offset + 26)
            assert (info.header_offset + 30 + sum(lengths)) % 64 == 0
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert mapped["a"][-1] == 99_999
    assert mapped["b"].tolist() == [1, 1, 1]


def test_record_of_one_gib_is_written_and_read(tmp_path):
    # The header is then 20 bytes longer, which alignment must count.
    torch = pytest.importorskip("torch")
    path = tmp_path / "big.pt"
    big = np.memmap(tmp_path / "zeros", np.uint8, "w+", shape=(2**10, 2**20))
    torch_checkpoint.save(path, [np.asarray(big), np.arange(3)])
    first, second = torch.load(path, mmap=True, weights_only=True)
    assert first.shape == (2**10, 2**20)
    assert second.tolist() == [0, 1, 2]
    assert torch_checkpoint.shapes(path)[0].shape == (2**10, 2**20)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Point(1, 2), "has type Point"),
        (nn.Linear(1, 1), "has type Linear"),
        (np.float32(1), r"float32.*\.item\(\)"),
        (defaultdict(list), "defaultdict"),
        (object(), "has type object"),
        (mx.float16, "has type Dtype"),
        (len, "has type builtin_function_or_method"),
        (np.array(["x"]), "ndarray of dtype <U1"),
        (np.array([object()]), "ndarray of dtype object"),
    ],
)
def test_error_names_the_path_of_a_value_that_cannot_be_saved(value, says, tmp_path):
    with pytest.raises(TypeError, match=r"obj\['state'\]\[1\].*" + says):
        torch_checkpoint.save(tmp_path / "x.pt", {"state": [0, value]})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"got dict\. Call save\(path, object\)"):
        torch_checkpoint.save({"x": 1}, "x.pt")


def test_save_refuses_objects_that_load_would_refuse():
    deep = []
    for _ in range(127):
        deep = [deep]
    assert torch_checkpoint.load(save_bytes(deep)) == deep
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        save_bytes(deep)
    for key in ((1, (2, 3)), frozenset(), np.int64(3)):
        with pytest.raises(CheckpointError, match="dict key or set member has type"):
            save_bytes({"x": {"y": 1}, "z": {key: 1}})


ALONE = """
import sys
sys.modules["mlx_gradscale"] = None
import copied
copied.save("a.pt", {"size": (2, 3)})
assert copied.load("a.pt")["size"] == (2, 3)
"""


def test_copy_of_the_package_works_in_another_project(tmp_path):
    shutil.copytree(Path(writer.__file__).parent, tmp_path / "copied")
    command = [sys.executable, "-W", "error", "-c", ALONE]
    ended = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert ended.stderr == ""


# A failed save leaves the old file, and nothing else, behind.


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_error_while_writing_leaves_the_old_file(tmp_path, error, monkeypatch):
    def fail_at_second(array):
        if array.nbytes == 8:
            raise error
        return bytes_of(array)

    path = tmp_path / "run.pt"
    path.write_bytes(b"old")
    bytes_of = tensors.bytes_of
    monkeypatch.setattr(tensors, "bytes_of", fail_at_second)
    with pytest.raises(error):
        torch_checkpoint.save(path, [mx.zeros((1,)), mx.zeros((2,))])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.pt"]


def test_damaged_tensor_that_is_copied_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.pt"
    torch_checkpoint.save(path, [mx.ones((1000,))])
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    tree = torch_checkpoint.shapes(path)
    with pytest.raises(CheckpointError, match="CRC-32"):
        torch_checkpoint.save(path, tree)
    assert path.read_bytes() == data


def test_file_that_was_cut_off_after_it_was_opened_leaves_the_old_file(tmp_path):
    original, path = tmp_path / "a.pt", tmp_path / "b.pt"
    original.write_bytes((GOLDEN / "legacy.pt").read_bytes())
    path.write_bytes(b"old")
    lazy = torch_checkpoint.shapes(original)
    os.truncate(original, original.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="became shorter"):
        torch_checkpoint.save(path, lazy)
    assert path.read_bytes() == b"old"


def test_file_is_synced_before_it_replaces_the_old_file(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def note(*args, name=name, real=real):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, note)
    torch_checkpoint.save(tmp_path / "x.pt", {"x": 1})
    assert calls == ["fsync", "replace", "fsync"]
