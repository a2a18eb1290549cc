"""Read and write PyTorch's ``.pt`` files without PyTorch.

``load`` runs nothing from a file and holds it to ``Limits``; what it cannot read it
refuses with a ``CheckpointError``. ``save`` writes what ``torch.load`` reads.
"""

from .distributed_folder import is_distributed, load_distributed
from .foreign import Placeholder
from .limits import CheckpointError, Limits
from .meanings import plain_value
from .reader import load
from .writer import save, save_bytes

__all__ = [
    "CheckpointError",
    "Limits",
    "Placeholder",
    "is_distributed",
    "load",
    "load_distributed",
    "plain_value",
    "save",
    "save_bytes",
]
