"""The calls of one forward pass as a tree: who called whom, with values how large."""

from dataclasses import dataclass, field

from .measure import Run, Value

# As additive masks are; where nothing has a gradient, only this tells them apart.
_MASK = 1e4


@dataclass
class Call:
    """One call of a module, or of the loss function, whose path is None."""

    path: str | None
    number: int | None = None
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)

    @property
    def module(self) -> str:
        """The path of a module's call."""
        return self.path or ""

    def made(self) -> float:
        """Return the largest value that this call made, or returned.

        What it was given, or got from a call and hands to another, is not its own.
        """
        own = [reach(value) for value in self.outputs]
        known = [reach(value) for value in self.inputs]
        for child in self.children:
            own += [x for x in map(reach, child.inputs) if not is_one_of(x, known)]
            known += [reach(value) for value in child.outputs]
        return max(own, default=0.0)


def call_tree(run: Run) -> Call:
    """Return the loss function's call with all others in it."""
    root = Call(None)
    calls: dict[int | None, Call] = {None: root}
    values = run.forward
    for value in values:
        number = value.event.call
        if number not in calls:
            calls[number] = Call(value.event.path, number)
        call = calls[number]
        side = call.inputs if value.event.side == "input" else call.outputs
        side.append(value)
    # A call without floating arguments is first seen by what it returns, after the
    # calls in it: so who is in whom comes last.
    within = {value.event.call: value.event.within for value in values}
    for number in sorted(within):
        calls.setdefault(within[number], Call("")).children.append(calls[number])
    return root


def reach(value: Value) -> float:
    """Return the largest value that counts: a mask of -1e9 does not."""
    return value.largest if value.event.differentiated else value.positive


def is_bad(value: Value, reference: Value, distance: float) -> bool:
    """Tell whether a value is not finite or far from the reference, and matters."""
    if not reference.is_finite:
        return False
    if reference.event.differentiated:
        return not value.is_finite or value.distance(reference) >= distance
    if value.nan or value.positive_inf:
        return True
    is_mask = reference.largest > _MASK and reference.positive < _MASK
    return not is_mask and value.distance(reference) >= distance


def is_one_of(x: float, others: list[float]) -> bool:
    """Tell whether a largest value is that of another array, handed on."""
    return any(abs(x - other) <= 1e-3 * abs(other) for other in others)
