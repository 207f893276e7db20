"""Where the records and runs of the study are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.cells.records import load, read_all
from experiments.lm import grid

RESULTS = Path("results") / "lm"


@dataclass(frozen=True)
class Folders:
    """The folders that a session reads and writes."""

    results: Path
    """Records of the study: cells/ and steps.json."""
    paper: Path
    """Records of the paper's tables."""
    runs: Path

    def of(self, piece: str) -> Path:
        """Return the folder of the records of a piece."""
        return self.paper if piece == "lra" else self.results / "cells"

    @property
    def steps(self) -> Path:
        """The file with the times of training steps."""
        return self.results / "steps.json"

    def records(self) -> list[grid.Record]:
        """Read all records of the study; those of the sweep decide the learning rates of the others."""
        return read(self.results)


def read(results: Path) -> list[grid.Record]:
    """Read all records under a folder of results."""
    cells = results / "cells"
    sweep = [load(path, cells, lambda name: grid.parse(name, {})) for path in sorted(cells.glob("sweep/[!.]*.json"))]
    rates = grid.chosen_rates(sweep)
    return read_all(cells, lambda name: grid.parse(name, rates))
