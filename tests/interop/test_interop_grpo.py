"""mlx-lm-lora's GRPO, some versions of which abort at the first overflow."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest

pytest.importorskip("mlx_lm", reason="needs mlx-lm")
from mlx_lm import load
from support.lora_parts import make_model

from mlx_gradscale import everywhere

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, LENGTH = 5, 8
PROMPTS = ["One and one is", "The first letter is", "Two and two is"]


@pytest.fixture
def grpo(monkeypatch):
    # It asks for a limit that only Apple's GPUs have.
    info = {"max_recommended_working_set_size": 0}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: None)
    return pytest.importorskip(
        "mlx_lm_lora.trainer.grpo_trainer", reason="needs the extra interop"
    )


def long_words(prompts, completions, answer, types=None):
    return [float(sum(c.isalpha() for c in text)) for text in completions]


def train(grpo, folder):
    """Its whole loop: rollouts, rewards, its loss, its check, its update."""
    model, tokenizer = load(str(folder / "model"))
    rows = [(tokenizer.encode(text), [3], text, "3") for text in PROMPTS]
    arguments = grpo.GRPOTrainingArgs(
        batch_size=1,
        iters=STEPS,
        max_completion_length=LENGTH,
        beta=0.0,
        adapter_file=str(folder / "adapters.safetensors"),
    )
    with everywhere() as here:
        grpo.train_grpo(
            *(model, None, tokenizer, optim.AdamW(1e-4), rows),
            reward_funcs=[long_words],
            args=arguments,
        )
    return here.report()


def test_it_gets_through_where_the_scale_is_found_before_the_first_step(grpo, tmp_path):
    make_model(tmp_path / "model")
    scale, steps = train(grpo, tmp_path)
    assert " 0 of " in scale
    assert steps == f"AdamW: {STEPS} steps applied, 0 skipped"
