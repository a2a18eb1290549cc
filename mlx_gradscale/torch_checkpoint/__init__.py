"""Read and write PyTorch's ``.pt`` files without PyTorch.

``load`` returns the object in a file with ``mx.array`` for every tensor, ``shapes`` the
same object without reading a tensor, and ``save`` writes what ``torch.load`` reads.
Nothing in a file is ever executed: objects of unknown classes become a ``Placeholder``,
which ``save`` writes back as it came.

``load`` raises only ``CheckpointError`` for a bad file. With the default ``Limits``, the
worst file costs 30 seconds and 1 GB besides the tensors that it really holds. Checksums
are verified, and pipes and devices are refused.

What cannot be read: sparse, quantized and nested tensors, TorchScript archives, dtypes
that MLX lacks, files of before PyTorch 0.1.10, containers that contain themselves, and
dict keys other than plain values and flat tuples. The library needs mlx and numpy only.
"""

from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchTensor,
    plain_value,
)
from .limits import CheckpointError, Limits
from .reader import load, shapes
from .writer import save

__all__ = [
    "CheckpointError",
    "DefaultDict",
    "Limits",
    "Placeholder",
    "TensorShape",
    "TorchTensor",
    "load",
    "plain_value",
    "save",
    "shapes",
]
