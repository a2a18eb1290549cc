"""LoRA adapters of PEFT, trained by Transformers' Trainer, in mlx-lm and back."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_gradscale.convert import Options, load_torch, save_torch
from mlx_gradscale.convert.command import _mlx_lm_model as mlx_lm_model

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
tuner = pytest.importorskip("mlx_lm.tuner.utils", reason="needs mlx-lm")
pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 4, 8


def base_model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=32)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def train(folder, most, resume=None):
    """Train adapters to a number of steps; return the model, batches and losses."""
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(base_model(), config)
    seen = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, **others):
            loss = super().compute_loss(model, inputs, **others)
            seen.append((inputs["input_ids"].numpy(), loss.item()))
            return loss

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, number):
            rng = np.random.default_rng(number)
            x = torch.tensor(rng.integers(0, 32, 8))
            return {"input_ids": x, "labels": x}

    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=most,
        save_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    made = Trainer(model, arguments, train_dataset=Data())
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, seen


def test_lora_of_a_trainer_continues_in_mlx_lm_and_resumes(tmp_path):
    model, seen = train(tmp_path / "whole", 9)
    batches, want = zip(*seen, strict=True)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
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
    run = load_torch(there, mine, Options(names=tuple(names)))

    def loss_fn(x):
        logits = mine(x)[:, :-1]
        return nn.losses.cross_entropy(logits, x[:, 1:], reduction="mean")

    losses = []
    for number in range(3, 6):
        x = mx.array(batches[number])
        loss, grads = nn.value_and_grad(mine, loss_fn)(x)
        run.optimizer.update(mine, grads)
        losses.append(loss.item())
    np.testing.assert_allclose(losses, want[3:6], rtol=1e-4)

    back = tmp_path / "back/checkpoint-6"
    back.parent.mkdir()
    save_torch(back, mine, run.optimizer, like=run.template)
    _, after = train(tmp_path / "on", 9, resume=back)
    np.testing.assert_allclose([loss for _, loss in after], want[6:], rtol=1e-4)
