"""``load_torch``: load a PyTorch checkpoint into a live MLX run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ..core.masters import HALF, to_float32
from ..core.optimizer import LossScaleOptimizer
from ..core.scaler import GradScaler
from .folder import read_torch
from .optimizers import Rate
from .options import Options
from .template import Template, make_template
from .tree import ConvertError, list_some


@dataclass
class TorchRun:
    """The result of :func:`load_torch`.

    Attributes:
        optimizer (Optimizer, optional): Built with PyTorch's settings and state. With
            ``loss_scaling`` it is wrapped in a ``LossScaleOptimizer``.
        scaler (GradScaler, optional): With PyTorch's state.
        template (Template): The checkpoint without the tensors that MLX now holds, for
            :func:`~mlx_gradscale.convert.save_torch`.
        notes (list): Differences in MLX, and entries that were left out.
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
    masters: str = "float32",
) -> TorchRun:
    """Load a PyTorch checkpoint into an MLX model and build its optimizer and scaler.

    Args:
        path (str): A ``.pt`` file, or a Transformers Trainer or Accelerate folder.
        model (nn.Module): Receives the weights; every name and shape must match.
        options (Options, optional): Settings that the checkpoint does not determine.
        learning_rate (float, Callable or list, optional): A number or a schedule, as
            for ``mlx.optimizers``, to replace the checkpoint's rate. PyTorch's
            parameter groups share it if they share a rate; otherwise pass a list with
            one per group.
        loss_scaling (bool): Wrap the optimizer in a ``LossScaleOptimizer``. The weights
            are cast to the model's own dtypes, and the uncast ones become its master
            weights: call ``model.set_dtype(mx.float16)`` first. If False, the model
            takes the checkpoint's dtypes.
        max_grad_norm (float, optional): For the ``LossScaleOptimizer``.
        masters (str): For the ``LossScaleOptimizer``.

    Returns:
        TorchRun: Optimizer, scaler and template. The optimizer computes the same
        updates as PyTorch's.

    Raises:
        ConvertError: If anything does not match. The model's weights are unchanged.

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
    template, notes = read_run(path, model, options)
    weights = template.weights()
    template.plan.change_model()
    scaler = make_scaler(template)
    optimizer: Optimizer | None = None
    names: list[str] | None = None
    if template.groups:
        optimizer = template.build_optimizer(learning_rate)
        names = _load_optimizer(optimizer, template, model, learning_rate is not None)
    elif loss_scaling or learning_rate is not None:
        what = "learning_rate" if learning_rate is not None else "loss_scaling"
        raise ConvertError(f"{path} has no optimizer state. Do not pass {what}=.")
    rounded: list[str] = []
    if loss_scaling and optimizer is not None:
        optimizer = LossScaleOptimizer(
            optimizer, scaler, max_grad_norm=max_grad_norm, masters=masters
        )
        scaler = optimizer.scaler
        rounded = _load_rounded(model, weights, optimizer)
    else:
        model.load_weights(list(weights.items()), strict=False)
    # Arrays are read from the file lazily. Evaluate them before the file can change.
    mx.eval(model.parameters(), optimizer.state if optimizer else [])
    entries = template.plan.entries.values()
    held = set(rounded)
    kept = [e.torch for e in entries if held.intersection(e.mlx)]
    template.drop_tensors(kept, names)
    return TorchRun(optimizer, scaler, template, notes)


def read_run(
    path: str | os.PathLike[str], model: nn.Module | None, options: Options
) -> tuple[Template, list[str]]:
    """Read a PyTorch checkpoint; return a template with its tensors, and notes."""
    checkpoint, files, left = read_torch(path, options)
    template, notes = make_template(checkpoint, model, options, files)
    if left:
        notes.append(
            "These files are too large, or not regular files, and were left out: "
            f"{list_some(left)}."
        )
    return template, notes


def make_scaler(template: Template) -> GradScaler | None:
    """Return a scaler with the template's state, or None if it has none."""
    state, _ = template.scaler_state()
    if state is None:
        return None
    scaler = GradScaler()
    try:
        scaler.load_state_dict(state)
    except (TypeError, KeyError, RuntimeError) as error:
        raise ConvertError(f"The scaler state cannot be loaded: {error}") from error
    return scaler


def _load_optimizer(
    optimizer: Optimizer, template: Template, model: nn.Module, keep_rate: bool
) -> list[str]:
    """Load the state into a new optimizer; return the parameters that have state."""
    flat = template.optimizer_state()
    trainable = model.trainable_parameters()
    optimizer.init(trainable)
    names = [name for name, _ in tree_flatten(trainable)]
    own = dict(tree_flatten(optimizer.state))
    missing = [key for key in own if key not in flat]
    if missing:
        raise ConvertError(
            "The PyTorch optimizer has no state for trainable parameters of the MLX "
            f"model: {list_some(missing)}. Freeze them with model.freeze() before "
            "loading."
        )
    kept = ("learning_rate",) if keep_rate else ()
    state = [(k, x if k.split(".")[-1] in kept else flat[k]) for k, x in own.items()]
    optimizer.state = tree_unflatten(state)
    return names


def _load_rounded(
    model: nn.Module, weights: Mapping[str, mx.array], optimizer: LossScaleOptimizer
) -> list[str]:
    """Load weights in the model's dtypes; return rounded ones without a master copy."""
    own = dict(tree_flatten(model.parameters()))
    cast = {name: x.astype(own[name].dtype) for name, x in weights.items()}
    infinite = [
        name
        for name, x in cast.items()
        if x.dtype in HALF
        and not mx.all(mx.isfinite(x)).item()
        and mx.all(mx.isfinite(weights[name])).item()
    ]
    if infinite:
        raise ConvertError(
            f"These weights overflow in the model's dtype: {list_some(infinite)}. Keep "
            "their layers in float32."
        )
    model.load_weights(list(cast.items()), strict=False)
    trainable = model.trainable_parameters()
    optimizer.init(trainable)
    names = {name for name, _ in tree_flatten(trainable)}
    masters = tree_map_with_path(
        lambda path, x: to_float32(weights.get(path, x)), trainable
    )
    optimizer.set_masters(trainable, masters)
    return [
        n
        for n, x in cast.items()
        if x.dtype in HALF and weights[n].dtype != x.dtype and n not in names
    ]
