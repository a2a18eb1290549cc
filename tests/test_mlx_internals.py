"""What the package rests on in MLX, each said in a test's name."""

import mlx.core as mx


def test_mlx_compiles_a_kernel_for_each_dtype():
    # Before 0.31.2 the first one is taken for all: 9, 5.5 and 1.0000005.
    function = mx.compile(lambda x, y: x.astype(mx.float32) * y + 1)
    for dtype in (mx.float16, mx.bfloat16, mx.int16):
        found = function(mx.array([4, 4]).astype(dtype), mx.array(2.0))
        assert found.tolist() == [9.0, 9.0], dtype


def test_mlx_selects_subnormals_and_nans_bit_for_bit():
    for dtype, bits in ((mx.float32, mx.uint32), (mx.bfloat16, mx.uint16)):
        nan = 0x7F800001 if dtype == mx.float32 else 0x7F81
        x = mx.array([1, nan], bits).view(dtype)

        @mx.compile
        def kept(x, keep):
            return mx.where(keep, x, x + 1)

        assert kept(x, mx.array(True)).view(bits).tolist() == [1, nan]
