"""Models of mlx-lm have the same gradients when their layers are recomputed."""

import dataclasses
import importlib
from ast import literal_eval

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_gradscale import grad_checkpoint

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

# Small configurations: a value, and the fields that have it.
FIELDS = """
1 n_shared_experts n_group topk_group first_k_dense_replace decoder_sparse_step
1 num_kv_reuse_layers num_shared_experts group_norm_size num_dense_layers n_groups
1 mamba_n_groups attn_layer_offset expert_layer_offset moe_layer_start_index
2 num_key_value_heads num_experts_per_tok linear_num_key_heads num_kv_heads
2 layer_group_size mamba_expand attn_layer_period expert_layer_period
2 full_attention_interval sliding_window_pattern
3 num_hidden_layers n_layer num_layers conv_L_cache
4 num_attention_heads n_head num_heads num_experts n_routed_experts rotary_dim
4 num_local_experts qk_rope_head_dim conv_kernel time_step_rank mamba_d_conv
4 linear_num_value_heads linear_conv_kernel_dim moe_num_experts mamba_num_heads
4 mamba_n_heads
8 head_dim kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim sliding_window
8 state_size query_pre_attn_scalar linear_key_head_dim linear_value_head_dim
8 block_multiple_of mamba_d_state mamba_d_head mamba_chunk_size mamba_head_dim
8 ssm_state_size kv_channels attention_window_size
16 moe_intermediate_size shared_expert_intermediate_size
32 hidden_size n_embd hidden_dim block_dim mamba_d_ssm
48 intermediate_size block_ff_dim
64 vocab_size max_position_embeddings n_positions n_ctx
0.5 partial_rotary_factor
1.0 logits_scaling attention_multiplier embedding_multiplier residual_multiplier
1.0 block_ffn_dim_multiplier routed_scaling_factor
1e4 rope_theta
1e-5 rms_norm_eps norm_eps layer_norm_epsilon layer_norm_eps norm_epsilon
False use_bias attention_bias mlp_bias conv_bias block_auto_adjust_ff_dim
False mamba_proj_bias qkv_bias
True use_conv_bias norm_topk_prob tie_word_embeddings post_norm qk_norm use_qk_norm
True mamba_conv_bias
"""
CONFIG = {
    **{
        k: literal_eval(x)
        for x, *keys in map(str.split, FIELDS.split("\n")[1:-1])
        for k in keys
    },
    "hidden_act": "silu",
    "hybrid_override_pattern": "M*M",
    "is_moe_layer": [False, True, True],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "mlp_only_layers": [],
    "rope_scaling": None,
    "time_step_limit": (0.0, 10.0),
}
# All that these fields describe, and that differentiate on a CPU.
ARCHITECTURES = (
    "Klear afm7 afmoe apertus bailing_hybrid bailing_moe bailing_moe_linear "
    "bailing_moe_v3 cohere cohere2 deepseek deepseek_v3 deepseek_v32 dots1 ernie4_5 "
    "ernie4_5_moe exaone exaone_moe falcon_h1 gear gemma gemma2 gemma3_text glm glm4 "
    "glm4_moe glm4_moe_lite gpt2 gpt_oss gptj granite granitemoe helium "
    "hunyuan_v1_dense internlm2 internlm3 jamba laguna lfm2 llama mamba mamba2 mimo "
    "mixtral muse_glimmer nanbeige nanochat nemotron nemotron_h olmo2 olmo3 olmoe phi "
    "phi3 phimoe plamo2 plamo3 qwen qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next "
    "seed_oss smollm3 solar_open starcoder2 talkie telechat3 youtu_llm "
)
TOKENS = mx.array([[1, 5, 9, 3, 7, 2, 8, 4]])


def make_model(name):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    fields = {field.name for field in dataclasses.fields(module.ModelArgs)}
    config = {key: value for key, value in CONFIG.items() if key in fields}
    mx.random.seed(0)
    return module.Model(module.ModelArgs.from_dict(config | {"model_type": name}))


def differentiate(model):
    def loss_fn(tokens):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens).mean()

    loss, gradients = nn.value_and_grad(model, loss_fn)(TOKENS)
    return loss, dict(tree_flatten(gradients))


@pytest.mark.parametrize("name", ARCHITECTURES.split())
def test_recomputed_model_of_mlx_lm_has_its_plain_gradients(name):
    model = make_model(name)
    loss, wanted = differentiate(model)
    with grad_checkpoint(model):
        recomputed_loss, found = differentiate(model)
    assert loss.item() == recomputed_loss.item()
    assert found.keys() == wanted.keys()
    assert any(mx.any(x).item() for x in wanted.values())
    for path, x in wanted.items():
        largest = mx.abs(x).max().item()
        assert mx.allclose(found[path], x, rtol=1e-3, atol=1e-5 * largest), path
