"""Lightning's checkpoints, with and without an average of the weights."""

import pytest
from support.regression import assert_near, mlx_steps

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("lightning", reason="needs lightning")
from golden.sources.make import fit_with_lightning  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("averaged", [False, True])
def test_lightning_run_resumes_in_mlx_and_then_in_lightning(averaged, tmp_path):
    want = fit_with_lightning(tmp_path, 20, averaged)
    path = tmp_path / "step=10.ckpt"
    losses = mlx_steps(path, tmp_path / "back.ckpt", range(10, 15))
    assert_near(losses, want[10:15])
    back = torch.load(tmp_path / "back.ckpt", weights_only=False)
    before = torch.load(path, weights_only=False)
    assert back.keys() == before.keys()
    # Lightning continues at step 10, five steps of which were MLX's.
    losses = fit_with_lightning(tmp_path, 15, averaged, tmp_path / "back.ckpt", 15)
    assert_near(losses[:5], want[15:20])
