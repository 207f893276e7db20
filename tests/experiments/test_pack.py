"""Packed data sets pass their checksums after unpacking, and packed runs resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import mgk.data
from experiments.reproduce import run_cells
from experiments.reproduce.pack import main, pack_runs
from mgk.train.checkpoint import read_facts
from mgk.train.learner import Learner
from tests.experiments.common import CELLS, small_listops
from tests.train.common import LISTOPS


def test_unpacked_data_is_unchanged(data_root: Path, tmp_path: Path) -> None:
    (name,) = (path.name for path in mgk.data.prepared(data_root))
    file = tmp_path / "data.tar.xz"
    main(["data", name, "--to", str(file), "--data-root", str(data_root)])
    main(["unpack", str(file), "--to", str(tmp_path / "there")])
    there = mgk.data.load("listops", root=tmp_path / "there", verify=True, **LISTOPS)
    assert there.digest == mgk.data.load("listops", root=data_root, **LISTOPS).digest
    with pytest.raises(ValueError, match="names: expected prepared sets"):
        main(["data", "imdb", "--to", str(file), "--data-root", str(data_root)])


def test_a_stopped_run_resumes_elsewhere(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_listops(monkeypatch)
    real = Learner.update

    def update(self: Learner, step: int, batch: Any) -> None:
        real(self, step, batch)
        if step == 5 and self.config.model.attention == "smgk":
            os.kill(os.getpid(), signal.SIGTERM)

    def fill(folder: Path) -> list[str]:
        place: Any = {"results": tmp_path / "cells", "runs": folder, "data_root": data_root, "device": "cpu"}
        return run_cells(CELLS[:2], **place).finished

    monkeypatch.setattr(Learner, "update", update)
    assert fill(tmp_path / "here") == [CELLS[0].name]
    file = tmp_path / "runs.tar"
    results = tmp_path / "cells"
    assert pack_runs(file, tmp_path / "here", limit=0, results=results) == []
    assert pack_runs(file, tmp_path / "here", results=results) == [CELLS[1].name]
    # A run that was trained but has no record yet is packed, too, and first.
    assert pack_runs(file, tmp_path / "here", results=tmp_path / "none") == [CELLS[0].name, CELLS[1].name]
    assert pack_runs(file, tmp_path / "here", cells=[CELLS[0].name]) == [CELLS[0].name]
    main(["runs", "--runs", str(tmp_path / "here"), "--results", str(results), "--to", str(file)])
    main(["unpack", str(file), "--to", str(tmp_path / "there")])
    assert [path.name for path in (tmp_path / "there" / "listops").iterdir()] == ["smgk-h1-s0"]
    assert read_facts(tmp_path / "there" / CELLS[1].name / "last")["step"] == 6
    monkeypatch.setattr(Learner, "update", real)
    assert fill(tmp_path / "there") == [CELLS[1].name]
