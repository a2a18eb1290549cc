"""Folders of Accelerate and of Transformers' Trainer, written by themselves."""

import numpy as np
import pytest
from support.hf_trainer import train
from support.regression import (
    MODEL,
    TOLERANCE,
    assert_near,
    batch,
    convert,
    mlx_steps,
    torch_net,
    torch_steps,
)

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")


class Registered:
    """Something of the user's that Accelerate saves along."""

    count = 3

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Accelerated:
    def __init__(self):
        accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
        accelerate.state.AcceleratorState._reset_state(True)
        self.accelerator = accelerate.Accelerator(cpu=True)
        net = torch_net()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95**n)
        self.registered = Registered()
        self.accelerator.register_for_checkpointing(self.registered)
        prepared = self.accelerator.prepare(net, optimizer, schedule)
        self.net, self.optimizer, self.schedule = prepared

    def steps(self, numbers):
        losses = []
        for number in numbers:
            x, y = map(torch.tensor, batch(number))
            loss = (self.net(x) - y).pow(2).mean()
            self.optimizer.zero_grad()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("onto", ["new", "old"])
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_run_resumes_in_mlx_and_then_in_accelerate(safe, onto, tmp_path):
    run = Accelerated()
    run.steps(range(10))
    run.registered.count = 7
    run.accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    want = run.steps(range(10, 20))
    rate = lambda step: 1e-2 * 0.95**step  # noqa: E731
    back = tmp_path / ("back" if onto == "new" else "state")
    settings = {"learning_rate": rate}
    if safe:  # a safetensors file does not have the order of the parameters
        settings["options"] = {"names": [n for n, _ in torch_net().named_parameters()]}
    losses = mlx_steps(tmp_path / "state", back, range(10, 15), **settings)
    assert_near(losses, want[:5])
    assert {p.name for p in back.iterdir()} == {
        p.name for p in (tmp_path / "state").iterdir()
    }
    again = Accelerated()
    again.accelerator.load_state(back)
    assert again.registered.count == 7
    again.schedule.scheduler.last_epoch = 15  # as the note says
    assert_near(again.steps(range(15, 20)), want[5:])


class WithLoss(torch.nn.Module):
    """As the Trainer wants a model: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = torch_net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": (logits - labels).pow(2).mean(), "logits": logits}


def trainer(folder, most, resume=None):
    def item(number):
        x, y = batch(number, rows=1)
        return {"x": torch.tensor(x[0]), "labels": torch.tensor(y[0])}

    settings = {"save_steps": 10, "learning_rate": 1e-2, "weight_decay": 0.1}
    return train(WithLoss(), item, folder, most, resume, **settings)


def test_transformers_trainer_resumes_from_a_converted_checkpoint(tmp_path):
    whole, batches, losses = trainer(tmp_path / "whole", 20)
    want = whole.model.state_dict()
    trainer(tmp_path / "half", 10)
    there = tmp_path / "half" / "checkpoint-10"
    names = {p.name for p in there.iterdir()}
    assert {"rng_state.pth", "training_args.bin", "trainer_state.json"} <= names
    order = [name for name, _ in WithLoss().named_parameters()]
    (tmp_path / "names").write_text("\n".join(order))
    flags = ["--rename", r"^net\.=", "--names", tmp_path / "names"]
    convert(there, tmp_path / "run", *MODEL, *flags)
    back = tmp_path / "back" / "checkpoint-10"
    back.parent.mkdir()
    convert(back, tmp_path / "run")
    assert {p.name for p in back.iterdir()} == names
    for name in ("rng_state.pth", "training_args.bin", "trainer_state.json"):
        assert (back / name).read_bytes() == (there / name).read_bytes()
    found, *_ = trainer(tmp_path / "on", 20, resume=back)
    assert found.state.global_step == 20
    for name, tensor in found.model.state_dict().items():
        np.testing.assert_allclose(tensor, want[name], **TOLERANCE)

    # As many steps as the Trainer would have made: it goes on with the data after.
    def taken(number):
        return batches[number]["x"], batches[number]["labels"]

    # Its max_grad_norm is 1 by default.
    options = {"rename": lambda name: name.removeprefix("net."), "names": order}
    steps = {"data": taken, "max_norm": 1.0, "options": options}
    found = mlx_steps(there, back, range(10, 15), **steps)
    assert_near(found, losses[10:15])
    optimizer = torch.load(back / "optimizer.pt", weights_only=True)
    assert optimizer["state"][0]["step"] == 15
    again, _, found = trainer(tmp_path / "on", 20, resume=back)
    assert again.state.global_step == 20
    assert_near(found, losses[15:])


def test_lion_pytorch_run_resumes_in_mlx_and_then_in_pytorch(tmp_path):
    lion = pytest.importorskip("lion_pytorch", reason="needs lion-pytorch")
    net = torch_net()
    optimizer = lion.Lion(net.parameters(), lr=1e-3, weight_decay=0.1)
    torch_steps(net, optimizer, range(10))
    run = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run, tmp_path / "a.pt")
    want = torch_steps(net, optimizer, range(10, 20))
    losses = mlx_steps(tmp_path / "a.pt", tmp_path / "b.pt", range(10, 15))
    assert_near(losses, want[:5])
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    net.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    assert_near(torch_steps(net, optimizer, range(15, 20)), want[5:])
