"""Read and write PyTorch's ``.pt`` files without PyTorch.

``load`` returns the object in a file with an ``mx.array`` for every tensor, ``shapes``
returns it with only the shape and dtype of every tensor, and ``save`` writes files that
``torch.load`` reads. Nothing in a file is ever executed: objects of unknown classes
become a ``Placeholder``, which ``save`` writes back unchanged.

For a bad file, ``load`` raises only ``CheckpointError``. With the default ``Limits``,
a file takes at most about 30 s of CPU time, and 1 GB of memory in addition to the data
of its tensors. Checksums are verified; pipes and devices are refused.

Sparse and nested tensors become a ``Placeholder`` that holds their dense parts. Not
supported: quantized tensors, DTensors, TorchScript archives,
``torch.distributed.checkpoint`` folders (the error shows PyTorch's command to convert
them to a file), dtypes that MLX lacks, big-endian files, files from before PyTorch 0.4,
containers that contain themselves or are nested over 128 deep, and dict keys other than
plain values and flat tuples of them.

A template is an object whose tensors are replaced by ``TensorShape`` leaves. ``save``
and ``load`` preserve them, so that a template can be filled with arrays later. Only
this library reads such a file.

The package imports only MLX, NumPy and the standard library, so a copy of its folder
works in another project.
"""

# Therefore two functions of mlx_gradscale/files exist here as well: dtype_name, and
# atomic_write as _replace in writer.py, with the same locks.
from .foreign import (
    DefaultDict,
    Placeholder,
    TensorShape,
    TorchSize,
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
    "TorchSize",
    "TorchTensor",
    "load",
    "plain_value",
    "save",
    "shapes",
]
