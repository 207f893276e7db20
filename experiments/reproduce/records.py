"""The records of the paper's tables."""

from __future__ import annotations

from pathlib import Path

from experiments.cells import records
from experiments.reproduce.grid import Cell

Record = records.Record[Cell]


def read_all(results: Path) -> list[Record]:
    """Read all records, in the order of their names."""
    return records.read_all(results, Cell.parse)
