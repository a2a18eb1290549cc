"""The layouts: how a PyTorch tensor lies in MLX, and back."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


class LayoutError(ValueError):
    """A tensor whose name or layout on the other side is not known."""


@dataclass(frozen=True)
class Layout:
    """How one PyTorch tensor becomes ``count`` MLX arrays, and back."""

    to_mlx: Callable[[mx.array], list[mx.array]]
    to_torch: Callable[[list[mx.array]], mx.array]
    count: int = 1


LAYOUTS: dict[str, Layout] = {
    "same": Layout(lambda x: [x], lambda xs: xs[0]),
    # (in, out) <-> (out, in): Transformers' Conv1D, PEFT's LoRA
    "transpose": Layout(
        lambda x: [mx.swapaxes(x, 0, 1)], lambda xs: mx.swapaxes(xs[0], 0, 1)
    ),
    # (out, in, *kernel) <-> (out, *kernel, in)
    "conv": Layout(
        lambda x: [mx.moveaxis(x, 1, -1)], lambda xs: mx.moveaxis(xs[0], -1, 1)
    ),
    # (in, out, *kernel) <-> (out, *kernel, in)
    "conv_transpose": Layout(
        lambda x: [mx.moveaxis(x, 0, -1)], lambda xs: mx.moveaxis(xs[0], -1, 0)
    ),
    # nn.Bilinear: (out, in1, in2) <-> (out, in2, in1)
    "bilinear": Layout(
        lambda x: [mx.swapaxes(x, 1, 2)], lambda xs: mx.swapaxes(xs[0], 1, 2)
    ),
    # nn.MultiheadAttention's in_proj: query, key and value in one tensor
    "split_qkv": Layout(lambda x: list(mx.split(x, 3)), mx.concatenate, count=3),
}
