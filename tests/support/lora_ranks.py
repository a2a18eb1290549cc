"""What one rank does in test_lora.py: python lora_ranks.py FOLDER ARGUMENTS..."""

import json
import sys
from pathlib import Path

# To import PyTorch takes longer than to train, and mlx-lm needs nothing of it.
sys.modules["torch"] = None

import mlx.core as mx  # noqa: E402
from distributed_parts import fingerprint  # noqa: E402

from mlx_gradscale.lora import command  # noqa: E402
from mlx_gradscale.lora.training import Training  # noqa: E402


class Kept(Training):
    """The training of a command, to be looked at afterwards."""

    def train(self, **arguments):
        super().train(**arguments)
        Kept.last = self


def run(folder, *arguments):
    command.Training = Kept
    code = command.main(arguments)
    rank = mx.distributed.init().rank()
    optimizer = Kept.last._optimizer
    report = {
        "code": code,
        "size": mx.distributed.init().size(),
        "weights": fingerprint(Kept.last._model.trainable_parameters()),
        "norm": optimizer.grad_norm.item(),
        "skipped": optimizer.scaler.skipped_steps.item(),
        "scale": optimizer.scaler.get_scale(),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(*sys.argv[1:])
