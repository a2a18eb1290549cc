"""What the package relies on in MLX's compiler, each as a claim."""

import mlx.core as mx
import pytest

from benchmarks.bytes_and_kernels import count_kernels


def evaluated(*shape):
    x = mx.ones(shape)
    mx.eval(x)
    return x


@pytest.mark.parametrize(
    ("dtype", "bits", "nan"),
    [(mx.float32, mx.uint32, 0x7F800001), (mx.bfloat16, mx.uint16, 0x7F81)],
)
def test_mlx_where_preserves_the_bits_of_subnormals_and_nans(dtype, bits, nan):
    select = mx.compile(lambda x, keep: mx.where(keep, x, x + 1))
    x = mx.array([1, nan], bits).view(dtype)
    assert select(x, mx.array(True)).view(bits).tolist() == [1, nan]


def test_mlx_fuses_outputs_with_a_common_root_into_one_kernel():
    def separate(a, b):
        return a * 2 + b, a * 2 - b

    def joined(a, b):
        plus, minus = separate(a, b)
        return mx.where(True, plus, minus), minus

    a, b = evaluated(8), evaluated(8)
    assert count_kernels(mx.compile(separate)(a, b)).total() > 1
    assert count_kernels(mx.compile(joined)(a, b)).total() == 1


def test_count_kernels_counts_each_kernel_once_and_ignores_views():
    x = evaluated(4, 6)
    y = mx.exp(x).T.reshape(-1)[3:].view(mx.uint32)
    assert count_kernels([y, y]) == {"Exp": 1}
    fused = mx.compile(lambda x: mx.sum(mx.exp(x) * 2 + 1))
    assert count_kernels([fused(evaluated(8))]).total() == 2
