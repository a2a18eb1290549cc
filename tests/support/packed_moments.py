"""Optimizers that keep a moment in 8 bits, saved and restored: the tests share this.

Their state holds a list of arrays in the place of an array, and which parameters it is
done for is told by their size, not by the state.
"""

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_gradscale import LossScaleOptimizer, restore_checkpoint, save_checkpoint
from support.checkpoint_runs import Run, scaler
from support.helpers import Mlp


class PackedAdamW(optim.AdamW):
    """AdamW with its first moment in 8 bits, for parameters that are large."""

    group_size, smallest = 64, 4096

    def _pack(self, moment):
        return mx.quantize(moment.reshape(1, -1), group_size=self.group_size, bits=8)

    def init_single(self, parameter, state):
        super().init_single(parameter, state)
        if parameter.size >= self.smallest:
            state["m"] = self._pack(state["m"])

    def apply_single(self, gradient, parameter, state):
        if isinstance(state["m"], (list, tuple)):
            moment = mx.dequantize(*state["m"], group_size=self.group_size, bits=8)
            moment = moment.reshape(parameter.shape)
            state["m"] = mx.where(state["v"] == 0, 0.0, moment)
        updated = super().apply_single(gradient, parameter, state)
        if parameter.size >= self.smallest:
            state["m"] = self._pack(state["m"])
        return updated


def fresh(make, seed):
    mx.random.seed(seed)
    # One parameter of 4096 numbers, and smaller ones.
    model = Mlp(512, mx.float16)
    return Run(LossScaleOptimizer(make(), scaler()), dtype=mx.float16, model=model)


def check_resume(make, folder):
    """Ten steps at once, and five, saved, restored and five more: the same bits."""
    run = fresh(make, 0)
    run.train(0, 5)
    packed = run.optimizer.state["optimizer"]["layers"][0]["weight"]["m"]
    assert [x.dtype for x in packed] == [mx.uint32, mx.float32, mx.float32]
    assert run.optimizer.scaler.skipped_steps.item() == 1

    save_checkpoint(folder / "ours", *run.parts)
    first, second = mx.random.state[0].tolist()
    for name, tree in (("state", run.optimizer.state), ("model", run.model.state)):
        flat = {k: x for k, x in tree_flatten(tree) if isinstance(x, mx.array)}
        mx.save_safetensors(str(folder / f"{name}.safetensors"), flat)
    want = run.train(5, 10)

    again = fresh(make, 1)
    restore_checkpoint(folder / "ours", *again.parts)
    assert again.train(5, 10) == want

    by_hand = fresh(make, 2)
    by_hand.train(0, 1)  # compiled already
    by_hand.model.load_weights(str(folder / "model.safetensors"))
    state = mx.load(str(folder / "state.safetensors"))
    by_hand.optimizer.state = tree_unflatten(list(state.items()))
    mx.random.seed(first << 32 | second)
    assert by_hand.train(5, 10) == want
