"""Files that PyTorch wrote are read right, also where PyTorch is not installed."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_gradscale import torch_checkpoint
from mlx_gradscale.torch_checkpoint import CheckpointError
from tests.support.torch_files import CONTENTS, GOLDEN, assert_same_bits

FORMATS = ["zip.pt", "zip_protocol5.pt", "legacy.pt", "legacy_protocol4.pt"]


@pytest.fixture(params=FORMATS)
def everything(request):
    return torch_checkpoint.load(GOLDEN / request.param)


@pytest.mark.parametrize("dtype", CONTENTS["DTYPES"])
def test_golden_tensor_of_each_dtype_loads_bit_identically(everything, dtype):
    array = everything["dtypes"][dtype]
    assert array.dtype == getattr(mx, {"bool": "bool_"}.get(dtype, dtype))
    assert_same_bits(array, CONTENTS["DTYPES"][dtype])


@pytest.mark.parametrize("view", CONTENTS["VIEWS"])
def test_golden_view_loads_bit_identically(everything, view):
    assert_same_bits(everything["views"][view], np.asarray(CONTENTS["VIEWS"][view]))


@pytest.mark.parametrize("kind", CONTENTS["PLAIN"])
def test_golden_plain_value_loads_with_its_type(everything, kind):
    actual, expected = everything["plain"][kind], CONTENTS["PLAIN"][kind]
    assert type(actual) is type(expected)
    assert actual == expected
    assert repr(actual) == repr(expected)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("refused_torchscript.pt", "TorchScript"),
        ("refused_float8.pt", r"obj\['x'\].*float8_e4m3fn"),
    ],
)
def test_unsupported_golden_file_error_names_the_cause(file, says):
    with pytest.raises(CheckpointError, match=says):
        torch_checkpoint.load(GOLDEN / file)


def test_sparse_tensors_become_placeholders_that_hold_dense_tensors():
    found = torch_checkpoint.load(GOLDEN / "sparse.pt")["x"]
    assert found.path == "torch._utils._rebuild_sparse_tensor"
    _layout, (indices, values, *_) = found.args
    assert indices.shape == (2, 2)
    assert values.tolist() == [1.0, 1.0]


def test_float64_tensor_stays_float64():
    found = torch_checkpoint.load(GOLDEN / "float64.pt")["x"]
    assert_same_bits(found, np.ones(2, np.float64))
