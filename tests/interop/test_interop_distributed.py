"""Checkpoints of FSDP2 on two ranks, in a file and in a folder."""

import subprocess
import sys

import pytest
from support.regression import assert_near, mlx_steps, torch_net, torch_steps

from mlx_gradscale.convert.command import main

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def shard(rank, folder, count):
    """On each rank: FSDP2's shards as they are, in a folder, and gathered."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    net = torch_net()
    fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (count,)))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch_steps(net, optimizer, range(10))
    parts = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    torch.save(parts, f"{folder}/shards_{rank}.pt")
    model, state = get_state_dict(net, optimizer)
    torch.distributed.checkpoint.save(
        {"model": model, "optim": state}, checkpoint_id=f"{folder}/dcp"
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, state = get_state_dict(net, optimizer, options=options)
    if rank == 0:
        torch.save({"model": model, "optim": state}, f"{folder}/whole.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(shard, (str(folder), 2), 2)
    return folder


def test_sharded_checkpoint_error_shows_the_call_that_gathers_the_shards(
    sharded, tmp_path, capsys
):
    arguments = ["--torch-path", sharded / "shards_0.pt", "--mlx-path", tmp_path / "x"]
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err
    options = "options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
    assert f"get_state_dict(model, optimizer, {options})" in said


def run_format_utils(way, source, target):
    """PyTorch's own command between a folder and a file."""
    module = "torch.distributed.checkpoint.format_utils"
    words = [sys.executable, "-m", module, way, str(source), str(target)]
    subprocess.run(words, check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["whole.pt", "dcp"])
def test_two_rank_fsdp2_run_resumes_in_mlx_then_fsdp2(kind, sharded, tmp_path, capsys):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    want = torch_steps(net, optimizer, range(20))
    source, back = sharded / kind, tmp_path / "back.pt"
    if kind == "dcp":
        paths = ["--torch-path", source, "--mlx-path", tmp_path / "run"]
        assert main([*map(str, paths)]) == 1
        assert "format_utils dcp_to_torch" in capsys.readouterr().err
        source = tmp_path / "whole.pt"
        run_format_utils("dcp_to_torch", sharded / kind, source)
    losses = mlx_steps(source, back, range(10, 15))
    assert_near(losses, want[10:15])
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    options = states.StateDictOptions(full_state_dict=True)
    if kind == "dcp":
        run_format_utils("torch_to_dcp", back, tmp_path / "back")
        model, state = states.get_state_dict(net, optimizer)
        dcp.load({"model": model, "optim": state}, checkpoint_id=tmp_path / "back")
    else:
        found = torch.load(back, weights_only=True)
        model, state = found["model"], found["optim"]
    found = {"model_state_dict": model, "optim_state_dict": state}
    states.set_state_dict(net, optimizer, **found, options=options)
    assert_near(torch_steps(net, optimizer, range(15, 20)), want[15:])
