"""The paper's tables from training runs: a grid of cells, a runner that fills it in sessions, and the report.

>>> from experiments import reproduce
>>> reproduce.run_cells(reproduce.cells("table1"), budget=60)
>>> print(reproduce.report(reproduce.read_all(Path("results/cells"))))
"""

from experiments.reproduce.grid import TARGETS, TASKS, Cell, cells
from experiments.reproduce.records import Record, read_all
from experiments.reproduce.report import report
from experiments.reproduce.runner import Tally, run_cells

__all__ = ["TARGETS", "TASKS", "Cell", "Record", "Tally", "cells", "read_all", "report", "run_cells"]
