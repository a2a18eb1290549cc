"""python checkpoint_writers.py FOLDER: kill saves with keep=3 at each point."""

import os
import shutil
import signal
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import restore_checkpoint, save_checkpoint

# Everything that a save asks of the disk, but for reads and writes of open files.
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir")


class FaultPoints:
    """Calls a function at the n-th event of a save; counts all of them."""

    def __init__(self):
        self.count, self.at, self.act = 0, None, None
        self._fsync = os.fsync
        os.fsync = self._sync
        sys.addaudithook(self._hook)

    def start(self, at, act):
        self.count, self.at, self.act = 0, at, act

    def stop(self):
        self.at = None

    def _hook(self, event, _):
        if self.at is not None and event.startswith(EVENTS):
            self._pass()

    def _sync(self, descriptor):
        if self.at is not None:
            self._pass()
        self._fsync(descriptor)

    def _pass(self):
        self.count += 1
        if self.count == self.at:
            self.act()


def small(value=0.0):
    model = nn.Linear(2, 2)
    model.weight = mx.full((2, 2), float(value))
    return model, optim.SGD(0.1)


def save_steps(run, *steps, keep=1):
    for step in steps:
        save_checkpoint(run, *small(step), keep=keep, step=step)


def step_in(folder):
    """Return the step in a checkpoint whose weights and extra are of one step."""
    model, optimizer = small(-9)
    step = restore_checkpoint(folder, model, optimizer)["step"]
    assert model.weight.tolist() == [[step] * 2] * 2
    return step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(folder):
    """Leave, for each point, a folder in which the fourth save was killed there."""
    points = FaultPoints()
    at = 0
    while True:
        at += 1
        run = Path(folder) / str(at)
        # A child of its own for each: MLX's threads do not survive a fork, so that
        # nothing is computed here.
        child = os.fork()
        if child == 0:
            save_steps(run, 0, 1, 2, keep=3)
            points.start(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save_steps(run, 3, keep=3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            shutil.rmtree(run)
            return
        if not os.WIFSIGNALED(status):
            sys.exit(1)


if __name__ == "__main__":
    killed(sys.argv[1])
