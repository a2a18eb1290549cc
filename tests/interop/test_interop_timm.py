"""A checkpoint that timm writes here and now, as the golden one of it is tested."""

import pytest
from golden_sources import make
from golden_sources.data import BEFORE
from test_sources import check_source

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_file_of_timm_goes_on_in_mlx_and_back(tmp_path):
    kept = make.name_torchvisions_operators() if torch.version.cuda is None else None
    pytest.importorskip("timm", reason="needs timm")
    path = tmp_path / "written.pth.tar"
    want = make.timm(path)[BEFORE:]
    check_source("timm", path, want, tmp_path)
    del kept
