"""PyTorch's element types: their names in files, and MLX's and numpy's for them."""

from typing import NamedTuple

import mlx.core as mx


class Element(NamedTuple):
    """One element type. ``storage`` is its class in files, ``numpy`` its bytes."""

    name: str
    storage: str | None
    mlx: mx.Dtype | None
    numpy: str
    size: int


# The last three have no storage class of their own: PyTorch writes their bytes as
# an UntypedStorage and names the dtype beside it.
ELEMENTS = (
    Element("torch.float32", "FloatStorage", mx.float32, "<f4", 4),
    Element("torch.float16", "HalfStorage", mx.float16, "<f2", 2),
    # numpy has no bfloat16; its bits travel as uint16.
    Element("torch.bfloat16", "BFloat16Storage", mx.bfloat16, "<u2", 2),
    Element("torch.float64", "DoubleStorage", mx.float64, "<f8", 8),
    Element("torch.complex64", "ComplexFloatStorage", mx.complex64, "<c8", 8),
    Element("torch.complex128", "ComplexDoubleStorage", None, "<c16", 16),
    Element("torch.bool", "BoolStorage", mx.bool_, "|b1", 1),
    Element("torch.uint8", "ByteStorage", mx.uint8, "|u1", 1),
    Element("torch.int8", "CharStorage", mx.int8, "|i1", 1),
    Element("torch.int16", "ShortStorage", mx.int16, "<i2", 2),
    Element("torch.int32", "IntStorage", mx.int32, "<i4", 4),
    Element("torch.int64", "LongStorage", mx.int64, "<i8", 8),
    Element("torch.uint16", None, mx.uint16, "<u2", 2),
    Element("torch.uint32", None, mx.uint32, "<u4", 4),
    Element("torch.uint64", None, mx.uint64, "<u8", 8),
)
BY_NAME = {e.name: e for e in ELEMENTS}
BY_STORAGE = {e.storage: e for e in ELEMENTS if e.storage}
BY_MLX = {e.mlx: e for e in ELEMENTS if e.mlx is not None}
BY_NUMPY = {e.numpy: e for e in ELEMENTS if e.name != "torch.bfloat16"}

# Types PyTorch has and MLX does not have. They may be named (a config that says
# dtype=torch.float8_e5m2); a tensor of them is refused by name.
_FOREIGN_NAMES = (
    "complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 quint2x4 bits8 "
    "bits16 bits1x8 bits2x4 bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "int1 int2 int3 int4 int5 int6 int7"
)
FOREIGN = {
    f"torch.{name}": Element(f"torch.{name}", None, None, "", 1)
    for name in _FOREIGN_NAMES.split()
}
