"""Float32 layers in mlx-lm models: LoRA, checkpointing, quantization and caches."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.helpers import each_mode

from mlx_gradscale import GradScaler, LossScaleOptimizer, all_finite, float32_layers
from mlx_gradscale.core import intercept

mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
from mlx_lm.models import cache as caches  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.llama import TransformerBlock as Block  # noqa: E402
from mlx_lm.tuner.lora import LoRALinear  # noqa: E402
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers  # noqa: E402
from support.lora_parts import CONFIG  # noqa: E402

HALF = mx.float16
TOKENS = mx.arange(12)[None] % 32
LENGTHS = mx.array([[0, 12]])


def make_model(dtype=HALF, layers=3):
    """A Llama whose second block overflows float16 between its projections."""
    mx.random.seed(0)
    changes = {"vocab_size": 32, "num_hidden_layers": layers}
    config = CONFIG | changes | {"tie_word_embeddings": True}
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = mlp.up_proj.weight * 400
    mlp.gate_proj.weight = mlp.gate_proj.weight * 400
    mlp.down_proj.weight = mlp.down_proj.weight / 1e3
    model.set_dtype(HALF)
    model.set_dtype(dtype)
    return model


MLP = "model.layers.1.mlp"


def gradients(model):
    model.train()
    (loss, _), grads = nn.value_and_grad(model, default_loss)(model, TOKENS, LENGTHS)
    return loss.item(), grads


def relative(a, b):
    pairs = list(zip(tree_flatten(a), tree_flatten(b), strict=True))
    pairs = [[np.array(x.astype(mx.float32)) for _, x in pair] for pair in pairs]
    off = sum(((x - y) ** 2).sum() for x, y in pairs)
    return (off / sum((y**2).sum() for _, y in pairs)) ** 0.5


@pytest.fixture
def unpatched(monkeypatch):
    # mlx-lm's grad_checkpoint replaces __call__ for the whole process, and if the layer
    # is a float32 layer, in the subclass of all that have handlers.
    for cls in (Block, intercept._subclass_of(Block)):
        monkeypatch.setattr(cls, "__call__", cls.__call__)


@pytest.mark.parametrize("where", [MLP, "model.layers.0 to model.layers.1"])
def test_grad_checkpoint_and_float32_layers_give_the_same_gradients(where, unpatched):
    loss, expected = gradients(make_model(mx.float32))
    model = make_model()
    assert not all_finite(gradients(model)[1])
    float32_layers(model, where)
    plain = gradients(model)
    assert plain[0] == pytest.approx(loss, rel=1e-2)
    assert relative(plain[1], expected) < 0.02
    grad_checkpoint(model.layers[0])
    again = gradients(model)
    assert again[0] == plain[0]
    assert relative(again[1], plain[1]) < 2e-3
    assert {x.dtype for _, x in tree_flatten(again[1])} == {HALF}
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {HALF}


@each_mode
def test_checkpointed_float32_blocks_train_with_master_weights(compiled, unpatched):
    model = make_model(layers=2)
    float32_layers(model, "model.layers.1 to model.norm")
    grad_checkpoint(model.layers[0])
    model.freeze()
    model.model.layers[1].mlp.unfreeze()  # fewer kernels to compile
    optimizer = LossScaleOptimizer(optim.SGD(1e-3), GradScaler(16.0))
    loss_fn = optimizer.scale_loss(default_loss)
    optimizer.init(model.trainable_parameters())

    def step():
        (loss, _), grads = nn.value_and_grad(model, loss_fn)(model, TOKENS, LENGTHS)
        optimizer.update(model, grads)
        return loss

    if compiled:
        state = [model.state, optimizer.state]
        step = mx.compile(step, inputs=state, outputs=state)
    losses = [step().item() for _ in range(4)]
    assert losses[-1] < losses[0]
    assert optimizer.scaler.skipped_steps.item() == 0
    assert {x.dtype for _, x in tree_flatten(model.parameters())} == {HALF}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_can_be_added_to_float32_layers(dora):
    model = make_model()
    float32_layers(model, [MLP, "model.layers.2.self_attn.q_proj"])
    model.freeze()
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(model, 3, config, use_dora=dora)
    down = model.model.layers[1].mlp.down_proj
    assert type(down).__name__ == ("DoRALinear" if dora else "LoRALinear")
    _, grads = gradients(model)
    assert all_finite(grads)
    names = {path.rpartition(".")[2] for path, _ in tree_flatten(grads)}
    assert names == ({"lora_a", "lora_b", "m"} if dora else {"lora_a", "lora_b"})
    assert model(TOKENS).dtype == HALF
    assert isinstance(model.model.layers[2].self_attn.q_proj.linear, nn.Linear)
    if not dora:
        assert isinstance(down, LoRALinear)
        remove_lora_layers(model)
        assert all_finite(model(TOKENS))


@pytest.mark.parametrize("kind", [caches.KVCache, caches.ConcatenateKVCache])
def test_mlx_lm_caches_work_in_float32_layers(kind):
    def run(model):
        cache = [kind() for _ in model.layers]
        out = [model(TOKENS, cache=cache)]
        for token in range(6):
            out.append(model(mx.array([[token]]), cache=cache))
        return mx.concatenate(out, axis=1)

    expected = run(make_model(mx.float32))
    model = make_model()
    float32_layers(model, "model.layers.1 to model.norm")
    logits = run(model)
    assert logits.dtype == HALF
    assert relative({"logits": logits}, {"logits": expected}) < 0.02
