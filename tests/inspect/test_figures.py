"""Figures show the given numbers, and equal numbers give identical files."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch

from mgk.inspect import cost_curves, figures
from tests.disk import small_files


def test_curves_hold_the_points() -> None:
    figure: Any = figures.curves({"loss": {"a": ([1, 2], [3.0, 1.0]), "b": ([1, 2], [4.0, 2.0])}}, log_y=["loss"])
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[3.0, 1.0], [4.0, 2.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_yscale() == "log"


def test_maps_are_ordered_by_layer_and_head() -> None:
    """Each matrix is in the panel of its model, the row of its layer and the column of its head."""
    wide = [[torch.eye(4) * (1 + 10 * layer + head) for head in range(3)] for layer in range(2)]
    narrow = [[torch.eye(4) * 100]]
    figure: Any = figures.attention_maps({"wide": wide, "narrow": narrow})
    parts = figure.subfigs
    shown = [[float(axes.images[0].get_array().max()) if axes.images else None for axes in part.axes] for part in parts]
    assert shown == [[1, 2, 3, 11, 12, 13], [100, None]]


def test_log_maps_and_zero_maps_draw(tmp_path: Path) -> None:
    figure: Any = figures.attention_maps({"m": [[torch.eye(4), torch.zeros(4, 4)]]}, log=True)
    assert all(path.stat().st_size > 0 for path in figures.save(figure, tmp_path / "maps"))


def test_histograms_count_every_matrix() -> None:
    ranks = {"a": torch.tensor([[3, 4, 4], [8, 8, 8]]), "b": torch.tensor([[1, 8, 8]])}
    figure: Any = figures.rank_histograms(ranks, size=5)
    assert len(figure.axes) == 2
    for axes, layer in zip(figure.axes, range(2), strict=True):
        low, high = axes.get_xlim()
        assert all(low < rank < high for array in ranks.values() if layer < len(array) for rank in array[layer])
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["a (median 4)", "b (median 8)"]


def test_costs_and_bars() -> None:
    figure: Any = figures.costs(cost_curves(heads=(2, 4)), heads=(2, 4))
    assert [len(axes.lines) for axes in figure.axes] == [3, 3]
    assert figure.axes[0].lines[0].get_ydata()[1] > figure.axes[0].lines[2].get_ydata()[1]
    bars: Any = figures.bars({"accuracy": {"a": (1.0, 0.1), "b": (2.0, 0.2)}})
    assert [patch.get_height() for patch in bars.axes[0].patches] == [1.0, 2.0]


def test_files_repeat(tmp_path: Path) -> None:
    """A valid SVG and a PNG without a time stamp; the caller's matplotlib style is unchanged."""
    before = dict(mpl.rcParams)

    def saved(folder: str) -> list[bytes]:
        figure = figures.curves({"loss": {"a": ([1, 2], [3.0, 1.0])}})
        return [path.read_bytes() for path in figures.save(figure, tmp_path / folder / "curve")]

    first, second = saved("one"), saved("two")
    assert first == second
    assert ElementTree.fromstring(first[0]).tag.endswith("svg")
    assert first[1].startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before


def test_a_full_disk_leaves_the_figure_that_was_there(tmp_path: Path) -> None:
    figure = figures.curves({"loss": {"a": ([1, 2], [3.0, 1.0])}})
    before = [path.read_bytes() for path in figures.save(figure, tmp_path / "curve")]
    with small_files(1000), pytest.raises(OSError, match="File too large"):
        figures.save(figure, tmp_path / "curve")
    assert [(tmp_path / f"curve{ending}").read_bytes() for ending in (".svg", ".png")] == before
    assert len(list(tmp_path.iterdir())) == 2


def test_colours_stay_apart_without_hue() -> None:
    """The colour ramp of the maps gets darker throughout, so that it works in grey."""
    luminance = figures.PURPLE(np.linspace(0, 1, 32))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) < 0).all()
