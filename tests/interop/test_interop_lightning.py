"""Lightning's checkpoints, with and without an average of the weights."""

import pytest
from support.regression import assert_near, batch, mlx_steps, torch_net

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder, most, averaged, resume=None):
    """Trains to a number of steps, with a checkpoint at each tenth; the losses."""
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch_net()
            self.losses = []

        def training_step(self, number):
            x, y = map(torch.tensor, batch(int(number)))
            loss = (self.model(x) - y).pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), 1e-2)

    known = lightning.pytorch.callbacks
    # Not after fit: at its end the average takes the place of the model.
    callbacks = [
        known.ModelCheckpoint(folder, "{step}", every_n_train_steps=10, save_top_k=-1)
    ]
    if averaged:
        callbacks.append(known.EMAWeightAveraging(decay=0.9))
    trainer = lightning.Trainer(
        max_steps=most,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    module = Module()
    # Lightning counts on from step 10, five of which were MLX's.
    start = 15 if resume else 0
    numbers = torch.utils.data.DataLoader(range(start, 100), batch_size=None)
    trainer.fit(module, numbers, ckpt_path=resume)
    return module.losses


@pytest.mark.parametrize("averaged", [False, True])
def test_lightning_continues_in_mlx_and_back(averaged, tmp_path):
    want, path = fit(tmp_path, 20, averaged), tmp_path / "step=10.ckpt"
    losses = mlx_steps(path, tmp_path / "back.ckpt", range(10, 15))
    assert_near(losses, want[10:15])
    back = torch.load(tmp_path / "back.ckpt", weights_only=False)
    before = torch.load(path, weights_only=False)
    assert back.keys() == before.keys()
    losses = fit(tmp_path, 15, averaged, resume=tmp_path / "back.ckpt")
    assert_near(losses[:5], want[15:20])
