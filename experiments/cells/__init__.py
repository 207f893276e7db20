"""What all experiments share: cells that are trained once, their records, and a runner that fills them in sessions."""

from experiments.cells.cell import Cell, Metric
from experiments.cells.records import Record
from experiments.cells.runner import Tally, run_cells

__all__ = ["Cell", "Metric", "Record", "Tally", "run_cells"]
