"""Write the golden ``.pt`` files with PyTorch; the tests read them without it.

    python tests/golden/torch/make_golden.py

What the files hold is written here once, as numpy arrays and plain values, for the
script to save and for the tests to compare with.
"""

import argparse
import collections
import datetime
import functools
import http
import pathlib
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

_GRID = np.arange(12, dtype=np.float32).reshape(3, 4)

# By PyTorch's dtype. bfloat16, which numpy has not, is given by its bits.
DTYPES = {
    "float32": np.array([0.0, -0.0, 1.5, np.inf, np.nan, 1e-45], np.float32),
    "float16": np.array([0.0, 1.5, 65504.0, 6e-8], np.float16),
    "bfloat16": np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16),
    "complex64": np.array([1 + 2j, -3.5j], np.complex64),
    "bool": np.array([True, False, True]),
    "uint8": np.array([0, 255], np.uint8),
    "int8": np.array([-128, 127], np.int8),
    "int16": np.array([-(2**15), 2**15 - 1], np.int16),
    "int32": np.array([-(2**31), 2**31 - 1], np.int32),
    "int64": np.array([-(2**63), 2**63 - 1], np.int64),
    "uint16": np.array([0, 2**16 - 1], np.uint16),
    "uint32": np.array([0, 2**32 - 1], np.uint32),
    "uint64": np.array([0, 2**64 - 1], np.uint64),
}

_VIEWS = {
    "whole": lambda grid: grid,
    "transposed": lambda grid: grid.T,
    "column": lambda grid: grid[:, 1],
    "steps": lambda grid: grid[::2, 1::2],
    "tail": lambda grid: grid[1:],
    "scalar": lambda grid: grid[2, 3],
}
VIEWS = {name: view(_GRID) for name, view in _VIEWS.items()} | {
    "expanded": np.broadcast_to(_GRID[0], (5, 4)),
    "empty": np.zeros((3, 0, 2), np.float32),
}

PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 255, 256, 65535, 65536, 2**31, -(2**31), 2**63, -(2**100)],
    "floats": [0.1, -0.0, float("inf"), 5e-324],
    "texts": ["", "weight", "größe", "\U0001f600", "nul\0"],
    "bytes": [b"", b"\x00\xff"],
    "bytearray": bytearray(b"abc"),
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "nested": {"a": [{"b": ({"c": None},)}]},
    "keys": {1: "int", 2.5: "float", None: "none", (1, "x"): "tuple", False: "bool"},
    "set": {1, 2, 3},
    "frozenset": frozenset({"x"}),
    "complex": 1 - 2j,
    "counter": collections.Counter("abca"),
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "long": list(range(2500)),
}


def _tensors(torch):
    def tensor(name):
        if name == "bfloat16":
            return torch.from_numpy(DTYPES[name].copy()).view(torch.bfloat16)
        return torch.from_numpy(DTYPES[name].copy())

    grid = torch.from_numpy(_GRID.copy())
    views = {name: view(grid) for name, view in _VIEWS.items()}
    views |= {"expanded": grid[0].expand(5, 4), "empty": torch.zeros(3, 0, 2)}
    return {"dtypes": {name: tensor(name) for name in DTYPES}, "views": views}


def _torchscript(torch):
    """A TorchScript archive, without the records that name this machine's folders."""
    path = HERE / "refused_torchscript.pt"
    torch.jit.script(torch.nn.Linear(1, 1)).save(path)
    with zipfile.ZipFile(path) as archive:
        records = {i: archive.read(i) for i in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in records.items():
            if not info.filename.endswith(".debug_pkl"):
                archive.writestr(info.filename, data, info.compress_type)


def _foreign(torch):
    """What is neither plain nor a tensor, and what it holds."""
    args = argparse.Namespace(lr=0.1, output=pathlib.PurePosixPath("/runs/1"))
    args.weight = torch.nn.Parameter(torch.ones(2))
    args.itself = [args]
    layer = torch.nn.Linear(1, 1)
    return {
        "args": args,
        "same": args,
        "best": np.float64(0.75),
        "rng": ("MT19937", np.arange(4, dtype=np.uint32), 3),
        "status": http.HTTPStatus.OK,
        "state": collections.defaultdict(dict, {"w": {"step": torch.ones(1)}}),
        "make": functools.partial(int, base=2),
        "when": datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc),
        "losses": collections.deque([1.5, 0.5], 10),
        "kinds": {np.int64(3): dict, "layer": layer},
        "dtypes": [torch.float16, torch.device("cuda", 1), torch.Size([2, 3])],
    }


def main() -> None:
    import torch

    everything = {**_tensors(torch), "plain": PLAIN}
    torch.save(everything, HERE / "zip.pt")
    torch.save(everything, HERE / "zip_protocol5.pt", pickle_protocol=5)
    old = {"_use_new_zipfile_serialization": False}
    torch.save(everything, HERE / "legacy.pt", **old)
    torch.save(everything, HERE / "legacy_protocol4.pt", pickle_protocol=4, **old)
    torch.save({"x": torch.ones(2, dtype=torch.float64)}, HERE / "float64.pt")
    torch.save({"x": np.float32(1)}, HERE / "foreign_numpy.pt")
    torch.save(torch.nn.Linear(1, 1), HERE / "foreign_module.pt")
    torch.save(_foreign(torch), HERE / "foreign.pt")
    # Files that have to be refused.
    _torchscript(torch)
    torch.save({"x": torch.eye(2).to_sparse()}, HERE / "sparse.pt")
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    torch.save({"x": float8}, HERE / "refused_float8.pt")


if __name__ == "__main__":
    main()
