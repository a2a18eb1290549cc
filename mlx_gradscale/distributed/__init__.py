"""The same step on every rank of an ``mx.distributed`` group."""

from .averaging import average_gradients
from .sync import assert_in_sync, from_rank_0

__all__ = ["assert_in_sync", "average_gradients", "from_rank_0"]
