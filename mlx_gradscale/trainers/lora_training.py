"""Training runs of ``mlx_gradscale lora``, which mlx-lm's own ``train`` executes.

mlx-lm's loop asks for the next batch as soon as an iteration is done, evaluated and
reported. :class:`Training` supplies the batches, and so saves checkpoints and records
the history at that moment. To resume, it replaces two names in mlx-lm's module while
``train`` runs: ``range``, so that the loop counts on from the checkpoint, and
``TrainUI``, so that the progress does, too.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.cli_ui import TrainUI, rprint
from mlx_lm.tuner import trainer
from mlx_lm.tuner.trainer import default_loss, iterate_batches

from ..checkpoint import restore_checkpoint, save_checkpoint
from ..core.masters import HALF
from ..core.notices import LOW_SCALE
from ..core.optimizer import LossScaleOptimizer
from ..core.scaler import GradScaler
from ..diagnostics import LossScaleCallback, ScaleHistory, lost_updates
from ..diagnostics.calibrate import NoScaleFits, calibrate
from ..files.text import dtype_name, plural, power
from ..float32 import float32_layers
from ..grad_checkpoint import grad_checkpoint
from .lora import FLAGS

FOLDER = "checkpoint"
# A resumed run must have the same values, because they determine the batches.
_SAME = ("seed", "batch_size", "max_seq_length", "grad_accumulation_steps")
_HELP = (
    "To find the cause, call mlx_gradscale.diagnostics.explain_overflow(). In float16, "
    "mlx_gradscale float32-layers finds the layers to compute in float32."
)


class Training:
    """One run of ``mlx_gradscale lora``, from its parsed command line.

    It is also the training callback of mlx-lm's ``train``.
    """

    def __init__(self, options: Any):
        # The parser does not check values from YAML.
        if options.dtype not in (None, *FLAGS["dtype"]["choices"]):
            choices = ", ".join(FLAGS["dtype"]["choices"])
            raise ValueError(f"dtype must be one of {choices}, got {options.dtype}.")
        self._options, self._loss_scale = options, read_loss_scale(options.loss_scale)
        self._folder = Path(options.adapter_path) / FOLDER
        self._start = SimpleNamespace(iteration=0, trained_tokens=0)
        self._is_due = False  # whether to save a checkpoint after the next update
        self._tokens = 0  # on this rank, since the start
        self._loss: float | None = None  # of the report of this iteration
        self._history: ScaleHistory | None = None
        #: Whether mlx-lm has called :meth:`train`.
        self.was_called = False

    def train(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        args: Any,
        train_dataset: Any,
        training_callback: Any = None,
        **others: Any,
    ) -> None:
        """Train the model; mlx-lm's command calls this instead of its own ``train``."""
        self.was_called = True
        self._model, self._args, self._dataset = model, args, train_dataset
        self.prepare(model)
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
        self._iteration = self._start.iteration
        self._print_dtypes()
        with ExitStack() as stack:
            if self._options.history and mx.distributed.init().rank() == 0:
                history = ScaleHistory(self._options.history)
                self._history = stack.enter_context(history)
            for name, new in ("range", self._range), ("TrainUI", self._make_ui):
                stack.enter_context(patch.object(trainer, name, new, create=True))
            trainer.train(
                model,
                self.optimizer,
                train_dataset,
                args=replace(args, grad_checkpoint=False),
                loss=self.optimizer.scale_loss(default_loss),
                iterate_batches=self._iterate,
                training_callback=self,
                **others,
            )
            if self._start.iteration < args.iters:
                self._end_iteration()  # mlx-lm asks for no batch after the last one
        self._warn_about_skips()

    def prepare(self, model: nn.Module) -> None:
        """Apply ``--dtype`` and ``--float32-layers`` to the model, if given."""
        dtype, layers = self._options.dtype, self._options.float32_layers
        # Some mlx-lm models exclude weights from casting, such as those of a router.
        is_cast = getattr(model, "cast_predicate", lambda path: True)

        def cast(path: str, x: mx.array) -> mx.array:
            floating = mx.issubdtype(x.dtype, mx.floating)
            return x.astype(getattr(mx, dtype)) if floating and is_cast(path) else x

        if dtype is not None:
            model.update(tree_map_with_path(cast, model.parameters()))
            mx.eval(model.parameters())
        if layers:
            float32_layers(model, Path(layers))

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        """Pass on mlx-lm's report, and keep its loss for the history."""
        self._loss = info["train_loss"]
        tokens = info["trained_tokens"] + self._start.trained_tokens
        self._callback.on_train_loss_report(info | {"trained_tokens": tokens})

    def on_val_loss_report(self, info: dict[str, Any]) -> None:
        """Pass on mlx-lm's report."""
        self._callback.on_val_loss_report(info)

    def _wrap(self, optimizer: Optimizer) -> LossScaleOptimizer:
        world, options, scale = mx.distributed.init(), self._options, self._loss_scale
        if options.loss_scale is None:
            has_float16 = mx.float16 in _dtypes(self._model.parameters())
            scale = scale if has_float16 else 1.0
        is_group = world.size() > 1
        return LossScaleOptimizer(
            optimizer,
            GradScaler() if scale == "dynamic" else GradScaler(scale, dynamic=False),
            max_grad_norm=options.max_grad_norm,
            state_bits=options.state_bits or 32,
            group=world if is_group else None,
            sharded=False if is_group else None,  # mlx-lm averages the gradients
        )

    def _find_first_scale(self) -> None:
        """Find a loss scale of at most 65536 on the first batch, to skip fewer steps.

        One run of 42 steps skipped 13 when it started from a scale of 65536.
        """
        scaler, batch = self.optimizer.scaler, next(self._batches(0))
        self._model.train()
        try:
            # Leave room for gradients to grow by a factor of 64. With a factor of four,
            # normalizing_flow of mlx-examples skipped its steepest steps and diverged:
            # after 100 steps, its loss was 11 percent above float32, not 0.2 percent.
            model = self._model
            scale = calibrate(scaler, model, default_loss, model, *batch, headroom=6)
        except NoScaleFits as error:
            _warn(f"{error} {_HELP}")
            return
        scaler.update(min(scale, 2.0**16))
        if scale < LOW_SCALE:
            _warn(
                "The largest loss scale at which the first batch does not overflow is "
                f"{scale:.2g}, where small gradients underflow to zero. {_HELP}"
            )

    def _print_lost_updates(self, optimizer: Optimizer) -> None:
        """Print what plain bfloat16 would lose of the first update, on rank 0."""
        if mx.bfloat16 not in _dtypes(self._model.trainable_parameters()):
            return
        if mx.distributed.init().rank() > 0:
            return
        plain = copy.deepcopy(optimizer)
        if schedule := plain._schedulers.pop("learning_rate", None):
            # The first rate may be zero, and no rate loses less than the highest.
            n_updates = self._args.iters // self._args.grad_accumulation_steps
            plain.learning_rate = mx.max(schedule(mx.arange(max(n_updates, 1))))
        self._model.train()
        model, batch = self._model, next(self._batches(0))
        rprint(lost_updates(plain, model, default_loss, model, *batch).verdict)

    def _print_dtypes(self) -> None:
        scaler, dtypes = (
            self.optimizer.scaler,
            _dtypes(self._model.trainable_parameters()),
        )
        parts = [f"Training {' '.join(sorted(map(dtype_name, dtypes)))} weights"]
        if not dtypes.isdisjoint(HALF):
            parts.append(f"master weights in {self._options.state_bits or 32} bits")
        if scaler.state["dynamic"] or scaler.get_scale() != 1:
            kind = "dynamic, from" if scaler.state["dynamic"] else "fixed at"
            parts.append(f"loss scale {kind} {power(scaler.get_scale())}")
        rprint("; ".join(parts))

    def _range(self, *limits: int) -> range:
        """Count the iterations from the checkpoint; mlx-lm's loop starts at 1."""
        is_loop = limits == (1, self._args.iters + 1)
        return (
            range(self._start.iteration + 1, limits[1]) if is_loop else range(*limits)
        )

    def _make_ui(self, iters: int, rank: int) -> TrainUI:
        """Return mlx-lm's progress, advanced to the checkpoint."""
        ui = TrainUI(iters, rank=rank)
        report, before = ui.report_train, self._start.trained_tokens
        ui.report_train = lambda it, loss, rate, n: report(it, loss, rate, n + before)
        for _ in range(self._start.iteration):
            ui.advance()
        return ui

    def _iterate(self, loop: bool = False, **given: Any) -> Iterator[Any]:
        """Yield batches to train or, without ``loop``, to validate."""
        if not loop:
            # The same batches in a resumed run.
            yield from iterate_batches(
                **given, seed=self._options.seed + self._iteration
            )
            return
        for batch in self._batches(self._start.iteration):
            self._batch = batch
            yield batch
            self._end_iteration()

    def _batches(self, n_done: int) -> Iterator[Any]:
        """Yield training batches indefinitely, from the given iteration on."""
        # At least 1: if the dataset is smaller than a batch, iterate_batches raises.
        n_batches = max(len(self._dataset) // self._args.batch_size, 1)
        first_epoch, n_done = divmod(n_done, n_batches)
        for epoch in count(first_epoch):
            batches = iterate_batches(
                dataset=self._dataset,
                batch_size=self._args.batch_size,
                max_seq_length=self._args.max_seq_length,
                seed=self._options.seed + epoch,  # each epoch has its own order
                comm_group=mx.distributed.init(),
            )
            yield from islice(batches, n_done if epoch == first_epoch else 0, None)

    def _end_iteration(self) -> None:
        """Record the iteration, and save a checkpoint if one is due."""
        self._iteration += 1
        it, args = self._iteration, self._args
        self._tokens += _count_tokens(*self._batch)
        if self._history is not None:
            self._history.record(self.optimizer, loss=self._loss, step=it)
        self._loss = None
        self._is_due |= it % args.steps_per_save == 0 or it == args.iters
        # Save only after an update: checkpoints hold no accumulated gradients.
        if self._is_due and it % args.grad_accumulation_steps == 0:
            self._is_due = False
            self._save()

    def _save(self) -> None:
        tokens: Any = mx.distributed.all_sum(mx.array(self._tokens), stream=mx.cpu)
        save_checkpoint(
            self._folder,
            self._model,
            self.optimizer,
            frozen=False,
            position={
                "iteration": self._iteration,
                "trained_tokens": self._start.trained_tokens + tokens.item(),
            },
            same=self._same(),
        )

    def _same(self) -> dict[str, Any]:
        settings = {name: getattr(self._options, name) for name in _SAME}
        rows = len(self._dataset)
        return settings | {"rows": rows, "loss_scale": self._loss_scale}

    def _resume(self) -> None:
        saved = restore_checkpoint(self._folder, self._model, self.optimizer)
        for name, now in self._same().items():
            was = saved["same"].get(name)
            if was != now:
                raise ValueError(
                    f"The run in {self._folder} had {name}={was}, but this one has "
                    f"{name}={now}. Resume with the same options and data, or start a "
                    "new run from its weights with --resume-adapter-file."
                )
        self._start = SimpleNamespace(**saved["position"])
        if not self._options.lr_schedule:
            # The command's learning rate overrides the one in the checkpoint.
            self.optimizer.learning_rate = self._options.learning_rate
        if self._options.iters <= self._start.iteration:
            rprint("All iterations are done. Increase --iters to continue.")

    def _warn_about_skips(self) -> None:
        scaler = self.optimizer.scaler
        counts: Any = (
            scaler.skipped_steps,
            scaler.consecutive_skips,
            self.optimizer.step,
        )
        skipped, in_a_row, applied = (x.item() for x in counts)
        if skipped > applied or in_a_row >= 10:
            _warn(
                f"{skipped:,} of {plural(applied + skipped, 'step')} were skipped "
                f"because of non-finite gradients, {in_a_row:,} of them at the end. "
                f"{_HELP}"
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


def _count_tokens(batch: mx.array, lengths: mx.array) -> int:
    """Return the number of tokens that mlx-lm's loss counts."""
    start, end = np.array(lengths).T
    first, last = np.maximum(start, 1), np.minimum(end, batch.shape[1] - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def _dtypes(parameters: Any) -> set[mx.Dtype]:
    dtypes = {x.dtype for _, x in tree_flatten(parameters)}
    return {x for x in dtypes if mx.issubdtype(x, mx.floating)}


def _warn(text: str) -> None:
    rprint(f"warning: {text}", file=sys.stderr)
