"""Map the indices in PyTorch's optimizer state to the model's parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, zip_longest
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..files.text import list_some
from .groups import Group
from .names import Plan, bare_name, from_peft
from .options import Options
from .tree import ConvertError

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# Maximum number of steps in the search for an order, about a second. Real models take
# thousands. If a model takes more, too many orders are possible to trust any of them.
_MOST_WORK = 1_000_000


class Order:
    """Matches the optimizers' parameters, often known only by number, to tensors."""

    def __init__(
        self, groups: Sequence[Group], tensors: Mapping[str, Any], plan: Plan
    ) -> None:
        self.tensors, self.plan = tensors, plan
        self.sizes = [len(group.settings["params"]) for group in groups]
        self.indices = [index for g in groups for index in g.settings["params"]]
        self.shapes = [g.shape(index) for g in groups for index in g.settings["params"]]
        self.saved = [list(group.settings.get("param_names", ())) for group in groups]

    def find(
        self, options: Options, model: Any, is_ordered: bool = True
    ) -> tuple[list[str], list[str]]:
        """Return the PyTorch name of each parameter, group by group.

        Names not given or saved are inferred from the tensors' order or, if
        ``is_ordered`` is False, from the MLX model's. The second result lists notes on
        parameters whose order cannot be checked by shape.
        """
        names: Sequence[str] | None = options.names
        if names is None and {*map(type, self.indices)} == {str}:
            # FullyShardedDataParallel and torch.distributed use names as indices.
            names = tuple(map(str, self.indices))
        elif names is None and [len(saved) for saved in self.saved] == self.sizes:
            names = tuple(name for saved in self.saved for name in saved)
        if names is not None:
            found = self.match(names, options.rename)
            shapes = [self.tensors[name].shape for name in found]
            fits = [a in (None, b) for a, b in zip(self.shapes, shapes, strict=True)]
            # Transformers' Trainer splits the parameters into groups by weight decay.
            if not all(fits):
                return self._deal(found), []
            return found, [] if options.names is None else self._doubts(found)
        names = list(self.tensors) if is_ordered else self._mlx_order(model)
        names = self._candidates(names)
        found = self._deal(names)
        taken = {*found}
        left = [name for name in names if name not in taken]
        return found, self._swap_notes(found, left, is_ordered)

    def _candidates(self, names: Iterable[str]) -> list[str]:
        """Return the names that may be parameters, with each tied tensor only once."""
        parameters = [n for n in names if n.rpartition(".")[2] not in _BUFFERS]
        return list(dict.fromkeys(self.plan.tied.get(n, n) for n in parameters))

    def match(
        self, given: Sequence[str], rename: Callable[[str], str] = str
    ) -> list[str]:
        """Match the given names to tensors, ignoring the words that wrappers insert."""

        def plain(name: str) -> str:
            return from_peft(bare_name(rename(name)))[0]

        spelled: dict[str, list[str]] = {}
        for name in self.tensors:
            spelled.setdefault(plain(name), []).append(name)
        fits = [[n] if n in self.tensors else spelled.get(plain(n), []) for n in given]
        wrong = [name for name, fit in zip(given, fits, strict=True) if len(fit) != 1]
        found = [self.plan.tied.get(fit[0], fit[0]) for fit in fits if len(fit) == 1]
        count = len(self.indices)
        if not len(given) == len(found) == len({*found}) == count:
            what = f" No match or no unique match: {list_some(wrong)}." if wrong else ""
            raise ConvertError(
                f"The names must match the optimizer's {count} parameters one to one, "
                f"but the list of {len(given)} names matches {len({*found})} different "
                f"tensors of the model.{what} {_advice(len(given) > count)}"
            )
        return found

    def _mlx_order(self, model: nn.Module) -> list[str]:
        """Return PyTorch's names in PyTorch's order, inferred from the MLX model.

        A module's own parameters come first, weight before bias, followed by those of
        its submodules in the order in which they were assigned.
        """
        # mlx-lm orders some layers differently from Transformers (Llama's gate, down
        # and up, GPT-2's norms).
        if hasattr(model, "sanitize"):
            raise ConvertError(
                "The order of the optimizer's parameters is unknown: a safetensors "
                "file does not store it, and the order of an mlx-lm model may differ "
                f"from PyTorch's. {_advice()}"
            )
        entries = self.plan.entries
        place = {
            name: i for i, (name, _) in enumerate(tree_flatten(model.parameters()))
        }
        keys: dict[str, list[tuple[int, int]]] = {}
        first: dict[str, int] = {}
        for name in sorted(entries, key=lambda n: place.get(entries[n].mlx[0], -1)):
            *modules, _ = accumulate(name.split("."), "{}.{}".format)
            rank = {"weight": -2, "bias": -1}.get(name.rpartition(".")[2], 0)
            at = len(keys)
            keys[name] = [(1, first.setdefault(m, at)) for m in modules] + [(rank, at)]
        rest = [name for name in self.tensors if name not in entries]
        return sorted(keys, key=keys.__getitem__) + rest

    def _deal(self, names: list[str]) -> list[str]:
        """Assign names to groups by shape, keeping their order within each group.

        Each key of ``placings`` counts the assigned parameters of every group. Its
        value is the number of assignments with these counts (2 means several), and one
        of them as a linked list of positions and names.
        """
        starts = [0, *accumulate(self.sizes)]
        may_skip = len(names) > len(self.indices)
        placings: dict[Any, tuple[int, Any]] = {(0,) * len(self.sizes): (1, None)}
        work = 0
        for name in names:
            shape = self.tensors[name].shape
            following: dict[Any, tuple[int, Any]] = {}
            for dealt, (ways, path) in placings.items():
                options = [(dealt, path)] if may_skip else []
                for group, done in enumerate(dealt):
                    at = starts[group] + done
                    if done < self.sizes[group] and self.shapes[at] in (None, shape):
                        step = (*dealt[:group], done + 1, *dealt[group + 1 :])
                        options.append((step, (at, name, path)))
                work += len(dealt) * (1 + len(options))
                if work > _MOST_WORK:
                    raise ConvertError(
                        "Too many orders of the optimizer's parameters are possible. "
                        f"{_advice(may_skip)}"
                    )
                for step, linked in options:
                    before = following.get(step, (0, None))[0]
                    following[step] = (min(before + ways, 2), linked)
            placings = following
        ways, path = placings.get(tuple(self.sizes), (0, None))
        if ways != 1:
            raise ConvertError(
                f"{'More than one' if ways else 'No'} order of the model's "
                f"{len(names)} tensors matches the shapes of the optimizer's "
                f"{len(self.indices)} parameters. {_advice(may_skip)} The flat states "
                "of DeepSpeed and fairseq cannot be converted. Leave them out with "
                "keys={'optimizer': ''} (--optimizer-key '')."
            )
        found = [""] * len(self.indices)
        while path is not None:
            at, found[path[0]], path = path
        return found

    def _doubts(self, names: list[str]) -> list[str]:
        """Return a note if given names match the groups in more than one way."""
        with suppress(ConvertError):
            if len(self.sizes) == 1 or self._deal(names) == names:
                return []
        return [
            "The given names were assigned to the optimizer's groups in order, but "
            "their shapes also match in another way. If they are in the order of "
            "model.named_parameters(), list them group by group instead."
        ]

    def _swap_notes(
        self, names: list[str], left: list[str], is_ordered: bool
    ) -> list[str]:
        """Return a note if the optimizer may have another order of modules.

        Another order has the same shapes only if two modules start with the same
        shape: at the first difference, one takes the place of the other. Parameters
        that were ``left`` out may also take the place of one.
        """
        if len(self.sizes) == 1 and not any(self.shapes):
            return []  # there are no moments to swap
        groups = [i for i, size in enumerate(self.sizes) for _ in range(size)]
        starts: dict[Any, dict[str, None]] = {}  # first shape -> modules
        seen = set()
        for group, name in zip_longest(groups, names + left):
            module, _, leaf = name.rpartition(".")
            # PyTorch's layers always have the weight before the bias.
            is_layer = is_ordered and module and leaf in ("weight", "bias")
            module = module if is_layer else name
            if (group, module) not in seen:
                seen.add((group, module))
                shape = tuple(self.tensors[name].shape)
                starts.setdefault(shape, {})[module] = None
        alike = [m for equal in starts.values() if len(equal) > 1 for m in equal]
        if not alike:
            return []
        order = "the model's state dict" if is_ordered else "the MLX model's layers"
        return [
            "The optimizer does not store the names of its parameters, so the order of "
            f"{order} was used. Shapes alone cannot confirm it, because "
            f"{list_some(dict.fromkeys(alike), 3)} have equal shapes. If the optimizer "
            f"was created with another order, their moments are swapped. {_advice()}"
        ]


def _advice(some_are_left: bool = False) -> str:
    which = " if p.requires_grad" if some_are_left else ""
    return (
        "Create the PyTorch optimizer with model.named_parameters() before saving, or "
        "pass the names of its parameters with names=... (--names FILE). For an "
        "optimizer of model.parameters(), even if it splits them by weight decay, they "
        f"are [name for name, p in model.named_parameters(){which}]. Otherwise, list "
        "them in the optimizer's order, group by group."
    )
