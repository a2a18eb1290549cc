"""Record which gradients ``scale_loss()`` has unscaled, and refuse the others in steps.

``scale_loss()`` scales the gradient of its output, and unscales those of the parameters
and arguments that it finds. A parameter that it does not find has a scaled gradient,
and nothing shows it in the array. So each call of a wrapped loss function records what
it has unscaled when it is differentiated.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .trees import Leaf, is_floating, read

START_AFRESH = (
    "To discard an interrupted iteration, call scaler.update(scaler.get_scale())."
)
# The id of a container and a key: where a parameter is in a model.
Place = tuple[int, Any]


@dataclass
class Passes:
    """The backward passes of a scaler, since the last ``update()`` and before."""

    # The calls of wrapped loss functions that were differentiated in this iteration.
    # Of these, the calls that have unscaled a gradient.
    n_calls: int = 0
    n_unscaling_calls: int = 0
    # Of these, the calls that found a model and also unscaled an argument, which may
    # have been computed by other parts of the model.
    n_feature_calls: int = 0
    # The largest number of arguments that a call has unscaled.
    n_arguments: int = 0
    # The parameters whose gradients were unscaled, in this iteration and in earlier
    # ones, because only the first call of a compiled function is recorded.
    places: set[Place] = field(default_factory=set)
    earlier: set[Place] = field(default_factory=set)
    # Whether the last iteration with a call had one that unscaled nothing.
    has_scaled_earlier: bool = False

    def has_scaled(self) -> bool:
        """Return whether the gradients of a call are all scaled."""
        if self.n_calls:
            return self.n_calls > self.n_unscaling_calls
        return self.has_scaled_earlier

    def end_iteration(self) -> None:
        """Reset the counters; remember the places, and whether a call was wrong."""
        self.has_scaled_earlier = self.has_scaled()
        self.earlier |= self.places
        self.places = set()
        self.n_calls = self.n_unscaling_calls = 0
        self.n_feature_calls = self.n_arguments = 0

    def check(self, stepped: list[Leaf], is_model: bool) -> None:
        """Raise if the gradient of a leaf may still be scaled.

        1. If a call has unscaled nothing, every gradient is an error.
        2. If the parameters are in a tree of their own, may be the arguments, or may
           have computed an argument, nothing is known of them.
        3. Otherwise, a call must have found each parameter.

        Zero gradients are right in any case. Inside ``mx.compile``, no value can be
        read, so they count like others; passing the whole model avoids the error.
        """
        has_scaled = self.has_scaled()
        has_features = 0 < self.n_feature_calls == self.n_calls
        if not has_scaled and (has_features or not is_model):
            return
        # If this iteration knows one of the parameters, it has to know all of them.
        steps = {(id(leaf.container), leaf.key) for leaf in stepped}
        known = self.earlier if steps.isdisjoint(self.places) else self.places
        if steps <= known and not has_scaled:
            return
        nonzero = [leaf for leaf in stepped if _may_be_nonzero(leaf.gradient)]
        if not has_scaled and self.n_arguments >= len(nonzero):
            return
        for leaf in nonzero:
            if has_scaled or (id(leaf.container), leaf.key) not in known:
                raise RuntimeError(
                    f"The gradient of {leaf.path!r} is still scaled, or includes one "
                    "that is: scale_loss() did not find the parameter. Wrap a function "
                    "that calls the model, and pass the whole model, scale_loss("
                    "loss_fn, model). Pass other arrays to the function as arguments. "
                    "Do not mix gradients from scale_loss() with gradients from "
                    f"nn.value_and_grad(). {START_AFRESH}"
                )


def _may_be_nonzero(gradient: mx.array) -> bool:
    # Inside mx.compile, there is nothing to read.
    return is_floating(gradient) and read(mx.any(gradient)) is not False


class Call:
    """One call of a loss function from ``scale_loss()``."""

    def __init__(self, passes: Passes):
        self._passes = passes
        self._is_differentiated = False
        self._has_unscaled = False
        self._n_arguments = 0
        # The places of the parameters that the call has found.
        self.places: frozenset[Place] = frozenset()

    def note_scaling(self) -> None:
        """Record that the gradient of an output was scaled."""
        self._passes.n_calls += not self._is_differentiated
        self._is_differentiated = True

    def note_unscaling(self) -> None:
        """Record that the gradient of a parameter or an argument was unscaled."""
        self._passes.n_unscaling_calls += not self._has_unscaled
        self._passes.places |= self.places
        self._has_unscaled = True

    def note_argument(self) -> None:
        """Record that the gradient of an argument was unscaled."""
        self._n_arguments += 1
        passes = self._passes
        passes.n_arguments = max(passes.n_arguments, self._n_arguments)
        if self.places and self._n_arguments == 1:
            passes.n_feature_calls += 1
        self.note_unscaling()
