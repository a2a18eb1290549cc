"""Optimizer states by name, as torch.distributed gives them."""

import shlex
import subprocess
import sys

import pytest
from interop_helpers import MODEL, convert, mlx_steps, torch_net, torch_steps
from sources_page import check_row, seen, steps

from mlx_gradscale.convert import main

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
def test_a_state_by_name_goes_on_in_mlx_and_back(is_flat, tmp_path):
    distributed = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = distributed.StateDictOptions(flatten_optimizer_state_dict=is_flat)
    net = torch_net()
    optimizer = decayed(net)
    torch_steps(net, optimizer, range(10))
    state = distributed.get_optimizer_state_dict(net, optimizer, options=options)
    torch.save({"model": net.state_dict(), "optim": state}, tmp_path / "a.pt")
    want = torch_steps(net, optimizer, range(10, 20))

    convert(tmp_path / "a.pt", tmp_path / "run", *MODEL)
    losses = mlx_steps(tmp_path / "run", range(10, 15))
    onward = steps(losses, want[:5])

    convert(tmp_path / "b.pt", tmp_path / "run")
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["optim"].keys() == state.keys()
    net = torch_net()
    optimizer = decayed(net)
    net.load_state_dict(back["model"])
    distributed.set_optimizer_state_dict(net, optimizer, back["optim"], options=options)
    losses = torch_steps(net, optimizer, range(15, 20))
    titles = {
        False: "`torch.distributed.checkpoint.state_dict`, by name",
        True: "`torch.distributed.checkpoint.state_dict`, flattened",
    }
    check_row(
        titles[is_flat],
        inspect=seen(tmp_path / "a.pt"),
        to_mlx=(),
        onward=onward,
        back=f"`set_optimizer_state_dict`, {steps(losses, want[5:])}",
    )


def shard(rank, folder, count):
    """On each rank: FSDP2's shards as they are, and gathered as the error says."""
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
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, state = get_state_dict(net, optimizer, options=options)
    if rank == 0:
        torch.save({"model": model, "optim": state}, f"{folder}/whole.pt")
    torch.distributed.destroy_process_group()


def test_shards_of_two_ranks_are_refused_with_the_call_that_gathers_them(
    tmp_path, capsys
):
    torch.multiprocessing.spawn(shard, (str(tmp_path), 2), 2)
    arguments = ["--torch-path", tmp_path / "shards_0.pt", "--mlx-path", tmp_path / "x"]
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err
    options = "options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
    assert f"get_state_dict(model, optimizer, {options})" in said
    check_row(
        "FSDP2 on two ranks, each with its shards",
        inspect=seen(tmp_path / "shards_0.pt"),
        to_mlx="refused: the error names the call that gathers them",
        onward="",
        back="",
    )

    convert(tmp_path / "whole.pt", tmp_path / "run", *MODEL)
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    want = torch_steps(net, optimizer, range(20))
    losses = mlx_steps(tmp_path / "run", range(10, 15))
    onward = steps(losses, want[10:15])
    convert(tmp_path / "back.pt", tmp_path / "run")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    distributed = torch.distributed.checkpoint.state_dict
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    options = distributed.StateDictOptions(full_state_dict=True)
    states = {"model_state_dict": back["model"], "optim_state_dict": back["optim"]}
    distributed.set_state_dict(net, optimizer, **states, options=options)
    check_row(
        "FSDP2 on two ranks, gathered by `get_state_dict`",
        inspect=seen(tmp_path / "whole.pt"),
        to_mlx=(),
        onward=onward,
        back=f"`set_state_dict`, "
        f"{steps(torch_steps(net, optimizer, range(15, 20)), want[15:])}",
    )


def test_a_folder_of_distcp_files_is_refused_with_the_command_that_makes_it_a_file(
    tmp_path, capsys
):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch_steps(net, optimizer, range(10))
    model, state = dcp.state_dict.get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": state}, checkpoint_id=tmp_path / "dcp")
    arguments = ["--torch-path", tmp_path / "dcp", "--mlx-path", tmp_path / "run"]
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err.split("give that: ")[1]
    words = shlex.split(said)
    assert words[:2] == ["python", "-m"]
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)

    convert(words[-1], tmp_path / "run", *MODEL)
    want = torch_steps(net, optimizer, range(10, 15))
    check_row(
        "`torch.distributed.checkpoint`, a folder",
        inspect=seen(tmp_path / "dcp"),
        to_mlx="refused: the error names the command that makes it a file; that: "
        "at once",
        onward=steps(mlx_steps(tmp_path / "run", range(10, 15)), want),
        back="as a file",
    )
