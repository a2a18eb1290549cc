"""Which layer made the first value that is not finite, of what probes noted."""

from ..finite import NonFinite
from ..probes import Event, Probes

# A layer's path, "" for the model, None for the loss function; and a sentence.
Place = tuple[str | None, str]


def first_forward(probes: Probes, loss_is_finite: bool) -> Place | None:
    """Return the layer whose value in the forward pass was the first; None if none."""
    for event in probes.forward:
        nan, positive, _ = event.counts
        # If the loss is finite, only what has a gradient can have spoilt one; and
        # -inf without a gradient is a mask.
        at_fault = event.differentiated or (not loss_is_finite and (nan or positive))
        if any(event.counts) and at_fault:
            if event.side == "output":
                return event.path, f"First in the output of {_name(event)}: {event}."
            return event.caller, (
                f"First in what {_caller(event)} hands to {_name(event)}: {event}. "
                f"{_caller(event)} made it, in code of its own."
            )
    return None


def first_backward(probes: Probes, leaves: list[NonFinite]) -> Place:
    """Return the layer whose gradient was the first.

    Args:
        probes (Probes): Of a pass whose forward half is finite.
        leaves (list): The gradients of parameters that are not finite.
    """
    # A weight's gradient is ready after the gradient of its layer's output.
    ready: dict[str, int] = {}
    bad = len(probes.backward)
    for i, event in enumerate(probes.backward):
        if event.side == "output":
            ready.setdefault(event.path, i)
        if any(event.counts):
            bad = i
            break
    of_layers = [(r.path.rpartition(".")[0], r) for r in leaves]
    done = [(ready[path], path, r) for path, r in of_layers if path in ready]
    done = [item for item in done if item[0] < bad]
    if done:
        _, path, leaf = min(done, key=lambda item: item[0])
        return path, f"First in the gradient of the parameter {leaf.path}."
    if bad == len(probes.backward):
        leaf = leaves[0]
        path = leaf.path.rpartition(".")[0]
        return path, f"First in the gradient of the parameter {leaf.path}."
    event = probes.backward[bad]
    if event.side == "input":
        return event.path, (
            f"First in the gradient that {_name(event)} hands back: {event}."
        )
    return event.caller, (
        f"First in the gradient that {_caller(event)} hands back to {_name(event)}: "
        f"{event}."
    )


def _name(event: Event) -> str:
    return event.path or "the model"


def _caller(event: Event) -> str:
    if event.caller is None:
        return "the loss function"
    return event.caller or "the model"
