"""The paper's tables from training runs: a grid of cells, a runner that fills it sitting by sitting, and the report.

>>> from mgk import reproduce
>>> reproduce.sit(reproduce.cells("table1"), budget=60)
>>> print(reproduce.report(reproduce.read_all(Path("results/cells"))))
"""

from mgk.reproduce.grid import TARGETS, TASKS, Cell, cells
from mgk.reproduce.records import Record, read_all
from mgk.reproduce.report import report
from mgk.reproduce.runner import Tally, sit

__all__ = ["TARGETS", "TASKS", "Cell", "Record", "Tally", "cells", "read_all", "report", "sit"]
