"""Who trains together: whose gradients are averaged, and who decides about a step."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..finite import all_finite, all_finite_times
from ..guard import unscale
from .averaging import average_gradients
from .consensus import Group, Sharded, finite_on_all_ranks, is_alone, norm_over_ranks


@dataclass(frozen=True)
class Ranks:
    """What a ``LossScaleOptimizer`` was given about other ranks.

    Args:
        group (Group, optional): The ranks that train together.
        average (str, optional): ``"float32"`` or ``"scaled"``: how gradients are
            averaged over the group. None: they are not.
        sharded (Callable, optional): Told path and gradient, whether this is a shard.
        deciders (Group, optional): The ranks that decide together whether a step is
            applied. None: this one alone, or averages are equal already.
    """

    group: Group | None
    average: str | None
    sharded: Sharded | None
    deciders: Group | None

    @classmethod
    def of(
        cls,
        group: Group | None,
        average: str | None,
        sharded: Sharded | None,
        scaler_group: Group | None,
    ) -> "Ranks":
        """Return the ranks of an optimizer whose scaler may have a group of its own.

        Such a scaler decides over that: shards in one group can be averaged over
        another.
        """
        if average not in (None, "float32", "scaled"):
            raise ValueError(f'average must be "float32" or "scaled", got {average!r}.')
        if group is None and (average or sharded):
            raise ValueError(
                "average= and sharded= need a group: pass group=mx.distributed.init()."
            )
        deciders = scaler_group
        if deciders is None and (average is None or sharded):
            deciders = group
        elif average is None and group not in (None, deciders):
            raise ValueError(
                "The scaler has another group than this optimizer: leave one out, or "
                "say with average= that gradients are averaged over the optimizer's."
            )
        return cls(group, average, sharded, deciders)

    @property
    def are_one(self) -> bool:
        """Whether there is nobody else."""
        return is_alone(self.group) and is_alone(self.deciders)

    def averaged(
        self,
        gradients: Any,
        like: Any,
        weight: float | mx.array | None,
        inverse: mx.array | None,
        loss_finite: mx.array,
    ) -> tuple[Any, mx.array | None, mx.array]:
        """Return gradients over the group, what is left to multiply them with, and
        whether every rank's loss was finite.

        Args:
            gradients (Any): This rank's; empty where it has none.
            like (Any): The parameters that they would be of, for a rank without.
            weight (float or array, optional): How much this rank counts.
            inverse (array, optional): What to multiply scaled gradients with.
            loss_finite (array): Whether this rank's losses were finite.
        """
        if self.average is None or is_alone(self.group):
            return gradients, inverse, loss_finite
        if not tree_flatten(gradients):
            gradients = tree_map(mx.zeros_like, like)
            weight = 0.0 if weight is None else weight
        if self.average == "float32":
            gradients, inverse = unscale(gradients, inverse), None
        # Whether a loss was not finite travels with the gradients, in the same
        # all-reduce, so that all ranks do the same with their scale.
        bad_loss = mx.logical_not(loss_finite).astype(mx.float32)
        averaged = average_gradients(
            {"gradients": gradients, "loss": bad_loss},
            self.group,
            weight=weight,
            only=self._is_averaged,
        )
        return averaged["gradients"], inverse, averaged["loss"] == 0

    def _is_averaged(self, path: str, x: mx.array) -> bool:
        path = path.removeprefix("gradients.")
        return path == "loss" or self.sharded is None or not self.sharded(path, x)

    def all_finite(
        self, gradients: Any, factor: mx.array | None, loss_finite: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return whether all of ``gradients * factor`` and all losses are finite."""
        if factor is None:
            finite = all_finite(gradients)
        else:
            finite = all_finite_times(gradients, factor)
        return finite_on_all_ranks(finite, loss_finite, self.deciders)

    def norm(
        self, gradients: Any, factor: mx.array, loss_finite: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the norm of ``gradients * factor``, and whether losses are finite."""
        return norm_over_ranks(
            gradients, factor, loss_finite, self.deciders, self.sharded
        )
