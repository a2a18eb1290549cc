"""LoRA adapters of PEFT, trained by Transformers' Trainer, in mlx-lm and back."""

import numpy as np
import pytest
from support.hf_trainer import llama, mlx_lm_steps, train

from mlx_gradscale.convert import load_torch, save_torch
from mlx_gradscale.convert.command import _mlx_lm_model as mlx_lm_model

torch = pytest.importorskip("torch", reason="needs PyTorch")
peft = pytest.importorskip("peft", reason="needs peft")
tuner = pytest.importorskip("mlx_lm.tuner.utils", reason="needs mlx-lm")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 4, 8


def base_model():
    torch.manual_seed(0)
    return llama()


def train_adapters(folder, most, resume=None):
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(base_model(), config)

    def item(number):
        rng = np.random.default_rng(number)
        x = torch.tensor(rng.integers(0, 32, 8))
        return {"input_ids": x, "labels": x}

    settings = {"save_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.0}
    return train(model, item, folder, most, resume, **settings)


def test_peft_lora_run_resumes_in_mlx_lm_and_then_in_the_trainer(tmp_path):
    made, batches, want = train_adapters(tmp_path / "whole", 9)
    parameters = made.model.named_parameters()
    names = [name for name, p in parameters if p.requires_grad]
    base = base_model()
    base.save_pretrained(tmp_path / "base")
    text = base.config.to_json_string(use_diff=False)
    (tmp_path / "base/config.json").write_text(text)

    mine = mlx_lm_model(tmp_path / "base")
    load_torch(tmp_path / "base", mine)
    mine.freeze()
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    config = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0, "keys": keys}
    tuner.linear_to_lora_layers(mine, 2, config)
    there = tmp_path / "whole/checkpoint-3"
    run = load_torch(there, mine, names=names)
    taken = [batch["input_ids"] for batch in batches[3:6]]
    losses = mlx_lm_steps(mine, run.optimizer, taken)
    np.testing.assert_allclose(losses, want[3:6], rtol=1e-4)

    back = tmp_path / "back/checkpoint-6"
    back.parent.mkdir()
    save_torch(back, mine, run.optimizer, like=there, names=names)
    *_, after = train_adapters(tmp_path / "on", 9, resume=back)
    np.testing.assert_allclose(after, want[6:], rtol=1e-4)
