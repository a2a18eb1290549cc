"""The same step on every rank of an ``mx.distributed`` group.

MLX sends bytes without saying what they are, and waits forever. Before the first
step, and with each load, the ranks compare what they train (:mod:`.agreement`), and
whoever waits there too long raises. In a step nothing is compared: a rank that leaves
one out makes the others wait until it says something else or ends, which MLX tells them
as a lost connection, or not at all.
"""

from .averaging import average_gradients
from .sync import assert_in_sync, from_rank_0

__all__ = ["assert_in_sync", "average_gradients", "from_rank_0"]
