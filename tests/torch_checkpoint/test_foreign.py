"""Objects of other programs' classes: kept as data, and written back as they were."""

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import io
import pathlib
import sys
import types

import numpy as np
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError, Placeholder, plain_value
from tests.support.torch_files import (
    name,
    pickled,
    records,
    save_bytes,
    text,
    torch_bytes,
)

torch = pytest.importorskip("torch")


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclasses.dataclass
class Config:
    width: int = 8
    name: str = "net"

    @dataclasses.dataclass
    class Inner:
        depth: int = 2


class Numbers(list):
    pass


class Table(dict):
    pass


Point = collections.namedtuple("Point", "x y")
NUMBERS = Numbers([1, 2])
NUMBERS.unit = "m"
OBJECTS = {
    "Namespace": argparse.Namespace(lr=0.1, out=pathlib.Path("/a/b"), big=2**100),
    "long Namespace": argparse.Namespace(**{f"k{i}": i for i in range(2500)}),
    "SimpleNamespace": types.SimpleNamespace(a=(1, 2)),
    "dataclass": Config(3, "x"),
    "inner class": Config.Inner(5),
    "partial": functools.partial(Config, width=3),
    "path": pathlib.Path("a/b.txt"),
    "windows": pathlib.PureWindowsPath("C:/a"),
    "float64": np.float64(0.1),
    "int64": np.int64(-3),
    "bool": np.bool_(True),
    "complex": np.complex64(1 + 2j),
    "array": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">f4"),
    "texts": np.array(["a", "bc"]),
    "empty": np.zeros((0, 2)),
    "object array": np.array([1, "x", None], dtype=object),
    "records": np.zeros(2, dtype=[("left", "f4"), ("right", "i8")]),
    "numpy rng": np.random.default_rng(0).bit_generator.state,
    "enum": Color.RED,
    "enums": [Color.BLUE, Color.RED, Color.BLUE],
    "datetime": datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone.utc),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "defaultdict of None": collections.defaultdict(None, {i: i for i in range(1001)}),
    "deque": collections.deque([1, 2], 3),
    "list with attributes": NUMBERS,
    "dict of its own": Table(a=1, b=[2]),
    "named tuple": Point(1, 2),
    "class": Config.Inner,
    "function": max,
    "dtype": [torch.float16, torch.bfloat16, torch.float16],
    "device": [torch.device("cuda", 1), torch.device("cpu")],
    "Size": torch.Size([2, 3]),
    "method": Config(3).__eq__,
    "keys": {Color.RED: 1, np.int64(3): 2, pathlib.Path("a"): 3, (Color.BLUE, 1): 4},
    "frozenset": argparse.Namespace(kinds=frozenset({1})),
}


def same(actual, expected) -> bool:
    if isinstance(expected, np.ndarray):
        return actual.dtype == expected.dtype and np.array_equal(actual, expected)
    if isinstance(expected, functools.partial):
        return actual.func is expected.func and actual.keywords == expected.keywords
    if isinstance(expected, types.MethodType):
        return actual.__self__ == expected.__self__
    if isinstance(expected, (list, tuple)):
        return all(map(same, actual, expected)) and len(actual) == len(expected)
    return actual == expected


def read_by_torch(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("kind", OBJECTS)
def test_foreign_objects_survive_a_round_trip_to_pytorch(kind):
    for protocol in (2, 4, 5):
        data = torch_bytes({"x": OBJECTS[kind]}, pickle_protocol=protocol)
        back = save_bytes(torch_checkpoint.load(data))
        found = read_by_torch(back)["x"]
        assert type(found) is type(OBJECTS[kind])
        # Not the object itself: numpy turns the bytes of a big-endian array around.
        assert same(found, read_by_torch(data)["x"])
        # torch.save's own protocol. Empty bytes are written otherwise.
        if protocol == 2 and kind != "empty":
            assert records(back)["data.pkl"] == records(data)["data.pkl"]


PLAIN = {"float64": 0.1, "int64": -3, "bool": True, "complex": 1 + 2j}
PLAIN |= {"SimpleNamespace": {"a": (1, 2)}, "defaultdict": {"a": [1]}, "Size": (2, 3)}
SHOWN = {
    "enum": f"{__name__}.Color(1)",
    "dataclass": f"{__name__}.Config(width=3, name='x')",
    "inner class": f"{__name__}.Config.Inner(depth=5)",
    "class": f"{__name__}.Config.Inner",
    "function": "builtins.max",
    "path": "pathlib.PosixPath('a', 'b.txt')",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_object_of_a_known_class_becomes_a_plain_value(kind):
    found = plain_value(torch_checkpoint.load(torch_bytes(OBJECTS[kind])))
    assert found == PLAIN[kind]
    assert isinstance(found, type(PLAIN[kind]))


@pytest.mark.parametrize("kind", SHOWN)
def test_object_of_an_unknown_class_stays_a_placeholder_with_its_name(kind):
    found = torch_checkpoint.load(torch_bytes(OBJECTS[kind]))
    assert str(found) == SHOWN[kind]
    assert plain_value(found) is found


def test_objects_that_refer_to_themselves_survive_a_round_trip():
    args = argparse.Namespace()
    args.itself, args.many = args, [args, {"x": args}]
    outer = {"x": torch.ones(2), "args": args}
    outer["items"] = [outer, (outer,)]
    args.outer = outer
    data = torch_bytes(outer)
    loaded = torch_checkpoint.load(data)
    found = loaded["args"]
    assert found.state["many"][0] is found
    assert found.state["outer"] is loaded["items"][1][0] is loaded
    assert len(str(found)) < 300
    assert records(save_bytes(loaded))["data.pkl"] == records(data)["data.pkl"]


def test_loading_foreign_objects_imports_no_module():
    before = set(sys.modules)
    data = pickled(name("antigravity", "X") + b")R" + text("y") + b"b")
    found = torch_checkpoint.load(data)
    str(found), plain_value(found), copy.deepcopy(found)
    save_bytes(found)
    assert set(sys.modules) - before <= {"copy"}


def test_placeholders_with_equal_names_are_equal_dict_keys():
    one, two = name("x", "Y") + b"K\x01", name("x", "Y") + b"K\x02"
    found = torch_checkpoint.load(pickled(b"}(" + one + two + b"u"))
    assert list(found.values()) == [2]
    assert save_bytes(found).count(b"cx\nY\n") == 1
    # A nested class is not confused with a class of a module.
    both = [Placeholder("a", "b.C"), Placeholder("a.b", "C")]
    back = torch_checkpoint.load(save_bytes(both))
    assert [(x.module, x.name) for x in back] == [("a", "b.C"), ("a.b", "C")]


# Files that lie.


SCALAR = name("numpy._core.multiarray", "scalar")
DTYPE = name("numpy", "dtype")
FLOAT = DTYPE + text("f8") + b"\x89\x88\x87R"
ORDER = b"(K\x03" + text("<") + b"tb"


@pytest.mark.parametrize(
    "pickle",
    [
        SCALAR + b")R",
        SCALAR + FLOAT + b"C\x02ab\x86R",
        SCALAR + FLOAT + ORDER + b"C\x02ab\x86R",
        SCALAR + DTYPE + text("O8") + b"\x85RC\x08abcdefgh\x86R",
        SCALAR + DTYPE + text("f99") + b"\x85RC\x63" + bytes(99) + b"\x86R",
        name("argparse", "Namespace") + b")RK\x01b",
    ],
)
def test_pickle_that_its_class_would_not_write_stays_a_placeholder(pickle):
    found = torch_checkpoint.load(pickled(pickle))
    assert isinstance(found, Placeholder)
    assert plain_value(found) is found


def test_names_cannot_contain_pickle_instructions():
    for module, attribute in (("os\nsystem\n(", "x"), ("a", "b\nc")):
        with pytest.raises(CheckpointError, match="not a class or function name"):
            Placeholder(module, attribute)
