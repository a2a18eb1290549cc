"""Load a PyTorch checkpoint into an MLX model, optimizer and scaler."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ..core.masters import to_float32
from ..core.optimizer import LossScaleOptimizer
from ..core.scaler import GradScaler
from ..core.trees import restore, snapshot
from ..files.text import list_some
from .folder import read_torch
from .optimizers import Rate, to_mlx
from .options import Options
from .template import Template, make_template
from .template_file import build_optimizer, is_template
from .tree import ConvertError


@dataclass
class TorchRun:
    """The result of :func:`load_torch`.

    Attributes:
        optimizer (Optimizer, optional): The MLX optimizer, with PyTorch's settings and
            state. With ``loss_scaling`` it is wrapped in a ``LossScaleOptimizer``. None
            if no optimizer was loaded.
        scaler (GradScaler, optional): The scaler, with PyTorch's state. None if no
            scaler was loaded, unless ``loss_scaling`` creates a new one.
        template (Template): The checkpoint without the tensors that MLX now holds, for
            :func:`~mlx_gradscale.convert.save_torch`.
        notes (list): Notes on differences between PyTorch and MLX, and on entries that
            were not converted.
    """

    optimizer: Optimizer | None
    scaler: GradScaler | None
    template: Template
    notes: list[str] = field(default_factory=list)


def load_torch(
    path: str | os.PathLike[str],
    model: nn.Module,
    options: Options | None = None,
    *,
    learning_rate: Rate | Sequence[Rate] | None = None,
    loss_scaling: bool = False,
    max_grad_norm: float | None = None,
    state_bits: int = 32,
) -> TorchRun:
    """Load a PyTorch checkpoint into an MLX model and build its optimizer and scaler.

    Args:
        path (str): A ``.pt`` or ``.safetensors`` file, or a folder saved by
            Accelerate or Transformers' Trainer.
        model (nn.Module): The model to load the weights into. Its names and shapes must
            match the checkpoint's, after conversion to MLX.
        options (Options, optional): Settings that cannot be inferred from the files.
        learning_rate (float, Callable or list, optional): A number or a schedule, as
            for ``mlx.optimizers``, to replace the checkpoint's rate. If PyTorch's
            parameter groups have different rates, pass a list with one rate per group.
        loss_scaling (bool): Wrap the optimizer in a ``LossScaleOptimizer``. The weights
            are cast to the model's dtypes, and the original weights become the master
            weights, so call ``model.set_dtype(mx.float16)`` first. If False, the model
            takes the checkpoint's dtypes. Default: ``False``.
        max_grad_norm (float, optional): Passed to the ``LossScaleOptimizer``; ignored
            without ``loss_scaling``. Default: ``None``.
        state_bits (int): Passed to the ``LossScaleOptimizer``; ignored without
            ``loss_scaling``. With 16, the moments are rounded to bfloat16, and written
            to PyTorch in the dtype they had there. Default: ``32``.

    Returns:
        TorchRun: The optimizer, the scaler and the template. The optimizer computes the
        same updates as PyTorch's, except for rounding and accepted differences.

    Raises:
        ConvertError: If the checkpoint does not match the model or cannot be converted.
            The model is left unchanged.
        CheckpointError: If a file is damaged, hostile or unsupported.

    Example:
        >>> import tempfile
        >>> from mlx_gradscale import torch_checkpoint
        >>> tensors = {"weight": mx.ones((1, 2)), "bias": mx.zeros(1)}
        >>> path = tempfile.mkdtemp() + "/run.pt"
        >>> torch_checkpoint.save(path, {"model": tensors, "epoch": 3})
        >>> model = nn.Linear(2, 1)
        >>> load_torch(path, model).template["epoch"]
        3
        >>> model.weight
        array([[1, 1]], dtype=float32)
    """
    options = options or Options()
    checkpoint, files, notes = read_torch(path, options.limits)
    if is_template(checkpoint):
        raise ConvertError(f"{path} is a template. Pass the PyTorch checkpoint itself.")
    template, more = make_template(checkpoint, model, options, files)
    state = template.scaler_state()
    scaler: GradScaler | None = None
    if state is not None:
        scaler = GradScaler()
        scaler.load_state_dict(state)
    optimizer: Optimizer | None = None
    if template.groups:
        optimizer = build_optimizer(template, learning_rate)
        if loss_scaling:
            optimizer = LossScaleOptimizer(
                optimizer,
                scaler,
                max_grad_norm=max_grad_norm,
                state_bits=state_bits,
            )
            if scaler is None:
                more.append(
                    "The checkpoint has no state of PyTorch's GradScaler, so the "
                    "scaler is new. To find a first loss scale: from mlx_gradscale."
                    "diagnostics import calibrate; calibrate(run.optimizer, model, "
                    "loss_fn, *batch)"
                )
            scaler = optimizer.scaler
    elif loss_scaling or learning_rate is not None:
        what = "learning_rate" if learning_rate is not None else "loss_scaling"
        raise ConvertError(f"No optimizer is loaded from {path}. Do not pass {what}=.")
    before = snapshot(model, *map(vars, model.modules()))
    try:
        _fill(model, optimizer, template)
    except BaseException:
        restore(before)
        raise
    return TorchRun(optimizer, scaler, template, notes + more)


def _fill(model: nn.Module, optimizer: Optimizer | None, template: Template) -> None:
    """Move a template's arrays to the model and the optimizer."""
    weights = template.plan.to_mlx(template.tensors())
    template.plan.change_model()
    trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
    rounded: set[str] = set()
    if optimizer is not None:
        inner = getattr(optimizer, "optimizer", optimizer)
        _load_optimizer(inner, template, model)
    if isinstance(optimizer, LossScaleOptimizer):
        # The others have master weights.
        rounded = _load_rounded(model, weights, optimizer) - trained
    else:
        model.load_weights(list(weights.items()), strict=False)
    # Until they are evaluated, transposed arrays keep the originals in memory.
    mx.eval(model.parameters(), optimizer.state if optimizer else [])
    template.drop_tensors(rounded, trained)


def _load_optimizer(optimizer: Optimizer, template: Template, model: nn.Module) -> None:
    flat = to_mlx(template.groups, template.tensors())
    optimizer.init(model.trainable_parameters())
    own = dict(tree_flatten(optimizer.state))
    # The optimizer was built with the right learning rate or schedule.
    flat |= {k: x for k, x in own.items() if k.split(".")[-1] == "learning_rate"}
    missing = dict.fromkeys(k.rpartition(".")[0] for k in own if k not in flat)
    if missing:
        raise ConvertError(
            "The PyTorch optimizer has no state for trainable parameters of the MLX "
            f"model: {list_some(missing)}. Freeze them in MLX before loading, for "
            "example with layer.freeze()."
        )
    optimizer.state = tree_unflatten([(k, flat[k]) for k in own])


def _load_rounded(
    model: nn.Module, weights: Mapping[str, mx.array], optimizer: LossScaleOptimizer
) -> set[str]:
    """Load weights in the model's dtypes; return the names of those that were cast."""
    own = dict(tree_flatten(model.parameters()))
    cast = {name: x.astype(own[name].dtype) for name, x in weights.items()}
    infinite = [
        name
        for name, x in cast.items()
        if mx.any(mx.isfinite(x) != mx.isfinite(weights[name])).item()
    ]
    if infinite:
        raise ConvertError(
            f"These weights overflow in the model's dtype: {list_some(infinite)}. Keep "
            "their layers in float32."
        )
    model.load_weights(list(cast.items()), strict=False)
    trainable = model.trainable_parameters()
    optimizer.init(trainable)
    masters = tree_map_with_path(
        lambda path, x: to_float32(weights.get(path, x)), trainable
    )
    optimizer.set_masters(trainable, masters)
    return {name for name, x in cast.items() if x.dtype != weights[name].dtype}
