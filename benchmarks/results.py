"""The results of a run: the machine and the sections, to a file and back."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .rows import Figure, Point, Row, Section


@dataclass(frozen=True)
class Results:
    """The numbers of one run, with the machine that they belong to."""

    machine: dict[str, Any]
    sections: dict[str, Section]

    def save(self, path: Path) -> None:
        """Write everything, to draw it later or to compare two machines."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what :meth:`save` has written."""
        found = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"rows": Row, "figures": Figure, "points": Point}
        sections = {
            name: Section(**{k: [kinds[k](**x) for x in v] for k, v in data.items()})
            for name, data in found["sections"].items()
        }
        return cls(found["machine"], sections)

    def figures(self) -> Iterator[Figure]:
        """Every figure of every section."""
        for section in self.sections.values():
            yield from section.figures

    def wrong_counts(self) -> list[Figure]:
        """The counts above their bar. Times are never wrong, only slow."""
        return [f for f in self.figures() if f.counted and not f.met]
