"""The batches of the golden runs, the same on every machine, without PyTorch."""

import numpy as np

BEFORE, AFTER = 7, 20
OVERFLOWS = (3, BEFORE + 5)
CLASSES, TOKENS, LENGTH, WIDTH = 5, 11, 6, 8


def numbers(count, seed):
    """Numbers in [-1, 1) that every machine and library version computes the same."""
    n = np.arange(count, dtype=np.uint64) + np.uint64(seed) * np.uint64(7919)
    return ((n * np.uint64(2654435761) >> np.uint64(8)) % 65536).astype(np.float32) / (
        np.float32(32768)
    ) - np.float32(1)


def batch(kind, step):
    """A batch as numpy arrays: (input, labels); channels last for images."""
    if kind == "conv":
        x = numbers(6 * 8 * 8 * 2, step).reshape(6, 8, 8, 2)
        return x, ((numbers(6, step + 500) + 1) * CLASSES / 2).astype(np.int64)
    x = ((numbers(4 * LENGTH, step) + 1) * TOKENS / 2).astype(np.int64)
    y = ((numbers(4 * LENGTH, step + 500) + 1) * TOKENS / 2).astype(np.int64)
    return x.reshape(4, LENGTH), y.reshape(4, LENGTH)
