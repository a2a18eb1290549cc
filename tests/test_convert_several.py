"""Several models and optimizers in one checkpoint, converted together."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from convert_helpers import fails, identical, paths, small

from mlx_gradscale import (
    inspect,
    restore_checkpoint,
    save_checkpoint,
    torch_checkpoint,
)
from mlx_gradscale.convert import (
    Record,
    Run,
    RunError,
    load_run,
    main,
    read_run,
    save_run,
    write_run,
)

KEYS = ["--model-key", "nets/G,nets/D", "--optimizer-key", "opts/0,opts/1"]


def gan():
    (g, opt_g, scaler), (d, opt_d, _) = small(), small(5)
    opt_d["param_groups"][0]["lr"] = 0.5
    return {
        "nets": {"G": g, "D": d},
        "opts": [opt_g, opt_d],
        "amp": scaler,
        "epoch": 3,
        "fake": mx.ones((5, 5)),
    }


def test_both_go_there_and_back(tmp_path, capsys):
    where = paths(tmp_path, gan())
    assert "or several, with commas" in fails(capsys, *where)
    assert main([*where, *KEYS, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'run' / 'D' / 'optimizer.safetensors'}  new" in said
    assert main([*where, *KEYS]) == 0
    listed = {line.split()[0] for line in said.splitlines() if "  new" in line}
    assert listed == {str(p) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    run = read_run(tmp_path / "run")
    assert list(run.runs) == ["G", "D"]
    assert run.runs["D"].weights["fc.weight"][0, 0].item() == 5.0
    assert run.runs["D"].optimizer["learning_rate"].item() == 0.5
    assert run.runs["G"].scaler["scale"] == 512.0
    assert run.runs["D"].scaler is None
    assert inspect.main([str(tmp_path / "run")]) == 0
    assert "several MLX runs" in capsys.readouterr().out
    where[1] = str(tmp_path / "back.pt")
    assert main([*where, "--dry-run"]) == 0
    assert main(where) == 0
    identical(torch_checkpoint.load(tmp_path / "back.pt"), gan())
    assert main([*where[2:], "--torch-path", str(tmp_path / "a.pt"), *KEYS, "--to",
                 "mlx", "--overwrite"]) == 0  # fmt: skip


def test_each_is_loaded_and_saved_by_itself(tmp_path):
    torch = pytest.importorskip("torch")

    def data(number):
        rng = np.random.default_rng(number)
        return rng.standard_normal((4, 3)).astype(np.float32)

    torch.manual_seed(0)
    nets = {name: torch.nn.Linear(3, 1) for name in "GD"}
    optimizers = {
        name: torch.optim.Adam(net.parameters(), lr=0.1 * (i + 1))
        for i, (name, net) in enumerate(nets.items())
    }

    def step(number):
        losses = []
        for name, net in nets.items():
            loss = (net(torch.tensor(data(number))) - 1).pow(2).mean()
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses.append(loss.item())
        return losses

    def states():
        return {
            "nets": {name: net.state_dict() for name, net in nets.items()},
            "opts": [each.state_dict() for each in optimizers.values()],
        }

    step(0)
    torch.save(states(), tmp_path / "a.pt")
    want = [step(number) for number in (1, 2, 3, 4)]
    assert main([*paths(tmp_path), *KEYS]) == 0
    found = []
    for name in "GD":
        folder, model = tmp_path / "run" / name, nn.Linear(3, 1)
        run = load_run(folder, model)
        value_and_grad = nn.value_and_grad(
            model, lambda x, m=model: ((m(x) - 1) ** 2).mean()
        )
        losses = []
        for number in (1, 2):
            loss, grads = value_and_grad(mx.array(data(number)))
            run.optimizer.update(model, grads)
            losses.append(loss.item())
        found.append(losses)
        save_run(folder, model, run.optimizer, record=run.record)
    np.testing.assert_allclose(np.transpose(found), want[:2], rtol=1e-5, atol=1e-6)
    where = paths(tmp_path)
    where[1] = str(tmp_path / "back.pt")
    assert main(where) == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    for i, (name, net) in enumerate(nets.items()):
        net.load_state_dict(back["nets"][name])
        optimizers[name].load_state_dict(back["opts"][i])
    again = [step(number) for number in (3, 4)]
    np.testing.assert_allclose(again, want[2:], rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_told(tmp_path, capsys):
    where = paths(tmp_path, gan())
    model = ["--model-key", "nets/G,nets/D"]
    assert "could be the optimizer" in fails(capsys, *where, *model)
    one = [*model, "--optimizer-key", "opts/0,opts/1,opts/1"]
    assert "names more than" in fails(capsys, *where, *one)
    twice = ["--model-key", "nets/G,nets/G", "--optimizer-key", ""]
    assert "one comes twice" in fails(capsys, *where, *twice)
    flag = ["--model", "convert_helpers:Small"]
    assert "2 models are named" in fails(capsys, *where, *KEYS, *flag)
    both = ["--model", "convert_helpers:Small,convert_helpers:Small"]
    assert main([*where, *KEYS, *both]) == 0
    with pytest.raises(RunError, match="several runs, G, D"):
        load_run(tmp_path / "run", nn.Linear(3, 2))
    like = ["--like", str(tmp_path / "a.pt"), "--to", "torch", "--overwrite"]
    assert "--like is for one run" in fails(capsys, *where, *like)


@pytest.mark.parametrize("name", ["..", "../run", "/etc", "", "a/b"])
def test_a_record_names_no_runs_elsewhere(name, tmp_path, capsys):
    where = paths(tmp_path, gan())
    assert main([*where, *KEYS]) == 0
    training = tmp_path / "run" / "training.json"
    record = json.loads(training.read_text())
    record["several"][1] = name
    training.write_text(json.dumps(record))
    with pytest.raises(RunError, match="is damaged"):
        read_run(tmp_path / "run")
    record["several"] = ["G", "."]
    training.write_text(json.dumps(record))
    with pytest.raises(RunError):
        read_run(tmp_path / "run")


def test_a_run_in_itself_is_an_error(tmp_path):
    where = paths(tmp_path, gan())
    assert main([*where, *KEYS]) == 0
    (tmp_path / "run" / "loop").symlink_to(".")
    training = tmp_path / "run" / "training.json"
    record = json.loads(training.read_text())
    record["several"] = ["G", "loop"]
    training.write_text(json.dumps(record))
    with pytest.raises(RunError):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("name", ["..", "../other", "a/b"])
def test_no_run_is_written_elsewhere(name, tmp_path):
    runs = {name: Run({"w": mx.ones(2)})}
    with pytest.raises(ValueError, match="no plain name"):
        write_run(tmp_path / "run", Run(record=Record({}), runs=runs))
    assert list(tmp_path.iterdir()) == []


def test_our_own_checkpoint_may_take_the_place_of_several(tmp_path):
    assert main([*paths(tmp_path, gan()), *KEYS]) == 0
    model, optimizer = nn.Linear(3, 2), optim.SGD(0.1)
    save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    assert restore_checkpoint(tmp_path / "run", model, optimizer) == {"step": 1}
    found = read_run(tmp_path / "run")
    assert (found.runs, found.record.checkpoint) == ({}, None)
