"""Reinforcement learning: few updates, of which none should be lost to the scale."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlx_gradscale import GradScaler, LossScaleOptimizer, everywhere
from mlx_gradscale.diagnostics import calibrate

TOKENS, WIDTH, LENGTH, COMPLETIONS, PROMPTS = 16, 16, 64, 4, 2


class Policy(nn.Module):
    """Chooses the next token by the last one and its place."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.set_dtype(mx.float16)

    def __call__(self, tokens):
        x = self.token(tokens) + self.place(mx.arange(tokens.shape[1]))
        return self.head(mx.tanh(self.hidden(x))).astype(mx.float32)


def log_probabilities(policy, tokens):
    chosen = tokens[:, 1:]
    return -nn.losses.cross_entropy(policy(tokens[:, :-1]), chosen)


def rollout(policy, number):
    """Completions of a few prompts, their rewards, and how likely they were."""
    key = mx.random.key(number)
    tokens = mx.zeros((PROMPTS * COMPLETIONS, 1), mx.int32)
    for i in range(LENGTH):
        next_one = mx.random.categorical(
            policy(tokens)[:, -1], key=mx.random.split(key, LENGTH)[i]
        )
        tokens = mx.concatenate([tokens, next_one[:, None].astype(mx.int32)], 1)
    # A rare right answer, as in verifiable tasks: large advantages.
    rewards = (tokens[:, 1:] == 3).sum(1).astype(mx.float32).reshape(PROMPTS, -1)
    spread = mx.sqrt(rewards.var(1, keepdims=True)) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).reshape(-1, 1)
    old = log_probabilities(policy, tokens)
    mx.eval(tokens, advantages, old)
    return tokens, advantages, old


def grpo_loss(policy, reference, beta=0.1, epsilon=0.2):
    """The clipped ratio times the advantage, and the distance to the reference."""

    def loss_fn(tokens, advantages, old):
        new = log_probabilities(policy, tokens)
        ratio = mx.exp(new - old)
        clipped = mx.clip(ratio, 1 - epsilon, 1 + epsilon)
        gain = mx.minimum(ratio * advantages, clipped * advantages)
        away = log_probabilities(reference, tokens) - new
        # Per completion a sum over its tokens, as with long ones.
        kl = mx.exp(away) - away - 1
        return -(gain - beta * kl).sum(1).mean()

    return loss_fn


def train(calibrated, steps=5):
    """Updates, and how many of them changed something."""
    mx.random.seed(0)
    policy, reference = Policy(), Policy()
    # Copies: MLX compiles no step that holds an array of its state elsewhere, too.
    reference.update(tree_map(lambda x: x + 0, policy.parameters()))
    mx.eval(policy, reference)
    optimizer = LossScaleOptimizer(optim.AdamW(1e-3), GradScaler())
    loss_fn = grpo_loss(policy, reference)
    if calibrated:
        calibrate(optimizer, policy, loss_fn, *rollout(policy, 0))
    loss_and_grad = optimizer.value_and_grad(policy, loss_fn)
    optimizer.init(policy.trainable_parameters())
    state = [policy.state, optimizer.state]

    def step(tokens, advantages, old):
        loss, grads = loss_and_grad(tokens, advantages, old)
        optimizer.update(policy, grads)
        return loss

    step = mx.compile(step, inputs=state, outputs=state)
    for number in range(steps):
        mx.eval(step(*rollout(policy, number)), state)
    return optimizer.step.item(), optimizer.scaler.skipped_steps.item()


def test_grpo_loses_no_update_after_calibrate():
    assert train(calibrated=True) == (5, 0)
    applied, skipped = train(calibrated=False)
    assert applied == 5 - skipped
    assert skipped > 0


def test_a_grpo_trainer_that_aborts_on_overflow_gets_through_inside_everywhere():
    mx.random.seed(0)
    policy, reference = Policy(), Policy()
    reference.update(tree_map(lambda x: x + 0, policy.parameters()))
    optimizer = optim.AdamW(1e-3)
    with everywhere() as here:
        loss_and_grad = nn.value_and_grad(policy, grpo_loss(policy, reference))
        for number in range(5):
            _, grads = loss_and_grad(*rollout(policy, number))
            if not mx.isfinite(optim.clip_grad_norm(grads, 1.0)[1]).item():
                raise ArithmeticError("as mlx-lm-lora does")
            optimizer.update(policy, grads)
            mx.eval(policy.state, optimizer.state)
    assert here.report()[1] == "AdamW: 5 steps applied, 0 skipped"
