"""The figure of time against N."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plot import growth_figure, main

GROWTH = {str(n): {"flash": 2.0 * n, "cudnn": 1.5 * n, "mgk": 1.4 * n, "smgk": float(n)} for n in (4096, 16384, 8192)}


def test_lengths_are_sorted() -> None:
    (axes,) = growth_figure(GROWTH).axes
    lines = {str(line.get_label()).split(",")[0]: line.get_xydata() for line in axes.get_lines()}
    assert np.array_equal(lines["cuDNN"], [[n, 1.5 * n] for n in (4096, 8192, 16384)])
    assert np.array_equal(lines["sMGK"], [[n, n] for n in (4096, 8192, 16384)])


def test_results_without_that_part_are_named(tmp_path: Path) -> None:
    source = tmp_path / "bench.json"
    source.write_text(json.dumps({"operators": []}))
    with pytest.raises(ValueError, match=r"bench.json: expected a part 'growth'.*got operators"):
        main(str(source), str(tmp_path / "growth"))


def test_it_is_drawn_from_the_results(tmp_path: Path) -> None:
    source = tmp_path / "bench.json"
    source.write_text(json.dumps({"growth": GROWTH}))
    assert all(path.stat().st_size for path in main(str(source), str(tmp_path / "growth")))
