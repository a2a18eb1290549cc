"""What a file says about a tensor, as plain checked numbers: no data is read here."""

from dataclasses import dataclass
from math import prod
from typing import Any

from .dtypes import BY_NAME, FOREIGN, Element
from .limits import CheckpointError

# MLX keeps a dimension in an int32; a memoryview has at most 64 of them.
MAX_DIM = 2**31 - 1
MAX_NDIM = 64


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A block of elements in the file, and the part of it that is meant.

    ``element`` is None for an UntypedStorage, whose elements are bytes. The part,
    ``numel`` from ``start`` on, is all of the ``total`` except for the storage views
    of old sequential files.
    """

    key: str
    element: Element | None
    total: int
    start: int
    numel: int

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.element.size if self.element else 1


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided view of a storage, checked to lie inside it."""

    storage: StorageRef
    element: Element
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False
    # For tensors inside placeholders, which come back as they were.
    requires_grad: bool = False
    is_parameter: bool = False

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return prod(self.shape)

    @property
    def row_contiguous(self) -> bool:
        """Whether the elements lie in row order, one after the other."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def identity(self) -> str:
        """Equal for tensors that are the same view of the same bytes.

        A string, because the hashes of strings are keyed: a file cannot make
        them collide.
        """
        s = self.storage
        return (
            f"{s.start}|{self.element.name}|{self.offset}|{self.shape}|"
            f"{self.strides}|{self.conj}|{self.neg}|{s.key}"
        )


def is_count(value: Any) -> bool:
    """Tell whether a value is an integer from 0 on that fits in 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def _check_sizes(values: Any, what: str) -> None:
    # The length first: a long one could be checked again and again.
    if isinstance(values, tuple) and len(values) > MAX_NDIM:
        raise CheckpointError(
            f"A tensor has more than {MAX_NDIM} dimensions, which MLX cannot hold."
        )
    if not isinstance(values, tuple) or not all(is_count(v) for v in values):
        raise CheckpointError(f"A tensor's {what} is not a tuple of sizes.")


def view(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    dtype: Any = None,
    metadata: Any = None,
    requires_grad: bool = False,
) -> TensorRef:
    """Check a rebuilt tensor's numbers and return it as a reference."""
    if not isinstance(storage, StorageRef):
        raise CheckpointError("A tensor is rebuilt from something not a storage.")
    if storage.element is not None and dtype is None:
        element = storage.element
    else:
        element = element_named(dtype)
    _check_sizes(shape, "shape")
    _check_sizes(strides, "strides")
    if not is_count(offset) or len(shape) != len(strides):
        raise CheckpointError("A tensor's offset, shape and strides do not fit.")
    if any(size > MAX_DIM for size in shape):
        raise CheckpointError(
            f"A tensor has a dimension beyond {MAX_DIM}, which MLX cannot hold."
        )
    if prod(max(size, 1) for size in shape) >= 2**62:
        raise CheckpointError("A tensor's size overflows 64 bits.")
    reach = offset + sum(
        (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
    )
    room = storage.numel * storage.itemsize // element.size
    if 0 not in shape and reach >= room:
        raise CheckpointError(
            f"A tensor of shape {shape} with strides {strides} and offset {offset} "
            f"reaches outside its storage of {room} elements."
        )
    conj, neg = _bits(metadata)
    if neg and element.name == "torch.bool":
        raise CheckpointError("A bool tensor is marked as negative.")
    return TensorRef(
        storage, element, offset, tuple(shape), strides, conj, neg, requires_grad
    )


def element_named(dtype: Any) -> Element:
    """Return the element type of a dtype's name, or raise."""
    element = (
        BY_NAME.get(dtype) or FOREIGN.get(dtype) if isinstance(dtype, str) else None
    )
    if element is not None:
        return element
    raise CheckpointError("A tensor is rebuilt without a known dtype.")


def _bits(metadata: Any) -> tuple[bool, bool]:
    """Return PyTorch's lazy conjugate and negative, kept as bits beside the data."""
    if metadata is None:
        return False, False
    # PyTorch writes a bit only where it is set, and takes any value for that.
    if type(metadata) is not dict or not all(
        key in ("conj", "neg") and bit is True for key, bit in metadata.items()
    ):
        raise CheckpointError("A tensor carries metadata other than conj and neg.")
    return "conj" in metadata, "neg" in metadata
