"""What one rank does in test_lora.py: python lora_ranks.py FOLDER ARGUMENTS..."""

import json
import sys
from pathlib import Path

# To import PyTorch takes longer than to train, and mlx-lm needs nothing of it.
sys.modules["torch"] = None

import mlx.core as mx  # noqa: E402

from mlx_gradscale.trainers import lora_training  # noqa: E402
from mlx_gradscale.trainers.lora import main  # noqa: E402
from support.distributed_parts import fingerprint  # noqa: E402


class Kept(lora_training.Training):
    """The training of a command, to be looked at afterwards."""

    def train(self, train, **arguments):
        super().train(train, **arguments)
        Kept.last, Kept.model = self, arguments["model"]


def run(folder, *arguments):
    lora_training.Training = Kept
    code = main(arguments)
    world, optimizer = mx.distributed.init(), Kept.last.optimizer
    report = {
        "code": code,
        "size": world.size(),
        "weights": fingerprint(Kept.model.trainable_parameters()),
        "norm": optimizer.grad_norm.item(),
        "skipped": optimizer.scaler.skipped_steps.item(),
        "scale": optimizer.scaler.get_scale(),
    }
    (Path(folder) / f"{world.rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(*sys.argv[1:])
