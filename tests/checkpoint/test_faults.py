"""The newest checkpoint survives kills and disk errors, and readers see it whole."""

import errno
import functools
import os
import subprocess
import sys
from pathlib import Path

from support.checkpoint_writers import FaultPoints, names, save_steps, step_in

TESTS = Path(__file__).parents[1]
POINTS = FaultPoints()


def kept(run):
    return [step_in(run / name) for name in names(run) if name[0] != "."]


def test_kill_at_any_point_leaves_whole_checkpoints_and_no_lasting_files(tmp_path):
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    program = [sys.executable, str(TESTS / "support" / "checkpoint_writers.py")]
    subprocess.run(
        [*program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        timeout=600,
        check=True,
    )
    killed = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(killed) > 20
    newest = [step_in(run) for run in killed]
    assert newest == sorted(newest)  # the old one up to a point, then the new one
    assert {*newest} == {2, 3}
    for run in killed:
        assert kept(run) in ([0, 1, 2], [0, 1, 2, 3], [1, 2, 3])
        save_steps(run, 9, keep=3)
        assert kept(run)[-1] == 9
        assert len(list(run.iterdir())) == 3


def test_disk_error_at_any_point_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    save_steps(tmp_path, 0, keep=2)
    at, outcomes = 0, set()
    while True:
        at += 1
        before = step_in(tmp_path)
        POINTS.start(at, fail)
        try:
            save_steps(tmp_path, at, keep=2)
            failed = False
        except OSError as error:
            failed = error.errno == errno.ENOSPC
        finally:
            POINTS.stop()
        after = step_in(tmp_path)
        assert after in ((before, at) if failed else (at,))
        outcomes.add((failed, after == at))
        if POINTS.count < at:
            break
    assert at > 20
    assert (True, False) in outcomes
    save_steps(tmp_path, at, keep=2)
    assert kept(tmp_path)[-1] == at
    assert len(list(tmp_path.iterdir())) == 2


def test_reader_finds_a_whole_checkpoint_while_a_writer_replaces_it(tmp_path):
    save_steps(tmp_path, 0)
    at = 0
    while True:
        at += 1
        newer = functools.partial(save_steps, tmp_path, at)
        POINTS.start(at, newer)
        try:
            step = step_in(tmp_path)
        finally:
            POINTS.stop()
        if POINTS.count < at:
            break
        assert step == at
    assert at > 4
