"""A Trainer's ``global_step`` after steps in MLX."""

import json

import pytest
from convert_helpers import fails
from interop_helpers import MODEL, convert, mlx_steps, torch_net, torch_steps

torch = pytest.importorskip("torch", reason="needs PyTorch")


@pytest.fixture
def folder(tmp_path):
    """What matters of a Trainer's checkpoint-10, in which 4 steps were an epoch."""
    net = torch_net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch_steps(net, optimizer, range(10))
    (tmp_path / "there").mkdir()
    torch.save(net.state_dict(), tmp_path / "there" / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "there" / "optimizer.pt")
    write(tmp_path / "there", 10)
    return tmp_path


def write(folder, step):
    state = {"best_metric": None, "epoch": 2.5, "global_step": step, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def back(folder, *flags):
    """What the run in a folder gives, and all its steps in MLX made on."""
    convert(folder / "back", folder / "run", "--overwrite", "--to", "torch", *flags)
    state = json.loads((folder / "back" / "trainer_state.json").read_text())
    return state["global_step"], state["epoch"]


def test_it_counts_the_steps_in_mlx(folder, capsys):
    convert(folder / "there", folder / "run", *MODEL)
    convert(folder / "back", folder / "run")
    name = "trainer_state.json"
    before = json.loads((folder / "there" / name).read_text())
    assert json.loads((folder / "back" / name).read_text()) == before
    assert name not in capsys.readouterr().err

    mlx_steps(folder / "run", range(10, 14))
    assert back(folder) == (14, 3.5)
    said = capsys.readouterr().err
    assert "global_step 10 is now 14, epoch 2.5 is now 3.5" in said
    assert "trainer_state.json: as of step" not in said
    mlx_steps(folder / "run", range(14, 16))
    assert back(folder) == (16, 4.0)
    assert back(folder, "--step", "20") == (20, 5.0)


def test_another_count_than_the_optimizers_stays_and_is_named(folder, capsys):
    write(folder / "there", 12)  # two steps were skipped
    convert(folder / "there", folder / "run", *MODEL)
    mlx_steps(folder / "run", range(10, 14))
    assert back(folder) == (12, 2.5)
    assert "trainer_state.json: as of step 10" in capsys.readouterr().err
    assert back(folder, "--step", "16")[0] == 16
    assert "trainer_state.json: as of step" not in capsys.readouterr().err


def test_a_step_that_nothing_takes_is_an_error(folder, capsys):
    (folder / "there" / "trainer_state.json").unlink()
    convert(folder / "there", folder / "run", *MODEL)
    flags = ["--torch-path", str(folder / "b"), "--mlx-path", str(folder / "run")]
    assert "this run has none" in fails(capsys, *flags, "--step", "3")
    assert not (folder / "b").exists()
    write(folder / "there", 10)
    again = ["--overwrite", "--to", "mlx"]
    convert(folder / "there", folder / "run", *MODEL, *again)
    assert "must be 0 or more" in fails(capsys, *flags, "--step", "-1")
