"""The interface of a cell: one training of a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from mgk.train.config import Config

Metric = Literal["accuracy", "perplexity", "bits", "bleu"]
Measure = Callable[[], Any]
Adapt = Callable[[nn.Module], None]


class Cell(Protocol):
    """One training. Cells are hashable, and equal if they are the same training."""

    @property
    def name(self) -> str:
        """TASK/ROW-sSEED, the path of the record."""

    @property
    def task(self) -> str:
        """What it is trained on; all cells of a task read the same data."""

    @property
    def row(self) -> Any:
        """The model, without the seed: an object with a `name` and a `label`."""

    @property
    def metric(self) -> Metric:
        """How its score is reported."""

    @property
    def config(self) -> Config:
        """The configuration of the training."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The fields of the record that say which cell it is."""

    @property
    def command(self) -> str:
        """The command that computes the cell again, in new folders, so that a finished run is not reused."""

    @property
    def pretraining(self) -> tuple[Config, Adapt] | None:
        """The training whose encoder this one starts from, and what changes its model; None starts at random."""

    @property
    def adapt(self) -> Adapt | None:
        """A change of the new model that its configuration cannot say; None for none."""

    def measures(self, run: Path, data_root: Path | None, gpu: str | None) -> Mapping[str, Measure]:
        """Return further measurements of a finished run. The record says if one fails."""
