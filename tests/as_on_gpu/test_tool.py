"""The tool itself: what pretends to be a GPU must be as strict as Metal."""

import mlx.core as mx
import numpy as np
import pytest

from tools.as_on_gpu import Launch, record


def evaluated(*shape, dtype=mx.float32):
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def total(arrays):
    """Add the arrays in pairs, then the sums in pairs, and so on."""
    while len(arrays) > 1:
        arrays = [a + b for a, b in zip(arrays[::2], arrays[1::2], strict=True)]
    return arrays[0]


def test_default_device_is_the_gpu_and_refuses_float64():
    assert mx.default_device() == mx.Device(mx.gpu)
    with pytest.raises(ValueError, match="float64 is not supported on the GPU"):
        mx.array(1.0, mx.float64) + 1.0


def test_only_gpu_streams_flush_subnormals_and_keep_those_of_float16():
    def half_of_smallest_normal(dtype, exponent, stream):
        smallest = mx.array(2.0**exponent).astype(dtype, stream=mx.cpu)
        return mx.multiply(smallest, mx.array(0.5, dtype), stream=stream).item()

    smallest = [(mx.float32, -126), (mx.bfloat16, -126), (mx.float16, -14)]
    new = mx.new_stream(mx.gpu)
    for stream, kept in ((mx.gpu, [0, 0, 1]), (new, [0, 0, 1]), (mx.cpu, [1, 1, 1])):
        found = [half_of_smallest_normal(*each, stream) > 0 for each in smallest]
        assert found == kept, stream
    assert np.float32(2.0**-126) * np.float32(0.5) > 0


@pytest.mark.parametrize("shapeless", [False, True])
def test_replayed_kernel_returns_what_its_primitives_return_one_by_one(shapeless):
    def function(a, row, scalar, half):
        joined = mx.where(a > row, a * scalar + 2, mx.exp(-row).astype(mx.float16))
        return joined, (joined - half).astype(mx.bfloat16), row * scalar + half

    compiled = mx.compile(function, shapeless=shapeless)
    for n in (3, 5):
        a, row, scalar = evaluated(n, 4).T, evaluated(4, 1), evaluated()
        given = (a, row, scalar, evaluated(4, n, dtype=mx.float16))
        with record() as launches:
            results = compiled(*given)
            mx.eval(results)
        assert "Compiled" in {x.primitive for x in launches}
        for result, expected in zip(results, function(*given), strict=True):
            assert result.shape == expected.shape
            assert result.dtype == expected.dtype
            assert mx.array_equal(result, expected)


def test_fused_kernel_with_more_than_31_buffers_raises():
    # The fuser stops near 24 arrays, but counts too late: MLX itself gets there.
    arrays = [evaluated(2) for _ in range(256)]
    compiled = mx.compile(lambda *arrays: total(list(arrays)))
    with record() as launches:
        mx.eval(compiled(*arrays[:128]))
    assert max(x.buffers for x in launches) == 31
    with pytest.raises(RuntimeError, match="needs 32 buffers; Metal has 31"):
        mx.eval(compiled(*arrays))


def test_fused_kernel_of_an_empty_array_raises():
    with pytest.raises(RuntimeError, match="an array without elements"):
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2)(evaluated(0, 3)))


def test_launches_are_recorded_with_bytes_buffers_and_dtypes():
    x, half = evaluated(64, 65), evaluated(64, 65, dtype=mx.float16)
    fused = mx.compile(lambda x, half: mx.exp(x) * half + 1)
    with record() as launches:
        y = fused(x, half)
        mx.eval(mx.sum(y), y.T.reshape(2, -1)[1:].view(mx.int32))
    moved = 64 * 65 * (4 + 2 + 4)
    assert launches == [
        # Inputs, output, shape, strides and number of dimensions.
        Launch("Compiled", 1, moved, 4160, 6, ("float32", "float16"), ("float32",)),
        # Of the views, only this one has to copy.
        Launch("Reshape", 1, 4160 * 8, 4160, 2, ("float32",), ("float32",)),
        # More than 4096 elements take two launches.
        Launch("Sum", 2, 4160 * 4 + 4, 1, 2, ("float32",), ("float32",)),
    ]


def test_launch_reads_memory_that_its_arguments_share_once():
    x = evaluated(100)
    with record() as launches:
        mx.eval(x.view(mx.int32) * x, mx.broadcast_to(x[:1], (50,)) + x[:50])
    assert [x.bytes for x in launches if x.primitive == "Multiply"] == [1200]
    assert [x.bytes for x in launches if x.primitive == "Add"] == [400]
