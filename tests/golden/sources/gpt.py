"""nanoGPT's model in MLX, by its names; and its loss in PyTorch, of its parameters."""

import mlx.core as mx
import mlx.nn as nn
from golden.sources.data import LENGTH, TOKENS

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def __call__(self, x):
        rows, length, _ = x.shape
        parts = self.c_attn(x).reshape(rows, length, 3, HEADS, -1)
        q, k, v = parts.transpose(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** -0.5
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        return self.c_proj(y.transpose(0, 2, 1, 3).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def __call__(self, x):
        return self.c_proj(nn.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = Mlp()

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(TOKENS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = [Block()]
        self.ln_f = nn.LayerNorm(WIDTH, bias=False)

    def __call__(self, x):
        x = self.wte(x) + self.wpe(mx.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.as_linear(self.ln_f(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Transformer()

    def __call__(self, x):
        return self.transformer(x)


def torch_loss(parameters, x, y):
    """The loss that nanoGPT's own model gives; ``lm_head.weight`` is ``wte``'s."""
    from torch.nn import functional as f

    def get(name):
        return parameters[f"transformer.{name}.weight"]

    def norm(name, x):
        return f.layer_norm(x, (WIDTH,), get(name), eps=1e-5)

    h = get("wte")[x] + get("wpe")[: x.shape[1]]
    parts = f.linear(norm("h.0.ln_1", h), get("h.0.attn.c_attn")).split(WIDTH, -1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    heads = f.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + f.linear(heads.transpose(1, 2).flatten(-2), get("h.0.attn.c_proj"))
    inner = f.gelu(f.linear(norm("h.0.ln_2", h), get("h.0.mlp.c_fc")))
    h = h + f.linear(inner, get("h.0.mlp.c_proj"))
    logits = f.linear(norm("ln_f", h), get("wte"))
    return f.cross_entropy(logits.flatten(0, 1), y.flatten())
