"""What the package rests on in MLX, each said in a test's name.

But for the first, which is why older versions are not allowed, only the time or memory
rests on it: the results are the same without, as the tests say.
"""

import io

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.graphs import address, kernels

from mlx_gradscale.core.finite import _own_float32
from mlx_gradscale.core.scale import _in_one_kernel
from mlx_gradscale.masters import half_bits

pytestmark = pytest.mark.core


def test_mlx_compiles_a_kernel_for_each_dtype():
    # Before 0.31.2 the first one is taken for all: 9, 5.5 and 1.0000005.
    function = mx.compile(lambda x, y: x.astype(mx.float32) * y + 1)
    for dtype in (mx.float16, mx.bfloat16, mx.int16):
        found = function(mx.array([4, 4]).astype(dtype), mx.array(2.0))
        assert found.tolist() == [9.0, 9.0], dtype


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_mlx_compiles_a_kernel_for_each_dtype_of_a_users_loss(dtype):
    # In which no kernel is ours to mend: 16 and 5.0625 before 0.31.2, on the CPU also
    # if each is in a process of its own, because kernels are kept on disk by name.
    model = nn.Linear(4, 1)
    model.update({"weight": mx.ones((1, 4)), "bias": mx.zeros(1)})
    model.set_dtype(dtype)

    @mx.compile
    def loss_fn(x, y):
        return mx.mean(mx.square(model(x).astype(mx.float32) - y))

    assert loss_fn(mx.ones((2, 4), dtype), mx.zeros((2, 1))).item() == 16.0


def test_mlx_selects_subnormals_and_nans_bit_for_bit():
    for dtype, bits in ((mx.float32, mx.uint32), (mx.bfloat16, mx.uint16)):
        nan = 0x7F800001 if dtype == mx.float32 else 0x7F81
        x = mx.array([1, nan], bits).view(dtype)

        @mx.compile
        def kept(x, keep):
            return mx.where(keep, x, x + 1)

        assert kept(x, mx.array(True)).view(bits).tolist() == [1, nan]


def test_mlx_fuses_two_casts_of_an_array_only_where_one_is_of_a_view():
    # Two casts are one array, a float32 copy of each gradient; of a view they are not.
    x = mx.arange(64, dtype=mx.float16)
    found = []
    for cast in (lambda x: x.astype(mx.float32), _own_float32):

        def function(x, cast=cast):
            return x.astype(mx.float32) * 2, mx.sum(mx.square(cast(x)))

        outputs = mx.compile(function)(x)
        found.append([name.startswith("AsType") for name in kernels(outputs)])
        assert outputs[0].tolist() == [2.0 * i for i in range(64)]
        assert outputs[1].item() == sum(i * i for i in range(64))
    assert list(map(any, found)) == [True, False]


def test_mlx_fuses_what_ends_in_one_node():
    a, b = mx.array(1.5), mx.array(2)
    for finish, count in ((dict, 2), (lambda values: _in_one_kernel(values, "a"), 1)):

        def function(a, b, finish=finish):
            return finish({"a": a * 2, "b": b + 1})

        outputs = mx.compile(function)(a, b)
        assert len(kernels(outputs)) == count
        assert {k: x.item() for k, x in outputs.items()} == {"a": 3.0, "b": 3}


def test_mlx_views_the_bits_of_a_weight_in_its_own_memory():
    for dtype in (mx.float16, mx.bfloat16):
        weight = mx.ones((4, 6), dtype)
        bits = half_bits(weight)
        mx.eval(weight, bits)
        same = address(bits) == address(weight.view(mx.uint16))
        assert (same, bits.shape) == (True, weight.shape)


class Part:
    """All that ``torch_checkpoint.direct_read`` has of a file object."""

    closed = False

    def __init__(self, data):
        self._file = io.BytesIO(data)
        self.tell, self.seek = self._file.tell, self._file.seek

    def readinto(self, buffer):
        return self._file.readinto(buffer)


def test_mlx_loads_a_file_object_that_can_seek_and_read_into():
    numbers = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    file = io.BytesIO()
    np.save(file, numbers)
    loaded = mx.load(Part(file.getvalue()), format="npy", stream=mx.cpu)
    assert np.array_equal(np.array(loaded), numbers)
