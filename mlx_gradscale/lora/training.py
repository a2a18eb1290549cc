"""mlx-lm's ``train`` with a wrapped optimizer and loss, a history, and checkpoints."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from ..checkpoint import restore_checkpoint, save_checkpoint
from ..diagnostics import LossScaleCallback, ScaleHistory
from ..optimizer import LossScaleOptimizer
from ..replaced import replaced
from .float32 import compute_in_float32
from .host import CHANGED, trainer
from .options import Options
from .position import Position

FOLDER = "checkpoint"
# What decides which rows are in which batch.
_SAME = ("seed", "batch_size", "max_seq_length", "grad_accumulation_steps")


class OptimizerWithLoss:
    """What mlx-lm's trainer asks of an optimizer, and the loss of each iteration.

    The loss is computed inside a compiled step, which gives out only what is in
    the states that it lists.

    Args:
        optimizer (LossScaleOptimizer): What trains.
    """

    def __init__(self, optimizer: LossScaleOptimizer):
        self._optimizer = optimizer
        self.state: dict[str, Any] = {
            "optimizer": optimizer.state,
            "loss": mx.array(0.0),
        }
        self.update = optimizer.update

    @property
    def learning_rate(self) -> mx.array:
        """The learning rate, for mlx-lm's report."""
        return self._optimizer.learning_rate

    def keep_loss_of(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return mlx-lm's loss function, whose loss is then in the state."""

        def kept_loss_fn(*args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
            loss, tokens = loss_fn(*args, **kwargs)
            self.state["loss"] = mx.stop_gradient(loss).astype(mx.float32)
            return loss, tokens

        return kept_loss_fn


class Training:
    """One call of mlx-lm's ``train``.

    Args:
        options (Options): Our flags.
        arguments (Any): mlx-lm's.
    """

    def __init__(self, options: Options, arguments: Any):
        self._options = options
        self._arguments = arguments
        self._folder = Path(arguments.adapter_path) / FOLDER
        self._history: ScaleHistory | None = None
        self._is_due = False
        self._first = 1
        #: Whether mlx-lm has called :meth:`train`.
        self.was_called = False

    def train(
        self,
        *,
        model: nn.Module,
        args: Any,
        optimizer: Optimizer,
        train_dataset: Any,
        val_dataset: Any = None,
        training_callback: Any = None,
    ) -> None:
        """Take the place of mlx-lm's ``train`` in its command."""
        self.was_called = True
        host = trainer()
        self._model, self._optimizer = model, self._options.wrap(optimizer)
        self._optimizer.init(model.trainable_parameters())
        self._with_loss = OptimizerWithLoss(self._optimizer)
        self._position = Position(host.iterate_batches, self._after)
        self._rows = len(train_dataset)
        compute_in_float32(model, self._options.float32_layers)
        if self._options.resume:
            self._resume()
        self._first = self._position.iteration + 1
        if self._options.history and mx.distributed.init().rank() == 0:
            self._history = ScaleHistory(self._options.history)
        loss_fn = self._with_loss.keep_loss_of(host.default_loss)
        if self._options.loss_scale != 1.0:
            loss_fn = self._optimizer.scale_loss(loss_fn)
        with ExitStack() as stack:
            if self._history is not None:
                stack.callback(self._history.flush)
            # mlx-lm counts from 1, in a range of its own.
            stack.enter_context(replaced(host, range=self._numbers(args.iters)))
            host.train(
                model=model,
                optimizer=self._with_loss,
                train_dataset=train_dataset,
                val_dataset=val_dataset,
                args=args,
                loss=loss_fn,
                iterate_batches=self._position.batches,
                training_callback=_Checked(
                    LossScaleCallback(self._optimizer, training_callback), self._first
                ),
            )
            if self._position.iteration != max(args.iters, self._first - 1):
                raise ImportError(CHANGED)
            if self._position.iteration >= self._first:
                self._is_due = True
                self._after(self._position.iteration)

    def _numbers(self, iterations: int) -> Callable[..., range]:
        def numbers(*bounds: int) -> range:
            whole = bounds == (1, iterations + 1)
            return range(self._first, iterations + 1) if whole else range(*bounds)

        return numbers

    def _after(self, iteration: int) -> None:
        if self._history is not None:
            loss = self._with_loss.state["loss"]
            self._history.record(self._optimizer, loss=loss, step=iteration)
        self._is_due |= iteration % self._arguments.save_every == 0
        # Between two micro-batches the gradients are in a variable of mlx-lm's.
        if self._is_due and iteration % self._arguments.grad_accumulation_steps == 0:
            self._is_due = False
            save_checkpoint(
                self._folder,
                self._model,
                self._optimizer,
                frozen=False,
                position=self._position.save(),
                same=self._same(),
            )

    def _same(self) -> dict[str, Any]:
        settings = {name: getattr(self._arguments, name) for name in _SAME}
        scale = self._options.loss_scale
        return settings | {
            "rows": self._rows,
            "loss_scale": "dynamic" if scale is None else scale,
        }

    def _resume(self) -> None:
        # On several ranks only the first needs it, and tells the others.
        if mx.distributed.init().size() == 1 and not self._folder.is_dir():
            raise FileNotFoundError(
                f"There is nothing to resume: no {self._folder}. Each --save-every "
                "iterations of a run with this --adapter-path leave one."
            )
        saved = restore_checkpoint(self._folder, self._model, self._optimizer)
        for name, now in self._same().items():
            was = saved["same"].get(name)
            if was != now:
                why = "the batches would be others"
                if name == "loss_scale":
                    why = "a run keeps its own"
                raise ValueError(
                    f"{self._folder} is of a run with {name} {was}, and this one has "
                    f"{now}: {why}. Resume with {was}, or start afresh with "
                    "--resume-adapter-file."
                )
        self._position.restore(saved["position"])
        self._set_rate()
        done = self._position.iteration
        if self._arguments.iters <= done:
            _say(f"{done} iterations are done already: for more, give more --iters.")

    def _set_rate(self) -> None:
        """Go on with the learning rate of this command, not with that of the save."""
        if self._arguments.lr_schedule:
            return  # it is asked in every step, whatever was saved
        was = self._optimizer.learning_rate.item()
        self._optimizer.learning_rate = self._arguments.learning_rate
        now = self._optimizer.learning_rate.item()
        if was != now:
            _say(f"The learning rate was {was:g}, and is {now:g} now.")


def _say(sentence: str) -> None:
    if mx.distributed.init().rank() == 0:
        print(sentence)


class _Checked:
    """A callback that raises if mlx-lm does not count as it was asked to.

    Args:
        callback (LossScaleCallback): Gets every report.
        first (int): The first iteration.
    """

    def __init__(self, callback: LossScaleCallback, first: int):
        self._callback, self._first = callback, first
        self.on_val_loss_report = callback.on_val_loss_report

    def on_train_loss_report(self, report: dict[str, Any]) -> None:
        if report["iteration"] < self._first:
            raise ImportError(CHANGED)
        self._callback.on_train_loss_report(report)
