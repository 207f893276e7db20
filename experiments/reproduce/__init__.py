"""The paper's tables from training runs: a grid of cells, a runner that fills it in sessions, and the report.

>>> from experiments import reproduce
>>> reproduce.run_cells(reproduce.cells("table1"), budget=60, results=reproduce.RESULTS, runs=reproduce.RUNS)
>>> print(reproduce.report(reproduce.read_all(reproduce.RESULTS)))
"""

from pathlib import Path

from experiments.cells import Tally, run_cells
from experiments.reproduce.grid import TARGETS, TASKS, Cell, Record, cells, read_all
from experiments.reproduce.report import report

RESULTS = Path("results") / "cells"
RUNS = Path("runs") / "reproduce"

__all__ = ["RESULTS", "RUNS", "TARGETS", "TASKS", "Cell", "Record", "Tally", "cells", "read_all", "report", "run_cells"]
