"""Five small models whose forward pass overflows in float16, as in real models.

Each model learns sequences that repeatedly count from 0 to their first number. All
models train in float32. In float16, they fail at any loss scale, each for one reason:

    residual   a residual stream above 65504, as in Gemma 3
    mlp        a gated feed-forward layer whose product is above 65504, as in T5
    attention  attention scores above 65504 before scaling
    loss       a loss that is reduced in float16
    norm       a norm whose mean of squares is above 65504
"""

import mlx.core as mx
import mlx.nn as nn

NUMBERS, LENGTH, WIDTH, LAYERS = 16, 16, 32, 6


class Norm(nn.Module):
    """RMSNorm as it is often written by hand: in the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.weight = mx.ones(WIDTH)

    def __call__(self, x):
        return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True)) * self.weight


class Attention(nn.Module):
    """Attention that scales its scores only after the product, which may overflow."""

    def __init__(self, scale=WIDTH**-0.5):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = scale

    def __call__(self, x, mask):
        scores = self.query(x) @ self.key(x).swapaxes(-1, -2) * self.scale
        return self.out(mx.softmax(scores + mask, axis=-1) @ self.value(x))


class GatedMlp(nn.Module):
    """A gated layer whose hidden values are ``gain`` times larger than necessary."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gain = gain

    def __call__(self, x):
        hidden = nn.gelu(self.gate(x)) * self.up(x) * self.gain
        return self.down(hidden) / self.gain


class Block(nn.Module):
    """A block with norms before and after each layer, as in Gemma."""

    def __init__(self, norm):
        super().__init__()
        self.norms = [norm() for _ in range(4)]
        self.attention = Attention()
        self.mlp = GatedMlp()

    def __call__(self, x, mask):
        before, after, before_mlp, after_mlp = self.norms
        x = x + after(self.attention(before(x), mask))
        return x + after_mlp(self.mlp(before_mlp(x)))


class Transformer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, WIDTH)
        self.embed.weight *= 4
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(norm) for _ in range(LAYERS)]
        self.norm = norm()
        self.head = nn.Linear(WIDTH, NUMBERS)

    def __call__(self, tokens):
        n = tokens.shape[1]
        x = self.embed(tokens) + self.positions(mx.arange(n))
        mask = nn.MultiHeadAttention.create_additive_causal_mask(n, x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make_transformer(norm=lambda: nn.RMSNorm(WIDTH)):
    mx.random.seed(0)
    return Transformer(norm)


def cross_entropy(model):
    def loss_fn(tokens, targets):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    return loss_fn


def residual():
    model = make_transformer()
    model.blocks[-1].norms[3].weight *= 6e4
    return model, cross_entropy(model)


def mlp():
    model = make_transformer()
    model.blocks[LAYERS // 2].mlp.gain = 1e5
    return model, cross_entropy(model)


def attention():
    model = make_transformer()
    layer = model.blocks[LAYERS // 2].attention
    layer.query.weight *= 200
    layer.key.weight *= 200
    layer.scale /= 200**2
    return model, cross_entropy(model)


def loss():
    model = make_transformer()

    def loss_fn(tokens, targets):
        wanted = 40 * mx.eye(NUMBERS)[targets].astype(model.head.weight.dtype)
        return mx.mean(mx.square(model(tokens) - wanted))

    return model, loss_fn


def norm():
    model = make_transformer(Norm)
    model.blocks[-2].norms[3].weight *= 1e3
    return model, cross_entropy(model)


MODELS = {f.__name__: f for f in (residual, mlp, attention, loss, norm)}


def batch(seed, size=16):
    """Return sequences and the next numbers. About one number in five is random."""
    keys = mx.random.split(mx.random.key(seed), 3)
    most = mx.random.randint(2, NUMBERS, (size, 1), key=keys[0])
    numbers = mx.concatenate([most, mx.arange(LENGTH) % (most + 1)], axis=1)
    any_number = mx.random.randint(0, NUMBERS, numbers.shape, key=keys[1])
    numbers = mx.where(
        mx.random.bernoulli(0.2, numbers.shape, key=keys[2]), any_number, numbers
    )
    return numbers[:, :-1], numbers[:, 1:]
