"""Optimizer states by name, as torch.distributed gives them."""

import pytest
from support.regression import assert_near, mlx_steps, torch_net, torch_steps

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def decayed(net):
    """Two groups, and the second begins: another order than the model's."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": matrices[::-1]}], lr=1e-2
    )


@pytest.mark.parametrize("is_flat", [True, False])
def test_optimizer_state_by_name_resumes_in_mlx_and_converts_back(is_flat, tmp_path):
    distributed = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = distributed.StateDictOptions(flatten_optimizer_state_dict=is_flat)
    net = torch_net()
    optimizer = decayed(net)
    torch_steps(net, optimizer, range(10))
    state = distributed.get_optimizer_state_dict(net, optimizer, options=options)
    torch.save({"model": net.state_dict(), "optim": state}, tmp_path / "a.pt")
    want = torch_steps(net, optimizer, range(10, 20))

    losses = mlx_steps(tmp_path / "a.pt", tmp_path / "b.pt", range(10, 15))
    assert_near(losses, want[:5])
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["optim"].keys() == state.keys()
    net = torch_net()
    optimizer = decayed(net)
    net.load_state_dict(back["model"])
    distributed.set_optimizer_state_dict(net, optimizer, back["optim"], options=options)
    assert_near(torch_steps(net, optimizer, range(15, 20)), want[5:])
