"""The training loop of ``mlx_gradscale lora``.

It reuses mlx-lm's loss, batches, validation and progress bar, but not mlx-lm's loop,
which cannot start in the middle and does not expose the loss of each step.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.cli_ui import TrainUI, make_console, print_header_panel, rprint
from mlx_lm.tuner.trainer import (
    default_loss,
    evaluate,
    grad_checkpoint,
    iterate_batches,
)
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..checkpoint import restore_checkpoint, save_checkpoint
from ..compile_step import compile_step
from ..core.notices import LOW_SCALE
from ..core.scaler import GradScaler
from ..diagnostics import LossScaleCallback, ScaleHistory
from ..diagnostics.calibrate import NoScaleFits, calibrate
from ..files.text import dtype_name, plural, power
from ..float32 import float32_layers
from .lora import read_loss_scale, wrap_optimizer

FOLDER = "checkpoint"
EXPLAIN = "To find the cause, call mlx_gradscale.diagnostics.explain_overflow()."
# A resumed run must have the same values, because they determine the batches.
_SAME = ("seed", "batch_size", "max_seq_length", "grad_accumulation_steps")


class Training:
    """One training run of ``mlx_gradscale lora``, from its parsed command line."""

    def __init__(self, arguments: Any):
        self._arguments = arguments
        self._folder = Path(arguments.adapter_path) / FOLDER
        # The position in the run.
        self._at = SimpleNamespace(iteration=0, trained_tokens=0)
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
        """Train the model; mlx-lm's command calls this instead of its own ``train``."""
        self.was_called = True
        self._world = mx.distributed.init()
        self._model, self._args = model, args
        maybe_set_recommended_wired_limit()
        if args.grad_checkpoint:
            grad_checkpoint(model.layers[0])
        self.prepare(model)
        has_float16 = "float16" in _dtypes(model.parameters()).split()
        self.optimizer = wrap_optimizer(optimizer, self._arguments, has_float16)
        self.optimizer.init(model.trainable_parameters())
        self._callback = LossScaleCallback(self.optimizer, training_callback)
        self._dataset = train_dataset
        model.train()
        if self._arguments.resume:
            self._resume()
        problem, remedy = "", self._remedy()
        scaler = self.optimizer.scaler
        if not self._arguments.resume and scaler.state["dynamic"]:
            batch = model, *next(self._iterate())
            problem = find_first_scale(scaler, model, default_loss, batch, remedy)
        self._print_header()
        if problem:
            rprint(f"warning: {problem}", file=sys.stderr)
        history: Any = nullcontext()
        if self._arguments.history and self._world.rank() == 0:
            history = ScaleHistory(self._arguments.history)
        with history as self._history, TrainUI(args.iters, self._world.rank()) as ui:
            for _ in range(self._at.iteration):
                ui.advance()
            self._loop(ui, val_dataset)
        self._save_adapters(Path(args.adapter_file))
        name, n_applied = type(optimizer).__name__, self.optimizer.step
        if problem := describe_skips(name, n_applied, scaler):
            rprint(f"warning: {problem} {remedy}", file=sys.stderr)

    def prepare(self, model: nn.Module) -> None:
        """Apply ``--dtype`` and ``--float32-layers`` to the model, if given."""
        dtype, layers = self._arguments.dtype, self._arguments.float32_layers
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

    def _print_header(self) -> None:
        """Print a box like mlx-lm's with dtypes, master weights and loss scale."""
        scaler, trained = self.optimizer.scaler, self._model.trainable_parameters()
        kind = "dynamic, from" if scaler.state["dynamic"] else "fixed at"
        rows = [
            ("model", _dtypes(self._model.parameters())),
            ("trained weights", _dtypes(trained)),
        ]
        if "float16" in _dtypes(trained):  # or bfloat16
            rows.append(("master weights", f"{self._arguments.state_bits or 32} bits"))
        if scaler.state["dynamic"] or scaler.get_scale() != 1:
            rows.append(("loss scale", f"{kind} {power(scaler.get_scale())}"))
        if self._world.rank() == 0:
            print_header_panel(make_console(), "mlx_gradscale", rows)

    def _remedy(self) -> str:
        """Return what to do if steps are skipped although the scale falls."""
        if "float16" not in _dtypes(self._model.parameters()).split():
            return EXPLAIN
        given = self._arguments
        if read_loss_scale(given.loss_scale) != "dynamic":
            return "Train with --loss-scale dynamic."
        kind = "full" if given.fine_tune_type == "full" else "lora"
        command = ["--model", given.model, "--data", given.data, "--fine-tune-type"]
        return (
            "Train with --dtype bfloat16, or find the layers that must compute in "
            "float32 and pass --float32-layers float32_layers.json. To find them: "
            f"mlx_gradscale float32-layers {shlex.join(map(str, [*command, kind]))}"
        )

    def _iterate(self) -> Iterator[Any]:
        """Yield batches indefinitely, starting after the last completed iteration."""
        # At least 1: if the dataset is smaller than a batch, iterate_batches raises.
        n_batches = max(len(self._dataset) // self._args.batch_size, 1)
        first_epoch, n_done = divmod(self._at.iteration, n_batches)
        for epoch in count(first_epoch):
            batches = iterate_batches(
                dataset=self._dataset,
                batch_size=self._args.batch_size,
                max_seq_length=self._args.max_seq_length,
                seed=self._arguments.seed + epoch,  # each epoch has its own order
                comm_group=self._world,
            )
            yield from islice(batches, n_done if epoch == first_epoch else 0, None)

    def _make_step(self) -> Callable[..., Any]:
        model, optimizer = self._model, self.optimizer
        n_micro_batches = self._args.grad_accumulation_steps
        value_and_grad = optimizer.value_and_grad(model, default_loss)

        def step(batch: Any, previous: Any, is_update: bool) -> tuple[Any, Any, Any]:
            (loss, tokens), grads = value_and_grad(model, *batch)
            if previous is not None:
                grads = tree_map(lambda x, y: x + y, grads, previous)
            if is_update:
                if n_micro_batches > 1:
                    grads = tree_map(lambda x: x / n_micro_batches, grads)
                optimizer.update(model, grads)
                grads = None
            return loss, tokens, grads

        return compile_step(step, [model.state, optimizer.state, mx.random.state])

    def _loop(self, ui: TrainUI, val_dataset: Any) -> None:
        args, step, batches = self._args, self._make_step(), self._iterate()
        is_due, grads = False, None
        losses = tokens = mx.array(0.0)
        n_steps, seconds = 0, 0.0
        for it in range(self._at.iteration + 1, args.iters + 1):
            batch = next(batches)
            is_last = it == args.iters
            if val_dataset and (it == 1 or it % args.steps_per_eval == 0 or is_last):
                self._validate(ui, it, val_dataset)
            start = time.perf_counter()
            is_update = it % args.grad_accumulation_steps == 0
            loss, new_tokens, grads = step(batch, grads, is_update)
            losses, tokens, n_steps = losses + loss, tokens + new_tokens, n_steps + 1
            mx.eval(self._model.state, self.optimizer.state, losses, tokens, grads)
            if mx.get_cache_memory() > args.clear_cache_threshold:
                mx.clear_cache()
            seconds += time.perf_counter() - start
            self._at.iteration = it
            ui.advance()
            if self._history is not None:
                self._history.record(self.optimizer, loss=loss, step=it)
            if it % args.steps_per_report == 0 or is_last:
                self._report(ui, losses / n_steps, tokens, n_steps, seconds)
                losses = tokens = mx.array(0.0)
                n_steps, seconds = 0, 0.0
            if it % args.steps_per_save == 0:
                file = Path(args.adapter_file)
                numbered = file.parent / f"{it:07d}_adapters.safetensors"
                self._save_adapters(file)
                self._save_adapters(numbered)
                ui.report_save(numbered)
            is_due |= it % args.steps_per_save == 0 or is_last
            # Save only after an update: checkpoints hold no accumulated gradients.
            if is_due and is_update:
                is_due = False
                self._save_checkpoint()

    def _validate(self, ui: TrainUI, it: int, dataset: Any) -> None:
        args, start = self._args, time.perf_counter()
        seed = self._arguments.seed + it  # the same batches in a resumed run
        total = len(dataset) // args.batch_size
        if args.val_batches != -1:
            total = min(total, args.val_batches)
        with ui.val_task(total) as advance:
            loss = evaluate(
                model=self._model,
                dataset=dataset,
                batch_size=args.batch_size,
                num_batches=args.val_batches,
                max_seq_length=args.max_seq_length,
                iterate_batches=partial(iterate_batches, seed=seed),
                progress_callback=advance,
            )
        self._model.train()
        seconds = time.perf_counter() - start
        ui.report_val(it, loss, seconds)
        report = {"iteration": it - 1, "val_loss": loss, "val_time": seconds}
        self._callback.on_val_loss_report(report)

    def _report(
        self, ui: TrainUI, loss: Any, tokens: Any, n_steps: int, seconds: float
    ) -> None:
        loss, tokens = (
            mx.distributed.all_sum(x, group=self._world, stream=mx.cpu).item()
            for x in (loss / self._world.size(), tokens)
        )
        self._at.trained_tokens += int(tokens)
        ui.report_train(
            self._at.iteration, loss, tokens / seconds, self._at.trained_tokens
        )
        self._callback.on_train_loss_report(
            {
                "iteration": self._at.iteration,
                "train_loss": loss,
                "learning_rate": float(self.optimizer.learning_rate),
                "iterations_per_second": n_steps / seconds,
                "tokens_per_second": tokens / seconds,
                "trained_tokens": self._at.trained_tokens,
                "peak_memory": mx.get_peak_memory() / 1e9,
            }
        )

    def _save_adapters(self, path: Path) -> None:
        if self._world.rank() == 0:
            weights = dict(tree_flatten(self._model.trainable_parameters()))
            mx.save_safetensors(str(path), weights)

    def _save_checkpoint(self) -> None:
        save_checkpoint(
            self._folder,
            self._model,
            self.optimizer,
            frozen=False,
            position=vars(self._at),
            same=self._same(),
        )

    def _same(self) -> dict[str, Any]:
        settings = {name: getattr(self._arguments, name) for name in _SAME}
        scale = read_loss_scale(self._arguments.loss_scale)
        return settings | {"rows": len(self._dataset), "loss_scale": scale}

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
        self._at = SimpleNamespace(**saved["position"])
        if not self._arguments.lr_schedule:
            # The command's learning rate overrides the one in the checkpoint.
            self.optimizer.learning_rate = self._arguments.learning_rate
        if self._arguments.iters <= self._at.iteration:
            rprint("All iterations are done. Increase --iters to continue.")


def _dtypes(parameters: Any) -> str:
    dtypes = {x.dtype for _, x in tree_flatten(parameters)}
    floating = [x for x in dtypes if mx.issubdtype(x, mx.floating)]
    return " ".join(sorted(map(dtype_name, floating)))


def find_first_scale(
    scaler: GradScaler,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    batch: Any,
    remedy: str,
    dtype: mx.Dtype | None = None,
) -> str:
    """Find a loss scale of at most 65536 on the first batch, to skip fewer steps.

    One run of 42 steps skipped 13 when it started from a scale of 65536. If the loss or
    the gradients are non-finite at every scale, the scale does not change, and the
    returned warning ends with ``remedy``. Without a problem, return "".
    """
    try:
        # Leave room for gradients to grow by a factor of 64. With a factor of four,
        # normalizing_flow of mlx-examples skipped its steepest steps and diverged:
        # after 100 steps, its loss was 11 percent above float32, not 0.2 percent.
        scale = calibrate(
            scaler, model, loss_fn, *batch, compute_dtype=dtype, headroom=6
        )
    except NoScaleFits:
        return (
            "The loss or the gradients of the first batch are non-finite at every loss "
            f"scale. {remedy}"
        )
    except ValueError:
        return ""  # The loss function fails, so the trainer's own call will, too.
    scaler.update(min(scale, 2.0**16))
    if scale >= LOW_SCALE:
        return ""
    return (
        "With a safety margin, the gradients of the first batch fit into float16 only "
        f"at a loss scale of {scale:.2g}, where small gradients underflow to zero. "
        "Compute in bfloat16 or float32 instead."
    )


def describe_skips(name: str, n_applied: Any, scaler: GradScaler) -> str:
    """Describe a run that skipped most or the last ten of its steps, or return ""."""
    counts = n_applied, scaler.skipped_steps, scaler.consecutive_skips
    applied, skipped, in_a_row = map(int, counts)
    if skipped <= applied and in_a_row < 10:
        return ""
    start = "" if applied else "The model was not trained: "
    last = f", including the last {in_a_row}," if in_a_row and applied else ""
    total = plural(applied + skipped, "step")
    return (
        f"{start}{name} skipped {skipped:,} of {total}{last} because of non-finite "
        "gradients."
    )
