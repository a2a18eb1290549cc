"""What the golden checkpoints of other programs were trained on."""

import numpy as np
from golden.convert.data import numbers

BEFORE, AFTER = 10, 10
TOKENS, LENGTH = 16, 8


def tokens(step):
    """A batch of tokens, and the same one place further on."""
    found = numbers(4 * (LENGTH + 1), step).reshape(4, LENGTH + 1)
    found = ((found + 1) * TOKENS / 2).astype(np.int64)
    return found[:, :-1], found[:, 1:]
