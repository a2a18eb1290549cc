"""Writes checkpoints as other programs do: in tests/, python -m golden.sources.make.

    python -m golden.sources.make timm torchvision mmengine lightning
    python -m golden.sources.make nanogpt --nanogpt CLONE_OF_KARPATHY_NANOGPT

Each is written by the program itself after BEFORE steps (torchvision's by the lines of
its references/classification/train.py, which are in no package), and the losses of the
AFTER steps that PyTorch makes from there are in losses.json. The tests need none of
these programs.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from golden.sources.data import AFTER, BEFORE, tokens
from support.regression import batch, torch_net, torch_steps

HERE = Path(__file__).parent
torch.set_num_threads(1)


def timm(path):
    from timm.optim import create_optimizer_v2
    from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler

    net = torch_net()
    # Two groups: what is decayed comes last.
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-2, weight_decay=0.05)
    average, scaler = ModelEmaV3(net, decay=0.9), NativeScaler(device="cpu")
    settings = argparse.Namespace(model="net", opt="adamw", lr=1e-2, sched="cosine")
    settings.betas, settings.mean, settings.amp = None, (0.485, 0.456), True

    def steps(numbers):
        return torch_steps(net, optimizer, numbers, scaler._scaler, average.update)

    first = steps(range(BEFORE))
    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointSaver(
            *(net, optimizer, settings, average, scaler), checkpoint_dir=folder
        )
        saver.save_checkpoint(3, metric=71.5)
        shutil.copy(Path(folder) / "last.pth.tar", path)
    return first + steps(range(BEFORE, BEFORE + AFTER))


def name_torchvisions_operators():
    """What torchvision, which timm imports, asks for where its kernels do not load.

    By its plain name it comes for CUDA, also beside PyTorch for the CPU.
    """
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}() -> ()")
    return library  # with which they go


def torchvision(path):
    net = torch_net()
    # One group, as utils.set_weight_decay makes it by default.
    groups = [{"params": list(net.parameters()), "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def average(mean, value, _):
        return 0.9 * mean + 0.1 * value

    model_ema = torch.optim.swa_utils.AveragedModel(
        net, "cpu", average, use_buffers=True
    )
    args = argparse.Namespace(model="net", opt="sgd", lr=0.05, amp=True, epochs=90)

    def steps(numbers):
        after = model_ema.update_parameters
        return torch_steps(net, optimizer, numbers, scaler, after)

    first = steps(range(BEFORE))
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
        "epoch": 0,
        "args": args,
        "model_ema": model_ema.state_dict(),
        "scaler": scaler.state_dict(),
    }
    torch.save(checkpoint, path)
    return first + steps(range(BEFORE, BEFORE + AFTER))


def nanogpt(path):
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    model_args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    model_args |= {"bias": False, "vocab_size": 16, "dropout": 0.0}
    model = GPT(GPTConfig(**model_args))
    optimizer = model.configure_optimizers(1e-1, 1e-2, (0.9, 0.95), "cpu")
    compiled = torch.compile(model)  # never called: for the names only

    def steps(numbers):
        losses = []
        for number in numbers:
            x, y = map(torch.tensor, tokens(number))
            loss = model(x, y)[1]
            # In bfloat16 its scaler is disabled, and not in the checkpoint.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses

    first = steps(range(BEFORE))
    checkpoint = {
        "model": compiled.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": model_args,
        "iter_num": BEFORE,
        "best_val_loss": torch.tensor(2.5),
        "config": {"out_dir": "out", "dtype": "bfloat16", "compile": True},
    }
    torch.save(checkpoint, path)
    return first + steps(range(BEFORE, BEFORE + AFTER))


def mmengine(path):
    from mmengine.model import BaseModel
    from mmengine.optim import AmpOptimWrapper, OptimWrapper
    from mmengine.runner import Runner

    losses = []

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = torch_net()

        def forward(self, x, y, mode):
            loss = (self.net(x) - y).pow(2).mean()
            losses.append(loss.item())
            return {"loss": loss}

    class Wrapper(AmpOptimWrapper):
        """It asks for a GPU when it is made and cast; the rest is its own."""

        def __init__(self, optimizer):
            OptimWrapper.__init__(self, optimizer)
            self._scale_update_param = None
            self.loss_scaler = torch.amp.GradScaler("cpu")

        optim_context = OptimWrapper.optim_context

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return BEFORE + AFTER

        def __getitem__(self, number):
            return number

    def collate(numbers):
        x, y = map(torch.tensor, batch(numbers[0]))
        return {"x": x, "y": y}

    with tempfile.TemporaryDirectory() as folder:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        Runner(
            model,
            folder,
            torch.utils.data.DataLoader(Numbers(), 1, collate_fn=collate),
            train_cfg={"by_epoch": False, "max_iters": BEFORE + AFTER},
            optim_wrapper=Wrapper(optimizer),
            default_hooks={
                "checkpoint": {
                    "type": "CheckpointHook",
                    "interval": BEFORE,
                    "by_epoch": False,
                }
            },
            param_scheduler={"type": "MultiStepLR", "milestones": [90]},
            experiment_name="golden",
        ).train()
        shutil.copy(Path(folder) / f"iter_{BEFORE}.pth", path)
        _leave_out_folder(path, folder, "message_hub")
    return losses


def fit_with_lightning(folder, most, averaged, resume=None, first=0):
    """Train to ``most`` steps with a checkpoint at each tenth; return the losses."""
    import lightning as pl

    losses = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"lr": 1e-2, "root": Path("data")})
            self.model = torch_net()

        def training_step(self, number):
            x, y = map(torch.tensor, batch(int(number)))
            loss = (self.model(x) - y).pow(2).mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), 1e-2)

    known = pl.pytorch.callbacks
    # Not after fit: at its end the average takes the place of the model.
    save = known.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=BEFORE, save_top_k=-1
    )
    numbers = torch.utils.data.DataLoader(range(first, 100), batch_size=None)
    pl.Trainer(
        max_steps=most,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[save, *([known.EMAWeightAveraging(decay=0.9)] if averaged else [])],
    ).fit(Module(), numbers, ckpt_path=resume, weights_only=False)
    return losses


def lightning(path):
    with tempfile.TemporaryDirectory() as folder:
        losses = fit_with_lightning(folder, BEFORE + AFTER, averaged=True)
        shutil.copy(Path(folder) / f"step={BEFORE}.ckpt", path)
        _leave_out_folder(path, folder, "callbacks")
    return losses


def _leave_out_folder(path, folder, key):
    """They note where they saved; that was a temporary place."""
    checkpoint = torch.load(path, weights_only=False)

    def without(value):
        if isinstance(value, dict):
            items = ((without(k), without(v)) for k, v in value.items())
            return type(value)(items)
        return value.replace(folder, "runs") if isinstance(value, str) else value

    checkpoint[key] = without(checkpoint[key])
    torch.save(checkpoint, path)


SOURCES = {
    "timm": (timm, "timm.pth.tar"),
    "torchvision": (torchvision, "torchvision.pth"),
    "nanogpt": (nanogpt, "nanogpt.pt"),
    "mmengine": (mmengine, "mmengine.pth"),
    "lightning": (lightning, "lightning_ema.ckpt"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", choices=SOURCES)
    parser.add_argument("--nanogpt", help="its folder, with model.py")
    arguments = parser.parse_args()
    if arguments.nanogpt:
        sys.path.insert(0, arguments.nanogpt)
    kept = name_torchvisions_operators() if torch.version.cuda is None else None
    place = HERE / "losses.json"
    known = json.loads(place.read_text()) if place.exists() else {}
    for name in arguments.sources:
        make, file = SOURCES[name]
        known[name] = make(HERE / file)[BEFORE:]
        print(file, (HERE / file).stat().st_size, known[name][0], known[name][-1])
    place.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    del kept


if __name__ == "__main__":
    main()
