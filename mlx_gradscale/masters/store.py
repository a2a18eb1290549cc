"""The masters of an optimizer's parameters, in its state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from ..files.text import dtype_name
from ..state_tree import Writes
from .half import BITS, HALF, full_precision, half_bits
from .remainder import Joined, join, no_remainder, remainder_of

#: How masters can be kept: see ``masters`` of :class:`LossScaleOptimizer`.
KINDS = ("float32", "remainder")


def join_kept(weight: mx.array, kept: Mapping[str, mx.array]) -> Joined:
    """Return the master of a parameter, in float32.

    Args:
        weight (array): The parameter, of any dtype.
        kept (dict): What :meth:`Masters.kept_of` has of it, empty without a master.
    """
    if "remainders" in kept:
        return join(weight, kept["remainders"])
    return Joined(full_precision(weight, kept.get("masters"), kept.get("written")))


class Masters:
    """A master for each half-precision parameter, by the parameter's path.

    Args:
        kind (str): ``"float32"``: as an array, and beside it the bits of the parameter
            as the last step wrote it. ``"remainder"``: what the parameter lacks of it.
    """

    def __init__(self, kind: str):
        if kind not in KINDS:
            raise ValueError(f'masters must be "float32" or "remainder", got {kind!r}.')
        self.kind = kind
        # One dict each for life: compiled steps have captured them.
        self.state: dict[str, dict[str, mx.array]] = {
            "masters": {},
            "written": {},
            "remainders": {},
        }
        # Names of dtypes, which can be pickled.
        self._dtypes: dict[str, str] = {}

    @property
    def _kept(self) -> dict[str, mx.array]:
        return self.state["masters" if self.kind == "float32" else "remainders"]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths of the parameters that have a master."""
        return iter(self._kept)

    def untouched(self, path: str, weight: mx.array) -> mx.array | None:
        """Return the whole master of a weight that is as the last step wrote it.

        Reads from the device. None where the master has to be computed.
        """
        written = self.state["written"].get(path)
        if written is None or weight.dtype not in HALF:
            return None
        bits = half_bits(weight)
        if bits.dtype != written.dtype or not mx.array_equal(bits, written).item():
            return None
        return self._kept[path]

    def add(self, path: str, weight: mx.array) -> None:
        """Give a half-precision parameter a master, unless it has one."""
        self._dtypes[path] = dtype_name(weight)
        if path in self._kept:
            return
        if self.kind == "remainder":
            self._kept[path] = no_remainder(weight)
        else:
            self._kept[path] = weight.astype(mx.float32)
            self.state["written"][path] = half_bits(weight)

    def set(self, path: str, master: mx.array, weight: mx.array) -> None:
        """Give a parameter another master.

        Args:
            path (str): The parameter's.
            master (array): In float32.
            weight (array): What it is rounded to.
        """
        for name, x in self._parts(master, weight).items():
            self.state[name][path] = x

    def check_has_all(self, parameters: Iterable[tuple[str, mx.array]]) -> None:
        """Raise if a half-precision parameter is without a master."""
        for path, parameter in parameters:
            if parameter.dtype in HALF and path not in self._kept:
                raise ValueError(
                    f"{path!r} became {parameter.dtype} after this optimizer was "
                    "initialised, and has no float32 master. Call init() again."
                )

    def _kept_for(self, path: str) -> dict[str, mx.array]:
        return {name: box[path] for name, box in self.state.items() if path in box}

    def kept_of(
        self, parameters: Iterable[tuple[str, mx.array]]
    ) -> dict[str, dict[str, mx.array]]:
        """Return what is kept of each half-precision parameter's master, by path."""
        halves = (path for path, x in parameters if x.dtype in HALF)
        return {path: self._kept_for(path) for path in halves if path in self._kept}

    def writes(
        self, path: str, kept: Mapping[str, mx.array], weight: mx.array
    ) -> Writes:
        """Return what to write, as (container, key, value), after a step.

        Args:
            path (str): The parameter's.
            kept (dict): What is to be kept of its new master.
            weight (array): The new parameter.
        """
        writes: Writes = [(self.state[name], path, x) for name, x in kept.items()]
        if "masters" in kept:
            writes.append((self.state["written"], path, half_bits(weight)))
        return writes

    def master_of(self, path: str, weight: mx.array) -> mx.array:
        """Return the master of a parameter, or itself in float32 if it has none."""
        return join_kept(weight, self._kept_for(path)).master

    def leaves_for(
        self, path: str, master: mx.array, weight: mx.array
    ) -> dict[str, mx.array]:
        """Return what the state has, by its dotted path, of another master.

        Args:
            path (str): The parameter's.
            master (array): In float32.
            weight (array): What it is rounded to.
        """
        parts = self._parts(master, weight)
        return {f"{name}.{path}": x for name, x in parts.items()}

    def _parts(self, master: mx.array, weight: mx.array) -> dict[str, mx.array]:
        if self.kind == "remainder":
            return {"remainders": remainder_of(master, weight)}
        if weight.dtype not in HALF:
            return {"masters": master}
        return {"masters": master, "written": half_bits(weight)}

    def leaves_as_here(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state's leaves with masters of this kind and these dtypes.

        Args:
            loaded (dict): All leaves of a ``LossScaleOptimizer``'s state by their path.
        """
        if self.kind == "float32":
            for path in loaded:
                if path.startswith("remainders."):
                    raise ValueError(
                        f'The state has {path!r}, of masters="remainder", which is a '
                        "master only with its weight, and this optimizer has "
                        'masters="float32": make it with masters="remainder", or use '
                        "save_checkpoint(), whose folders fit both."
                    )
        found = dict(loaded)
        for path in self._kept:
            master = loaded.get(f"masters.{path}")
            written = found.pop(f"written.{path}", None)
            if master is not None:
                del found[f"masters.{path}"]
                # The weight was this master, rounded.
                weight = master.astype(self._dtype(path))
                found |= self.leaves_for(path, master, weight)
            # A file may be without it, or be of a model in the other half.
            here = self.state["written"].get(path)
            if here is not None and written is not None and written.dtype == here.dtype:
                found[f"written.{path}"] = written
        return found

    def _dtype(self, path: str) -> mx.Dtype:
        if path in self.state["written"]:
            # The model may have been cast from one half to the other since.
            bits = self.state["written"][path].dtype
            return next(half for half in HALF if BITS[half] == bits)
        dtype: mx.Dtype = getattr(mx, self._dtypes[path])
        return dtype
