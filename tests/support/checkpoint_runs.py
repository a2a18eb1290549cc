"""Small runs of every kind, to save, restore and compare bit for bit."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, LossScaleOptimizer, MasterWeightOptimizer
from support.distributed_parts import fingerprint
from support.helpers import Traced, batch, multi


class Net(nn.Module):
    """Buffers, randomness, a list with a frozen layer in it."""

    def __init__(self, dtype=mx.float32, norm=True):
        super().__init__()
        self.layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)]
        self.norm = nn.BatchNorm(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.2)
        self.set_dtype(dtype)
        self.layers[1].freeze()

    def __call__(self, x):
        x = self.dropout(self.norm(self.layers[0](x)))
        return self.layers[2](self.layers[1](x))


class Run:
    """A model, its optimizer and a compiled step."""

    def __init__(self, optimizer, scaler=None, dtype=mx.float32, model=None):
        self.model = Net(dtype) if model is None else model
        self.optimizer, self.scaler, self.dtype = optimizer, scaler, dtype
        self.traced = Traced(self._step)
        # As mlx-lm's trainer does it: once, before the first step.
        state = [self.model.state, optimizer.state, mx.random.state]
        state += [] if scaler is None else [scaler.state]
        self.state = state
        self.step = mx.compile(self.traced, inputs=state, outputs=state)

    def _step(self, x, y):
        loss_fn = self._loss
        if hasattr(self.optimizer, "scale_loss"):
            loss_fn = self.optimizer.scale_loss(loss_fn, self.model)
        if self.scaler is None:
            loss, grads = nn.value_and_grad(self.model, loss_fn)(x, y)
            self.optimizer.update(self.model, grads)
        else:
            value_and_grad = self.scaler.value_and_grad(self.model, loss_fn, mx.float16)
            loss, grads = value_and_grad(x, y)
            self.scaler.minimize(self.optimizer, self.model, grads)
        return loss

    def _loss(self, x, y):
        return mx.mean(mx.square(self.model(x).astype(mx.float32) - y))

    def train(self, start, stop):
        """Take steps; return their losses and what the run is then."""
        losses = []
        for i in range(start, stop):
            x, y = batch(i, 8, self.dtype)
            # One step in five overflows where anything is float16.
            loss = self.step(x * (1e5 if i % 5 == 4 else 1), y)
            mx.eval(loss, self.state)
            losses.append(loss.item().hex())
        return losses, self.fingerprint()

    def fingerprint(self):
        parts = [self.model.parameters(), self.optimizer.state, list(mx.random.state)]
        return fingerprint([*parts, self.scaler.state if self.scaler else []])

    @property
    def parts(self):
        return self.model, self.optimizer, self.scaler


def scaler():
    return GradScaler(init_scale=2.0**10, growth_interval=3)


def half(optimizer, norm=True, **options):
    wrapped = LossScaleOptimizer(optimizer, scaler(), **options)
    return Run(wrapped, dtype=mx.float16, model=Net(mx.float16, norm))


def bfloat16(dtype=mx.bfloat16, **options):
    return Run(MasterWeightOptimizer(optim.AdamW(1e-2), **options), dtype=dtype)


def unfrozen():
    model = Net()
    model.layers[1].unfreeze()
    return model


SCHEDULE = optim.cosine_decay(1e-2, 50)

KINDS = {
    "AdamW": lambda: Run(optim.AdamW(1e-2)),
    "schedule": lambda: Run(optim.AdamW(SCHEDULE, bias_correction=True)),
    # MLX's own fails where a list has a frozen layer in it.
    "MultiOptimizer": lambda: Run(multi(), model=unfrozen()),
    "GradScaler": lambda: Run(optim.AdamW(1e-2), scaler()),
    "GradScaler, float16": lambda: Run(optim.AdamW(1e-2), scaler(), mx.float16),
    "LossScaleOptimizer": lambda: half(optim.AdamW(SCHEDULE), max_grad_norm=1.0),
    "LossScaleOptimizer of several": lambda: half(multi()),
    "16 bits": lambda: half(optim.AdamW(1e-2), state_bits=16),
    "8 bits": lambda: half(optim.AdamW(1e-2), state_bits=8),
    "MasterWeightOptimizer": bfloat16,
    "MasterWeightOptimizer, 16 bits": lambda: bfloat16(state_bits=16),
    "compiled AdamW": lambda: Run(optim.AdamW(1e-2), model=Net(norm=False)),
    "compiled LossScaleOptimizer": lambda: half(optim.AdamW(1e-2), norm=False),
    "compiled 8 bits": lambda: half(optim.AdamW(1e-2), norm=False, state_bits=8),
    "compiled 16 bits": lambda: half(optim.AdamW(1e-2), norm=False, state_bits=16),
}
