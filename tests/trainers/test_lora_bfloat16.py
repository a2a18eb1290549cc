"""``mlx_gradscale lora`` on a bfloat16 model, as README and docs/mlx_lm.md show it."""

import sys

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
import mlx_lm.lora
from mlx.utils import tree_flatten
from support.lora_parts import make_data, make_model

from mlx_gradscale.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:.*swig.*")


def test_full_fine_tuning_in_bfloat16_keeps_updates_that_mlx_lm_rounds_away(
    tmp_path, monkeypatch
):
    make_model(tmp_path / "model", dtype=mx.bfloat16)
    make_data(tmp_path / "data")
    before = mx.load(str(tmp_path / "model/model.safetensors"))
    assert {x.dtype for x in before.values()} == {mx.bfloat16}
    given = {
        "--fine-tune-type": "full",
        "--optimizer": "adamw",
        "--learning-rate": 1e-5,
        "--iters": 20,
        "--batch-size": 2,
        "--num-layers": 2,
        "--max-seq-length": 64,
        "--val-batches": 1,
        "--model": tmp_path / "model",
        "--data": tmp_path / "data",
    }
    flags = ["--train", *(str(x) for pair in given.items() for x in pair)]

    def moved(name):
        found = mx.load(str(tmp_path / name / "adapters.safetensors"))
        pairs = [(x, before[path]) for path, x in tree_flatten(found)]
        assert {x.dtype for x, _ in pairs} == {mx.bfloat16}
        changed = sum(mx.sum(x != old).item() for x, old in pairs)
        return changed / sum(old.size for _, old in pairs)

    arguments = [*flags, "--adapter-path"]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.lora", *arguments, str(tmp_path / "a")])
    mlx_lm.lora.main()
    assert main(["lora", *arguments, str(tmp_path / "b")]) == 0
    # Twenty updates of 1e-5 add up to 2e-4, and a bfloat16 weight of 0.1 has steps of
    # 5e-4. A single update changes only the smallest weights.
    assert moved("a") < 0.25
    assert moved("b") > 0.6
