"""Training runs of ``mlx_gradscale lora``, which mlx-lm's own ``train`` executes.

:func:`run_mlx_lm` lists what it replaces in mlx-lm while the command runs. Its
loop counts iterations with ``range``. :class:`Training` supplies the numbers, so that a
resumed run continues them, and whenever the loop asks for the next one, an iteration is
done, evaluated and reported. Then it records the history and saves checkpoints.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx_lm import lora
from mlx_lm.cli_ui import TrainUI, rprint
from mlx_lm.tuner import trainer
from mlx_lm.tuner.trainer import default_loss, iterate_batches

from ..checkpoint import restore_checkpoint, save_checkpoint
from ..core.forward import Casting
from ..core.optimizer import LossScaleOptimizer, MasterWeightOptimizer
from ..core.scaler import GradScaler
from ..core.trees import is_floating, leaves
from ..diagnostics import LossScaleCallback, ScaleHistory, lost_updates
from ..diagnostics.calibrate import NoScaleFits, calibrate
from ..files.text import dtype_name, plural
from ..float32 import float32_layers
from ..grad_checkpoint import grad_checkpoint
from ..plot import main as plot
from .lora import FLAGS, INSTALL, add_flags

# A resumed run must have the same values, because they determine the batches.
_SAME = ("seed", "batch_size", "max_seq_length", "grad_accumulation_steps")
_HELP = (
    "To find the cause, call mlx_gradscale.diagnostics.explain_overflow(). In float16, "
    "mlx_gradscale float32-layers finds the layers to compute in float32."
)


def run_mlx_lm(arguments: Sequence[str]) -> None:
    """Run ``mlx_lm.lora`` with the flags and the training of this package."""
    training, build_parser = Training(), lora.build_parser
    replaced_in_command = patch.multiple(
        lora,
        build_parser=lambda: add_flags(build_parser()),
        run=partial(training.run, lora.run),
        train=partial(training.train, lora.train),
        evaluate=partial(training.evaluate, lora.evaluate),
    )
    replaced_in_loop = patch.multiple(
        trainer, range=training.make_range, TrainUI=training.make_ui
    )
    command_line = patch.object(sys, "argv", ["mlx_gradscale lora", *arguments])
    with command_line, replaced_in_command, replaced_in_loop:
        lora.main()


class Training:
    """One run of ``mlx_gradscale lora``.

    Public methods are called by mlx-lm, in place of its own functions or, as for the
    reports, as its training callback.
    """

    def __init__(self) -> None:
        #: The optimizer of the run, once mlx-lm has called :meth:`train`.
        self.optimizer: Any = None
        self._world = mx.distributed.init()
        # The last iteration, and the tokens as of mlx-lm's last report. A resumed run
        # counts on from its checkpoint.
        self._iteration = self._tokens = self._first_tokens = 0
        self._loss: float | None = None  # if mlx-lm has reported in this iteration

    def run(self, run: Any, options: Any, *rest: Any) -> None:
        """Check the options, run mlx-lm's command, and plot the history."""
        # The parser does not check values from YAML.
        if options.dtype not in (None, *FLAGS["dtype"]["choices"]):
            choices = ", ".join(FLAGS["dtype"]["choices"])
            raise ValueError(f"dtype must be one of {choices}, got {options.dtype}.")
        self._options, self._loss_scale = options, read_loss_scale(options.loss_scale)
        self._folder = Path(options.adapter_path) / "checkpoint"
        run(options, *rest)
        if options.train and self.optimizer is None:
            raise ImportError(f"This version of mlx-lm is incompatible. {INSTALL}")
        if options.train and options.history and self._world.rank() == 0:
            plot([options.history])  # or print what it requires

    def evaluate(
        self, evaluate: Any, *args: Any, model: nn.Module, **others: Any
    ) -> Any:
        """Evaluate the model as it was trained."""
        self._prepare(model)
        return evaluate(*args, model=model, **others)

    def train(
        self,
        train: Any,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        args: Any,
        train_dataset: Any,
        training_callback: Any = None,
        **others: Any,
    ) -> None:
        """Train the model with a wrapped optimizer, or resume."""
        self._model, self._args, self._dataset = model, args, train_dataset
        self._same = {name: getattr(self._options, name) for name in _SAME}
        self._same |= {"rows": len(train_dataset), "loss_scale": self._loss_scale}
        self._prepare(model)
        model.train()
        if args.grad_checkpoint:
            grad_checkpoint(model)
        if self._options.fine_tune_type == "full" and not self._options.resume:
            self._print_lost_updates(optimizer)
        self.optimizer = self._wrap(optimizer)
        self.optimizer.init(model.trainable_parameters())
        self._callback = LossScaleCallback(self.optimizer, training_callback)
        if self._options.resume:
            self._resume()
        elif self.optimizer.scaler.state["dynamic"]:
            self._find_first_scale()
        dtypes = " ".join(sorted(_dtypes(model.trainable_parameters())))
        rprint(f"Training {dtypes} weights with {self.optimizer}")
        path = self._options.history if self._world.rank() == 0 else None
        with ScaleHistory(path) if path else nullcontext() as self._history:
            train(
                model=model,
                optimizer=self.optimizer,
                args=replace(args, grad_checkpoint=False),
                train_dataset=train_dataset,
                loss=self.optimizer.scale_loss(default_loss),
                iterate_batches=self.iterate_batches,
                training_callback=self,
                **others,
            )
        self._warn_about_skips()

    def make_range(self, *limits: int) -> Iterable[int]:
        """Return ``range(*limits)`` or, for mlx-lm's loop, the iterations to run."""
        is_loop = limits == (1, self._options.iters + 1)
        return self._iterations(*limits) if is_loop else range(*limits)

    def _iterations(self, start: int, stop: int) -> Iterator[int]:
        for iteration in range(start + self._iteration, stop):
            yield iteration
            self._iteration = iteration
            if self._history is not None:
                self._history.record(self.optimizer, loss=self._loss, step=iteration)
            self._loss = None
            self._save_if_due()

    def make_ui(self, iters: int, rank: int) -> TrainUI:
        """Return mlx-lm's progress, advanced to the checkpoint."""
        ui = TrainUI(iters, rank=rank)
        report, first = ui.report_train, self._first_tokens
        ui.report_train = lambda it, loss, rate, n: report(it, loss, rate, first + n)
        for _ in range(self._iteration):
            ui.advance()
        return ui

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        """Keep what mlx-lm reports for the history and the checkpoint; pass it on."""
        self._loss = info["train_loss"]
        self._tokens = self._first_tokens + info["trained_tokens"]
        info = info | {"trained_tokens": self._tokens}
        self._callback.on_train_loss_report(info)

    def on_val_loss_report(self, info: dict[str, Any]) -> None:
        """Pass on mlx-lm's report."""
        self._callback.on_val_loss_report(info)

    def iterate_batches(self, loop: bool = False, **given: Any) -> Iterator[Any]:
        """Return batches to train or, without ``loop``, to validate.

        A resumed run gets the same ones as an uninterrupted run.
        """
        seed = self._options.seed + self._iteration
        return self._batches() if loop else iterate_batches(**given, seed=seed)

    def _batches(self) -> Iterator[Any]:
        """Yield training batches indefinitely, from the next iteration on."""
        # At least 1: if the dataset is smaller than a batch, iterate_batches raises.
        n_batches = max(len(self._dataset) // self._args.batch_size, 1)
        first_epoch, n_done = divmod(self._iteration, n_batches)
        for epoch in count(first_epoch):
            batches = iterate_batches(
                dataset=self._dataset,
                batch_size=self._args.batch_size,
                max_seq_length=self._args.max_seq_length,
                seed=self._options.seed + epoch,  # each epoch has its own order
                comm_group=self._world,
            )
            yield from islice(batches, n_done, None)
            n_done = 0

    def _prepare(self, model: nn.Module) -> None:
        """Apply ``--dtype`` and ``--float32-layers`` to the model, if given."""
        if self._options.dtype is not None:
            # Some mlx-lm models exclude weights, such as those of a router.
            is_cast = getattr(model, "cast_predicate", lambda path: True)
            dtype = getattr(mx, self._options.dtype)
            casting = Casting(dtype, keep=lambda path, _: not is_cast(path))
            model.update(casting.cast_parameters(model, model.parameters()))
            mx.eval(model.parameters())
        if self._options.float32_layers:
            float32_layers(model, Path(self._options.float32_layers))

    def _wrap(self, optimizer: Optimizer) -> MasterWeightOptimizer:
        options, scale = self._options, self._loss_scale
        is_group = self._world.size() > 1
        settings: dict[str, Any] = {
            "max_grad_norm": options.max_grad_norm,
            "state_bits": options.state_bits or 32,
            "group": self._world if is_group else None,
            "sharded": False if is_group else None,  # mlx-lm averages the gradients
        }
        has_float16 = "float16" in _dtypes(self._model.parameters())
        if options.loss_scale is None and not has_float16:
            return MasterWeightOptimizer(optimizer, **settings)
        is_dynamic = scale == "dynamic"
        scaler = GradScaler() if is_dynamic else GradScaler(scale, dynamic=False)
        return LossScaleOptimizer(optimizer, scaler, **settings)

    def _find_first_scale(self) -> None:
        """Find a loss scale of at most 65536 on the first batch, to skip fewer steps.

        One run of 42 steps skipped 13 when it started from a scale of 65536.
        """
        scaler, model = self.optimizer.scaler, self._model
        batch = next(self._batches())
        try:
            # Leave room for gradients to grow by a factor of 64. With a factor of four,
            # normalizing_flow of mlx-examples skipped its steepest steps and diverged:
            # after 100 steps, its loss was 11 percent above float32, not 0.2 percent.
            scale = calibrate(scaler, model, default_loss, model, *batch, headroom=6)
        except NoScaleFits as error:
            _warn(f"{error} {_HELP}")
        else:
            scaler.update(min(scale, 2.0**16))

    def _print_lost_updates(self, optimizer: Optimizer) -> None:
        """Print what plain bfloat16 would lose of the first update."""
        model = self._model
        if "bfloat16" not in _dtypes(model.trainable_parameters()):
            return
        plain = copy.deepcopy(optimizer)
        if schedule := plain._schedulers.pop("learning_rate", None):
            # The first rate may be zero, and no rate loses less than the highest.
            n_updates = self._args.iters // self._args.grad_accumulation_steps
            plain.learning_rate = mx.max(schedule(mx.arange(max(n_updates, 1))))
        batch = next(self._batches())
        rprint(lost_updates(plain, model, default_loss, model, *batch).verdict)

    def _save_if_due(self) -> None:
        """Save a checkpoint after the first update since it became due."""
        n_since_update = self._iteration % self._args.grad_accumulation_steps
        n_since_due = self._iteration % self._args.steps_per_save
        is_due = n_since_due < self._args.grad_accumulation_steps
        is_due |= self._iteration == self._args.iters
        # Checkpoints hold no accumulated gradients.
        if is_due and n_since_update == 0:
            save_checkpoint(
                self._folder,
                self._model,
                self.optimizer,
                frozen=False,
                position=[self._iteration, self._tokens],
                same=self._same,
            )

    def _resume(self) -> None:
        saved = restore_checkpoint(self._folder, self._model, self.optimizer)
        for name, now in self._same.items():
            was = saved["same"].get(name)
            if was != now:
                raise ValueError(
                    f"The run in {self._folder} had {name}={was}, but this one has "
                    f"{name}={now}. Resume with the same options and data, or start a "
                    "new run from its weights with --resume-adapter-file."
                )
        self._iteration, self._tokens = saved["position"]
        self._first_tokens = self._tokens
        if not self._options.lr_schedule:
            # The command's learning rate overrides the one in the checkpoint.
            self.optimizer.learning_rate = self._options.learning_rate
        if self._options.iters <= self._iteration:
            rprint("All iterations are done. Increase --iters to continue.")

    def _warn_about_skips(self) -> None:
        scaler = self.optimizer.scaler
        skipped, in_a_row = scaler.skipped_steps.item(), scaler.consecutive_skips.item()
        steps = skipped + self.optimizer.step.item()
        if 2 * skipped > steps or in_a_row >= 10:
            _warn(
                f"{skipped:,} of {plural(steps, 'step')} were skipped because of "
                f"non-finite gradients, {in_a_row:,} of them at the end. {_HELP}"
            )


def read_loss_scale(given: Any) -> Any:
    """Parse ``--loss-scale`` into ``"dynamic"`` or a number, which is 1.0 for off."""
    # YAML reads off as False and on as True.
    name = str(given).lower()
    if name in ("none", "dynamic", "true"):
        return "dynamic"
    try:
        return 1.0 if name in ("off", "false") else float(given)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss_scale must be dynamic, off or a positive number, got {given}."
        ) from None


def _dtypes(parameters: Any) -> set[str]:
    return {dtype_name(x) for x in leaves(parameters) if is_floating(x)}


def _warn(text: str) -> None:
    rprint(f"warning: {text}", file=sys.stderr)
