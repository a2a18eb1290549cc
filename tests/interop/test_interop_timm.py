"""A checkpoint that timm writes here and now, as the golden one of it is tested."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from convert.test_sources import check_source
from golden.sources.data import BEFORE

pytest.importorskip("torch", reason="needs PyTorch")
# Where timm is, and the torchvision that it imports. That comes for CUDA, and beside a
# PyTorch for the CPU it breaks Transformers: in a folder of their own, then.
FOLDER = "TIMM_FOLDER"
WRITE = """
import json, sys, torch
from golden.sources import make
kept = make.name_torchvisions_operators() if torch.version.cuda is None else None
print(json.dumps(make.timm(sys.argv[1])))
"""


@pytest.mark.skipif(FOLDER not in os.environ, reason=f"needs timm, in {FOLDER}")
def test_timm_checkpoint_resumes_in_mlx_and_then_in_timm(tmp_path):
    path = tmp_path / "written.pth.tar"
    tests = Path(__file__).parents[1]
    folders = [os.environ[FOLDER], str(tests), str(tests.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITE, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    losses = json.loads(done.stdout.splitlines()[-1])
    check_source("timm", path, losses[BEFORE:], tmp_path)
