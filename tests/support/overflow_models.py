"""Thirteen tiny models and losses whose values overflow, or seem to, in float16.

Each function returns a model in float32 and its loss function. ``batch(name, dtype)``
returns the arguments of the loss. All of them train in float32.
"""

import mlx.core as mx
import mlx.nn as nn

TOKENS, LENGTH, WIDTH = 16, 8, 16


class OwnNorm(nn.Module):
    """RMSNorm as written by hand; ``by_sum`` divides after the sum."""

    def __init__(self, by_sum=False):
        super().__init__()
        self.weight = mx.ones(WIDTH)
        self.by_sum = by_sum

    def __call__(self, x):
        if self.by_sum:
            norm = mx.sqrt((x * x).sum(axis=-1, keepdims=True)) / WIDTH**0.5
            return x / norm * self.weight
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x * mx.rsqrt(mean + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norms = [norm(), norm()]
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in "abc")
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gain = self.mask = None

    def __call__(self, x):
        h = self.norms[0](x)
        scores = self.query(h) @ self.key(h).swapaxes(-1, -2) / WIDTH**0.5
        if self.mask is not None:
            future = mx.triu(mx.full((LENGTH, LENGTH), self.mask), 1)
            scores = scores + future.astype(scores.dtype)
        x = x + mx.softmax(scores, axis=-1) @ self.value(h)
        hidden = nn.relu(self.up(self.norms[1](x)))
        if self.gain is not None:
            return x + self.down(hidden * self.gain) / self.gain
        return x + self.down(hidden)


class Transformer(nn.Module):
    def __init__(self, norm=lambda: nn.RMSNorm(WIDTH)):
        super().__init__()
        mx.random.seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = [Block(norm) for _ in range(2)]
        self.norm = norm()
        self.head = nn.Linear(WIDTH, TOKENS)
        self.scale = None

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x if self.scale is None else x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Mlp(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        mx.random.seed(0)
        make = [nn.Linear(8, 32), *layers, nn.Tanh(), nn.Linear(32, 8)]
        self.layers = make

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cross_entropy(model):
    def loss_fn(tokens, targets):
        logits = model(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits, targets, reduction="mean")

    return model, loss_fn


def squares(model):
    def loss_fn(x, y):
        return (model(x).astype(mx.float32) - y.astype(mx.float32)).square().mean()

    return model, loss_fn


def residual():
    model = Transformer()
    model.scale = 1e6
    return cross_entropy(model)


def large_weights():
    model = Transformer()
    model.blocks[1].up.weight *= 2e5
    model.blocks[1].down.weight *= 1e-5
    return cross_entropy(model)


def large_constant():
    model = Transformer()
    model.blocks[1].gain = 5e5
    return cross_entropy(model)


def own_norm():
    model = Transformer(OwnNorm)
    model.embed.weight *= 3e3
    return cross_entropy(model)


def norm_by_sum():
    model = Transformer(lambda: OwnNorm(by_sum=True))
    model.embed.weight *= 1e3
    return cross_entropy(model)


def mask():
    model = Transformer()
    model.blocks[0].mask = model.blocks[1].mask = -1e9
    return cross_entropy(model)


def attention_scores():
    model = Transformer()
    model.blocks[0].query.weight *= 600
    model.blocks[0].key.weight *= 600
    return cross_entropy(model)


def batch_norm():
    model = Mlp(nn.BatchNorm(32))
    model.layers[0].weight *= 2e3
    return squares(model)


def cosine():
    model = Mlp()
    model.layers[-1].weight *= 2e-3
    model.layers[-1].bias *= 0

    def loss_fn(x, y):
        out, y = model(x), y.astype(x.dtype)
        norms = mx.sqrt((out * out).sum(-1)) * mx.sqrt((y * y).sum(-1))
        return 1 - ((out * y).sum(-1) / norms).astype(mx.float32).mean()

    return model, loss_fn


def kl_divergence():
    model = Mlp()
    model.layers[-1].bias = mx.array([0.0] * 4 + [12.0] * 4)

    def loss_fn(x, y):
        mean, log_variance = mx.split(model(x), 2, axis=-1)
        kl = mx.exp(log_variance) + mean * mean - 1 - log_variance
        return kl.astype(mx.float32).mean()

    return model, loss_fn


def log_of_softmax():
    model = Mlp()
    model.layers[-1].weight *= 60

    def loss_fn(x, y):
        chosen = mx.softmax(model(x), axis=-1)[:, 0]
        return -mx.log(chosen + 1e-8).astype(mx.float32).mean()

    return model, loss_fn


def sum_of_squares():
    model = Mlp()
    return model, lambda x, y: (model(x) - 50 * y.astype(x.dtype)).square().sum()


def large_targets():
    model = Mlp()
    return model, lambda x, y: (model(x) - 500 * y.astype(x.dtype)).square().mean()


MODELS = {
    f.__name__: f
    for f in (
        residual,
        large_weights,
        large_constant,
        own_norm,
        norm_by_sum,
        mask,
        attention_scores,
        batch_norm,
        cosine,
        kl_divergence,
        log_of_softmax,
        sum_of_squares,
        large_targets,
    )
}


def batch(model, seed=0):
    """Return a batch in the dtype of the model."""
    keys = mx.random.split(mx.random.key(seed))
    if isinstance(model, Transformer):
        first = mx.random.randint(0, TOKENS, (16, 1), key=keys[0])
        tokens = (first + mx.arange(LENGTH + 1)) % TOKENS
        return tokens[:, :-1], tokens[:, 1:]
    x = mx.random.normal((32, 8), key=keys[0])
    y = mx.roll(x, 1, axis=1)
    dtype = model.layers[0].weight.dtype
    return x.astype(dtype), y.astype(dtype)
