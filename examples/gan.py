"""Train a GAN: two models and two optimizers with one scaler.

``scaler.step`` skips an optimizer's step if the gradients passed to it overflow. Call
``scaler.update`` once, after both steps; it reduces the scale if either was skipped. If
the gradients of the two models differ by orders of magnitude, use two scalers.

``compute_dtype`` casts only the differentiated model and its inputs. A second model in
the loss would compute in float32, so both models are submodules of one model here.
Each optimizer gets the gradients of its submodule.

    python examples/gan.py
"""

from functools import partial
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlx_gradscale import GradScaler, compile_step


def mlp(*sizes):
    layers = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = mlp(4, 32, 32, 2)
        self.critic = mlp(2, 32, 32, 1)


def real(size=64):
    """Return real samples from a tilted Gaussian around (2, -1)."""
    return mx.random.normal((size, 2)) @ mx.array([[0.6, 0.4], [0.0, 0.3]]) + CENTER


mx.random.seed(0)
CENTER = mx.array([2.0, -1.0])
gan = GAN()
g_optimizer = optim.Adam(1e-3, betas=[0.5, 0.9])
c_optimizer = optim.Adam(2e-3, betas=[0.5, 0.9])
g_optimizer.init(gan.generator.trainable_parameters())
c_optimizer.init(gan.critic.trainable_parameters())
scaler = GradScaler()


def judge(x, is_real):
    logits = gan.critic(x).astype(mx.float32)
    targets = mx.full(logits.shape, float(is_real))
    return nn.losses.binary_cross_entropy(logits, targets)


def critic_loss(x, z):
    return judge(x, True) + judge(mx.stop_gradient(gan.generator(z)), False)


def generator_loss(z):
    return judge(gan.generator(z), True)


# Both losses compute in float16 and share one scale.
critic_grad = scaler.value_and_grad(gan, critic_loss, mx.float16)
generator_grad = scaler.value_and_grad(gan, generator_loss, mx.float16)
optimizers = [g_optimizer.state, c_optimizer.state]
state = [gan.state, *optimizers, scaler.state, mx.random.state]


@partial(compile_step, state=state)
def step():
    z = mx.random.normal((64, 4))
    c_loss, c_grads = critic_grad(real(), z)
    g_loss, g_grads = generator_grad(z)
    # MLX is lazy: the gradients of the other submodule are never computed.
    scaler.step(c_optimizer, gan.critic, c_grads["critic"])
    scaler.step(g_optimizer, gan.generator, g_grads["generator"])
    scaler.update()
    return c_loss, g_loss


for i in range(1, 401):
    c_loss, g_loss = step()
    mx.eval(state, c_loss, g_loss)
    if i % 100 == 0:
        print(
            f"step {i}: critic {c_loss.item():.3f}, generator {g_loss.item():.3f}, "
            f"scale {scaler.get_scale():.0f}, skipped {scaler.skipped_steps.item()}"
        )

fake = gan.generator(mx.random.normal((1000, 4)))
distance = mx.linalg.norm(fake.mean(axis=0) - CENTER).item()
print(f"the generated mean is {distance:.2f} from the real one")
