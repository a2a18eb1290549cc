"""Read and write PyTorch's ``.pt`` files without PyTorch.

``load`` returns the object in a file with an ``mx.array`` for every tensor, ``shapes``
returns it with a lazy ``Tensor`` for every tensor, and ``save`` writes files that
``torch.load`` reads. Nothing in a file is ever executed: objects of unknown classes
become a ``Placeholder``, which ``save`` writes back unchanged.

For a bad file, ``load`` raises only ``CheckpointError``. What a file can make it
allocate is bounded, as SECURITY.md says. Checksums are verified; pipes and devices are
refused.

Not supported: DTensors, TorchScript archives, ``torch.distributed.checkpoint`` folders
(the error shows PyTorch's command to convert them to a file), big-endian files, files
from before PyTorch 0.4, values that are nested some hundred levels deep, and dict keys
other than plain values and flat tuples of them. ``load`` does not support dtypes that
MLX lacks; ``shapes`` does.

The package imports only MLX, NumPy and the standard library, so a copy of its folder
works in another project.
"""

from .objects import CheckpointError, Placeholder, plain_value, replace_tensors
from .reader import load, shapes
from .tensors import Tensor, read_all
from .writer import save

__all__ = [
    "CheckpointError",
    "Placeholder",
    "Tensor",
    "load",
    "plain_value",
    "read_all",
    "replace_tensors",
    "save",
    "shapes",
]
