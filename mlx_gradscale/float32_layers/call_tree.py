"""The calls of one forward pass as a tree: who called whom, with values how large."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .probes import Value


@dataclass(eq=False)
class Call:
    """One call of a layer, or of the loss function, whose path is None."""

    path: str | None
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    children: list["Call"] = field(default_factory=list)

    def largest_made(self) -> float:
        """Return the largest magnitude that this call computed itself.

        Its arguments, and what it passes from one call to the next, are not its own.
        """
        own = [value.magnitude for value in self.outputs]
        known = [value.magnitude for value in self.inputs]
        for child in self.children:
            inputs = [value.magnitude for value in child.inputs]
            own += [x for x in inputs if not is_one_of(x, known)]
            known += [value.magnitude for value in child.outputs]
        return max(own, default=0.0)

    def descendants(self) -> "Iterator[Call]":
        """Yield all calls within this one."""
        for child in self.children:
            yield child
            yield from child.descendants()


def build_call_tree(values: list[Value]) -> Call:
    """Return the call of the loss function, with all others in it."""
    root = Call(None)
    calls: dict[int | None, Call] = {None: root}
    for value in values:
        call = calls.setdefault(value.call, Call(value.path))
        (call.inputs if value.side == "input" else call.outputs).append(value)
    # A call without floating arguments is first seen by its output, after the calls in
    # it: so who is in whom comes last.
    within = {value.call: value.within for value in values}
    for number in sorted(within):
        calls.setdefault(within[number], Call("")).children.append(calls[number])
    return root


def is_one_of(x: float, others: list[float]) -> bool:
    """Tell whether a magnitude is that of another array, passed on."""
    return any(abs(x - other) <= 1e-3 * abs(other) for other in others)
