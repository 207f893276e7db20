"""A session fills cells in order, stops when told to, and resumes exactly; a record is complete or absent."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.cells import records
from experiments.cells.inside import unpack_map
from experiments.cells.records import REQUIRED
from experiments.reproduce import RESULTS, RUNS, Cell, Tally, grid, read_all, run_cells
from experiments.reproduce.grid import Row, Task
from experiments.reproduce.main import main
from mgk.files import beside, locked
from mgk.inspect.runs import Run
from mgk.recipes import runner
from mgk.recipes.runner import Stop
from mgk.train import Config, engine, evaluate, train
from mgk.train import replace as change
from mgk.train.checkpoint import read_facts
from mgk.train.learner import Learner
from tests.experiments.common import CELLS, SMGK, small_listops
from tests.killing import every_kill
from tests.recipes.common import small
from tests.train.common import tiny


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_listops(monkeypatch)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The trainings that were started or resumed, in order."""
    found: list[tuple[str, int]] = []
    real = Learner.__init__

    def start(self: Learner, fabric: Any, config: Config) -> None:
        found.append((config.model.attention, config.seed))
        real(self, fabric, config)

    monkeypatch.setattr(Learner, "__init__", start)
    return found


def fill(folder: Path, data_root: Path, cells: list[Cell], **options: Any) -> Tally:
    return run_cells(
        cells, results=folder / "cells", runs=folder / "runs", data_root=data_root, device="cpu", **options
    )


def test_cells_are_filled_in_order_and_never_again(data_root: Path, tmp_path: Path, begun: list[Any]) -> None:
    first = fill(tmp_path, data_root, CELLS[:2])
    assert first == Tally([cell.name for cell in CELLS[:2]])
    assert begun == [("softmax", 0), ("smgk", 0)]
    second = fill(tmp_path, data_root, CELLS[:3])
    assert second.finished == [CELLS[2].name]
    assert begun[2:] == [("softmax", 1)]
    assert [record.cell for record in read_all(tmp_path / "cells")] == sorted(CELLS[:3], key=lambda cell: cell.name)


def test_a_record_says_what_its_run_says(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_listops(monkeypatch, tiny(steps=8, model__max_length=16))  # some inputs are that long: ranks are counted
    fill(tmp_path, data_root, CELLS[1:2])
    record, run = read_all(tmp_path / "cells")[0], tmp_path / "runs" / CELLS[1].name
    result = json.loads((run / "result.json").read_text())
    assert set(REQUIRED) <= set(record.values)
    assert record.row == SMGK
    assert record.test == 100 * result["test"]["accuracy"]
    assert record.values["dev"] == 100 * result["valid"]["accuracy"]
    assert record.values["parameters"] == result["parameters"]
    assert record.values["configuration"] == json.loads((run / "config.json").read_text())
    assert record.values["data"]["digest"] == json.loads((run / "run.json").read_text())["starts"][0]["data"]["digest"]
    assert record.curve("valid", "accuracy")[0] == [4, 8]
    assert record.curve("train", "loss")[0] == [2, 4, 6, 8]
    assert records.stale([record]) == []
    assert record.values["inside"]["length"] == 16
    assert 1 <= record.values["inside"]["rank"][0] <= 16
    assert record.values["inside"]["effective_heads"] == pytest.approx([1.0])  # one head is one head
    opened = Run.open(run, data_root=data_root)
    (layer,) = opened.layers(next(given for given in opened.examples(16) if len(given.tokens) == 16))
    weights = layer.head(0).rows().weights
    assert record.values["inside"]["map_layers"] == [1]
    ((text,),) = record.values["inside"]["maps"]
    torch.testing.assert_close(unpack_map(text).sqrt(), (weights / weights.max()).sqrt(), rtol=0, atol=0.51 / 255)
    fill(tmp_path, data_root, CELLS[3:])
    assert "maps" not in read_all(tmp_path / "cells")[1].values["inside"]  # one seed of each row is shown


def test_a_record_names_every_commit_and_gpu_that_its_run_had(data_root: Path, tmp_path: Path) -> None:
    fill(tmp_path, data_root, CELLS[:1])
    run = tmp_path / "runs" / CELLS[0].name
    start = json.loads((run / "run.json").read_text())["starts"][0]
    for gpus, said in ((["A", "A", "B"], "A, B"), ([None, None], None)):
        starts = [start | {"gpu": gpu, "commit": f"c{number % 2}"} for number, gpu in enumerate(gpus)]
        (run / "run.json").write_text(json.dumps({"starts": starts}))
        record = records.make(CELLS[0], run, jobs=1, data_root=data_root)
        assert (record["gpu"], record["commit"], record["starts"]) == (said, "c0, c1", len(gpus))


def test_the_command_of_a_record_trains_again_apart_from_the_finished_run(
    data_root: Path, tmp_path: Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_cells(CELLS[:1], results=RESULTS, runs=RUNS, data_root=data_root, device="cpu")
    words = CELLS[0].command.split()
    assert words[:3] == ["python", "-m", "experiments.reproduce"]
    assert main([*words[3:], "--data-root", str(data_root), "--device", "cpu"]) == 0
    assert begun == [("softmax", 0), ("softmax", 0)]
    (first,), (second,) = read_all(Path("results/cells")), read_all(Path("again/cells"))
    assert first.test == second.test


def test_a_cell_that_is_told_to_stop_resumes_exactly(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]
) -> None:
    real = Learner.update

    def update(self: Learner, step: int, batch: Any) -> None:
        real(self, step, batch)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Learner, "update", update)
    tally = fill(tmp_path / "stopped", data_root, CELLS[:2])
    assert tally == Tally(left=[cell.name for cell in CELLS[:2]])
    assert begun == [("softmax", 0)]  # and nothing else was started
    assert read_facts(tmp_path / "stopped" / "runs" / CELLS[0].name / "last")["step"] == 5
    assert read_all(tmp_path / "stopped" / "cells") == []
    monkeypatch.setattr(Learner, "update", real)
    assert len(fill(tmp_path / "stopped", data_root, CELLS[:2]).finished) == 2
    fill(tmp_path / "whole", data_root, CELLS[:2])
    for a, b in zip(*(read_all(tmp_path / name / "cells") for name in ("stopped", "whole")), strict=True):
        assert [a.values[key] for key in ("test", "dev", "curve", "inside")] == [
            b.values[key] for key in ("test", "dev", "curve", "inside")
        ]


def test_a_cell_that_dies_as_its_record_is_written_is_not_finished(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]
) -> None:
    """Told to stop while writing, and a leftover of a process that was killed there."""
    real = os.replace

    def replace_file(source: Any, target: Any) -> None:
        if Path(target).parent == tmp_path / "cells" / "listops":
            raise Stop
        real(source, target)

    monkeypatch.setattr(os, "replace", replace_file)
    assert fill(tmp_path, data_root, CELLS[:1]).left == [CELLS[0].name]
    (tmp_path / "cells" / "listops" / ".softmax-h2-s0.json.17").write_text('{\n "recipe": "lis')
    assert read_all(tmp_path / "cells") == []
    monkeypatch.setattr(os, "replace", real)
    assert fill(tmp_path, data_root, CELLS[:1]).finished == [CELLS[0].name]
    assert len(begun) == 1  # the training itself was over


def test_a_session_killed_before_any_change_of_a_record_ends_the_same(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs have a test of their own, tests/train/test_kill.py."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("mgk.train.engine.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr(engine, "peak_bytes", lambda fabric: 0)
    small_listops(monkeypatch, tiny(steps=2))

    def session(folder: Path) -> None:
        fill(folder, data_root, CELLS[:1])

    def values(folder: Path) -> dict[str, Any]:
        (record,) = read_all(folder / "cells")
        assert [path.name for path in (folder / "cells").rglob(".*")] == []
        return {name: value for name, value in record.values.items() if name != "starts"}

    session(tmp_path / "undisturbed")
    kills = 0
    for folder in every_kill(session, tmp_path / "killed", without=f"runs/{CELLS[0].name}"):
        kills += 1
        session(folder)
        assert values(folder) == values(tmp_path / "undisturbed")
    assert kills >= 5


def test_a_cell_of_another_process_is_left_to_it(data_root: Path, tmp_path: Path, begun: list[Any]) -> None:
    with locked(beside(tmp_path / "runs" / CELLS[0].name, "lock"), wait=False) as ours:
        assert ours
        tally = fill(tmp_path, data_root, CELLS[:2])
    assert begun == [("smgk", 0)]
    assert tally.left == [CELLS[0].name]


def test_a_failure_does_not_stop_the_others_and_is_tried_again_later(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Learner.update

    def failing(self: Learner, step: int, batch: Any) -> None:
        if self.config.model.attention == "softmax":
            raise RuntimeError("out of memory")
        real(self, step, batch)

    monkeypatch.setattr(Learner, "update", failing)
    tally = fill(tmp_path, data_root, CELLS[:2])
    assert tally.finished == [CELLS[1].name]
    assert tally.failed == {CELLS[0].name: "RuntimeError: out of memory"}
    monkeypatch.setattr(Learner, "update", real)
    assert fill(tmp_path, data_root, CELLS[:2]).finished == [CELLS[0].name]


@pytest.mark.parametrize("error", [OverflowError("math range error"), KeyError("loss"), AssertionError("a kernel's")])
def test_after_an_error_of_any_type_the_others_continue(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also while the record is made, e.g. in exp of a diverged loss."""
    real = records.make

    def failing(cell: Cell, *args: Any, **options: Any) -> dict[str, Any]:
        if cell == CELLS[0]:
            raise error
        return real(cell, *args, **options)

    monkeypatch.setattr(records, "make", failing)
    tally = fill(tmp_path, data_root, CELLS[:2])
    assert tally.finished == [CELLS[1].name]
    assert tally.failed == {CELLS[0].name: f"{type(error).__name__}: {error}"}


def test_if_the_gpu_fails_the_others_run_in_another_process(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]
) -> None:
    """After an illegal access every CUDA call fails in that process, which this test simulates."""

    def failing(self: Learner, step: int, batch: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Learner, "update", failing)
    monkeypatch.setattr(runner, "release_device", lambda: False)
    tally = fill(tmp_path, data_root, CELLS[:3])
    assert begun == [("softmax", 0)]  # here; the others in worker processes
    assert list(tally.failed) == [CELLS[0].name]
    assert tally.finished == [cell.name for cell in CELLS[1:3]]


class Deadly(Config):
    """A configuration that ends a worker process."""

    def __post_init__(self) -> None:
        if multiprocessing.parent_process() is not None and self.model.attention == "softmax":
            os._exit(11)


@pytest.mark.usefixtures("quick_processes")
def test_a_process_that_dies_takes_one_cell_with_it(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_listops(monkeypatch, Deadly(**vars(tiny(steps=8))))
    tally = fill(tmp_path, data_root, CELLS[:3], jobs=2)
    died = "its process died with exit status 11"
    assert tally == Tally([CELLS[1].name], {CELLS[0].name: died, CELLS[2].name: died})


@pytest.mark.usefixtures("quick_processes")
def test_side_by_side_gives_the_same_records(data_root: Path, tmp_path: Path) -> None:
    fill(tmp_path / "one", data_root, CELLS[:2])
    tally = fill(tmp_path / "two", data_root, CELLS[:2], jobs=2)
    assert tally.finished == [cell.name for cell in CELLS[:2]]
    one, two = (read_all(tmp_path / name / "cells") for name in ("one", "two"))
    assert [(r.test, r.values["curve"]) for r in one] == [(r.test, r.values["curve"]) for r in two]
    assert {r.values["jobs"] for r in two} == {2}


@pytest.mark.usefixtures("quick_processes")
def test_a_session_side_by_side_ends_with_its_budget(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long trainings, four seconds of budget: the call returns, nothing is finished, nothing is lost."""
    small_listops(monkeypatch, tiny(steps=10**9))
    tally = fill(tmp_path, data_root, CELLS[:1], jobs=2, budget=4 / 60)
    assert tally == Tally(left=[CELLS[0].name])
    assert read_all(tmp_path / "cells") == []


def test_a_training_is_recorded_even_if_looking_inside_fails(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Path, root: Path | None, *, maps: bool) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(grid, "inside", fails)
    assert fill(tmp_path, data_root, CELLS[:1]).finished == [CELLS[0].name]
    values = read_all(tmp_path / "cells")[0].values
    assert (values["inside"], values["inside_error"]) == (None, "RuntimeError: no memory left")


def test_words_are_measured_by_the_sliding_window_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, which this test simulates."""
    short = {"steps": 2, "eval_every": 2, "log_every": 1, "optimiser__warmup": 1}
    config = change(small("wikitext2", tmp_path), **short)
    monkeypatch.setitem(grid.TASKS, "wikitext2", Task(config, "perplexity", "Small.", sliding=True))
    cell, run = Cell("wikitext2", SMGK, 0), tmp_path / "run"
    train(cell.config, run, data_root=tmp_path)
    facts = json.loads((run / "run.json").read_text())
    assert "test_sliding" not in records.make(cell, run, jobs=1, data_root=tmp_path)
    facts["starts"][0]["gpu"] = "GPU 1"
    (run / "run.json").write_text(json.dumps(facts))
    values = records.make(cell, run, jobs=1, data_root=tmp_path)
    assert values["test"] == pytest.approx(json.loads((run / "result.json").read_text())["test"]["perplexity"])
    assert values["test_sliding"] == evaluate(run, sliding=True, data_root=tmp_path)["sliding by one"]["perplexity"]


def test_tasks_without_data_are_left_out_with_advice(data_root: Path, tmp_path: Path) -> None:
    tally = fill(tmp_path, data_root, [Cell("text", Row("softmax", 8), 0), CELLS[0]])
    assert tally.finished == [CELLS[0].name]
    assert "mgk data prepare imdb" in tally.absent["text"]


def test_a_task_that_does_not_fit_its_data_does_not_stop_the_others(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grid.TASKS, "text", Task(tiny(model__vocabulary=7), "accuracy", "Small."))
    tally = fill(tmp_path, data_root, [Cell("text", SMGK, 0), CELLS[0]])
    assert tally.finished == [CELLS[0].name]
    assert "model.vocabulary: expected at least 16" in tally.absent["text"]


def test_a_record_that_does_not_fit_its_cell_is_reported_and_kept(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]
) -> None:
    """Of another configuration, or damaged: it is reported and kept, and the others continue."""
    fill(tmp_path, data_root, CELLS[:2])
    small_listops(monkeypatch, tiny(steps=9))
    records.path_of(tmp_path / "cells", CELLS[1]).write_text("{")
    tally = fill(tmp_path, data_root, CELLS[:3])
    assert tally.finished == [CELLS[2].name]
    assert len(begun) == 3
    assert list(tally.failed) == [CELLS[0].name, CELLS[1].name]
    assert "steps: the run in" in tally.failed[CELLS[0].name]
    assert "started with 8, got 9" in tally.failed[CELLS[0].name]
    assert all("remove it, and it is computed again" in reason for reason in tally.failed.values())


def test_a_run_of_two_data_sets_gives_no_record(data_root: Path, tmp_path: Path) -> None:
    fill(tmp_path, data_root, CELLS[:1])
    run = tmp_path / "runs" / CELLS[0].name
    facts = json.loads((run / "run.json").read_text())
    facts["starts"].insert(0, facts["starts"][0] | {"data": {"digest": "f" * 16}})
    (run / "run.json").write_text(json.dumps(facts))
    records.path_of(tmp_path / "cells", CELLS[0]).unlink()
    assert "resumed with other data" in fill(tmp_path, data_root, CELLS[:1]).failed[CELLS[0].name]


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"jobs": 0}])
def test_wrong_numbers_are_errors(data_root: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        fill(tmp_path, data_root, CELLS, **wrong)


def test_a_damaged_or_misnamed_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "listops" / "smgk-h1-s0.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ValueError, match=r"not a record .* computed again"):
        read_all(tmp_path)
    path.write_text(
        json.dumps(dict.fromkeys(REQUIRED, 0) | {"recipe": "listops", "attention": "mgk", "heads": 1, "option": ""})
    )
    with pytest.raises(ValueError, match="holds the record of attention mgk;"):
        read_all(tmp_path)
