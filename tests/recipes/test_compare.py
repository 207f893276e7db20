"""A comparison trains what is not finished, and its table shows the results of the runs."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from mgk.intervals import interval
from mgk.models import ClassifierConfig, MatcherConfig
from mgk.ops.cost import Dimensions, attention_flops, projection_flops
from mgk.recipes import compare, recipe, runner
from mgk.recipes.compare import Comparison, Row, with_attention
from mgk.recipes.runner import share_cores
from mgk.train import CheckpointError, Config, Result, engine
from mgk.train.checkpoint import read_facts
from mgk.train.evaluate import flops
from mgk.train.learner import Learner
from tests.killing import every_kill
from tests.processes import quick_context
from tests.train.common import prepare, tiny

ATTENTIONS = ("softmax:2", "smgk:1", "mgk:1:hard")
MODULE = sys.modules["mgk.recipes.compare"]  # `mgk.recipes.compare` is the function


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"))


def test_a_comparison_resumes_where_it_stopped(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=4)
    first = compare(config, ATTENTIONS[:1], seeds=2, out=tmp_path, data_root=data_root)
    assert [len(row.scores) for row in first.rows] == [2]
    started = []
    real = Learner.__init__

    def start(self: Learner, fabric: Any, config: Config) -> None:
        started.append((config.model.attention, config.seed))
        real(self, fabric, config)

    monkeypatch.setattr(Learner, "__init__", start)
    second = compare(config, ATTENTIONS, seeds=2, out=tmp_path, data_root=data_root)
    assert started == [("smgk", 0), ("mgk", 0), ("smgk", 1), ("mgk", 1)]
    assert second.rows[0] == first.rows[0]
    assert [row.attention for row in second.rows] == list(ATTENTIONS)
    for row in second.rows:
        runs = sorted((tmp_path / row.attention.replace(":", "-")).iterdir())
        results = [json.loads((run / "result.json").read_text()) for run in runs]
        assert row.scores == [100 * result["test"]["accuracy"] for result in results]
        assert row.parameters == results[0]["parameters"]
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"][0]["attention"] == "softmax:2"
    assert (tmp_path / "comparison.md").read_text() == second.table() + "\n"


def test_a_run_that_fails_does_not_stop_the_others(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = Learner.update

    def failing(self: Learner, step: int, batch: object) -> None:
        if self.config.model.attention == "softmax":
            raise CheckpointError("disk full")
        update(self, step, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "update", failing)
    found = compare(tiny(steps=2), ATTENTIONS[:2], out=tmp_path, data_root=data_root)
    assert [row.attention for row in found.rows] == ["smgk:1"]
    assert list(found.failed.values()) == ["CheckpointError: disk full"]
    assert "disk full" in capsys.readouterr().err


@pytest.fixture
def half_the_threads() -> Iterator[None]:
    """Like each of two processes: the number of threads changes the rounding of sums."""
    before = torch.get_num_threads()
    share_cores(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("quick_processes", "half_the_threads")
def test_runs_side_by_side_give_the_same(data_root: Path, tmp_path: Path) -> None:
    config = tiny(steps=2)
    one = compare(config, ATTENTIONS[:2], out=tmp_path / "one", data_root=data_root)
    two = compare(config, ATTENTIONS[:2], out=tmp_path / "two", data_root=data_root, jobs=2)
    assert [row.scores for row in one.rows] == [row.scores for row in two.rows]
    for folder in ("softmax-2", "smgk-1"):
        a, b = (tmp_path / name / folder / "seed-0" / "last" / "model.safetensors" for name in ("one", "two"))
        assert a.read_bytes() == b.read_bytes()


def test_a_stop_raises_keyboard_interrupt(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.Interrupt, "agreed", lambda self, fabric, logs: True)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny(steps=2), ATTENTIONS[:1], out=tmp_path, data_root=data_root)


@pytest.mark.usefixtures("quick_processes")
def test_a_stop_side_by_side_stops_every_run_and_starts_no_other(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long trainings, told to stop once two have started: both leave a checkpoint, and the third never starts."""
    runs = [tmp_path / "softmax-2" / f"seed-{seed}" for seed in range(3)]

    def stop(objects: list[Any], timeout: float | None) -> list[Any]:
        while not all((run / "log.jsonl").exists() for run in runs[:2]):
            assert wait(objects, 0.01) == []
        os.kill(os.getpid(), signal.SIGTERM)
        return list(wait(objects, timeout))

    monkeypatch.setattr(runner, "wait", stop)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny(steps=10**9, eval_every=10**9), ATTENTIONS[:1], seeds=3, out=tmp_path, jobs=2, data_root=data_root)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) == before
    assert all(read_facts(run / "last")["step"] > 0 for run in runs[:2])
    assert not runs[2].exists()


class Deadly(Config):
    """A configuration that ends the process that unpickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["seed"] == 0:
            os._exit(11)
        vars(self).update(state)


def test_a_process_that_dies_takes_one_run_with_it(data_root: Path, tmp_path: Path) -> None:
    config = Deadly(**vars(tiny(steps=2)))
    found = compare(config, ATTENTIONS[:1], seeds=2, out=tmp_path, jobs=2, data_root=data_root)
    assert [len(row.scores) for row in found.rows] == [1]
    assert found.failed == {str(tmp_path / "softmax-2" / "seed-0"): "its process died with exit status 11"}


def test_a_comparison_killed_before_any_change_of_its_own_files_ends_the_same(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs have a test of their own, tests/train/test_kill.py."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("mgk.train.engine.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr(engine, "peak_bytes", lambda fabric: 0)

    def run(folder: Path) -> None:
        compare(tiny(steps=2), ATTENTIONS[:1], out=folder, data_root=data_root)

    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    run(tmp_path / "undisturbed")
    kills = 0
    for folder in every_kill(run, tmp_path / "killed", without="softmax-2"):
        kills += 1
        run(folder)
        assert files(folder) == files(tmp_path / "undisturbed")
    assert kills > 8


def sleep_in_a_worker(there: Any) -> None:
    there.send(os.getpid())
    signal.pause()


def parent_of_workers(there: Any) -> None:
    runner.run_jobs({number: partial(sleep_in_a_worker, there) for number in range(2)}, processes=2)


@pytest.mark.usefixtures("quick_processes")
def test_workers_end_when_their_parent_is_killed() -> None:
    """A pipe ends when the last process that could write to it does."""
    here, there = multiprocessing.Pipe(duplex=False)
    parent = quick_context().Process(target=parent_of_workers, args=(there,))
    parent.start()
    there.close()
    workers = {here.recv(), here.recv()}
    assert parent.pid not in workers
    parent.kill()
    with pytest.raises(EOFError):
        here.recv()


def test_scores_are_in_the_order_of_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(jobs: dict[Path, Any], **_: Any) -> dict[Path, Result]:
        seeds = {path: int(path.name.removeprefix("seed-")) for path in jobs}
        return {path: Result("", True, 2, 1, test={"accuracy": seeds[path] / 10}) for path in list(jobs)[::-1]}

    monkeypatch.setattr(MODULE, "run_jobs", backwards)
    (row,) = compare(tiny(), ATTENTIONS[:1], seeds=3, out=tmp_path, jobs=3).rows
    assert row.scores == [0.0, 10.0, 20.0]


def test_a_score_that_is_not_finite_is_valid_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(jobs: dict[Path, Any], **_: Any) -> dict[Path, Result]:
        return {path: Result("", True, 2, 1, test={"perplexity": math.inf}, seconds_per_step=math.nan) for path in jobs}

    monkeypatch.setattr(MODULE, "run_jobs", diverged)
    compare(tiny(), ATTENTIONS[:1], seeds=2, out=tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (row,) = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=refuse)["rows"]
    assert (row["scores"], row["mean"], row["interval"]) == ([None, None], None, None)
    assert row["seconds_per_step"] is None


def test_if_all_runs_are_refused_the_existing_table_is_kept(data_root: Path, tmp_path: Path) -> None:
    compare(tiny(steps=2), ATTENTIONS[:1], out=tmp_path, data_root=data_root)
    names = ("comparison.json", "comparison.md")
    before = [(tmp_path / name).read_text() for name in names]
    found = compare(tiny(steps=4), ATTENTIONS[:1], out=tmp_path, data_root=data_root)
    assert (found.rows, len(found.failed)) == ([], 1)
    assert [(tmp_path / name).read_text() for name in names] == before


def test_the_table_has_every_number() -> None:
    rows = [
        Row("softmax:8", [40.0, 42.0], 41.0, interval([40.0, 42.0]), 1_234_567, 2_500_000_000, 0.0123, 3 << 20),
        Row("smgk:4", [43.5], 43.5, None, 10, 1_000_000_000, 0.004, 1 << 20),
    ]
    table = Comparison("accuracy %", rows).table().splitlines()
    assert len({len(line) for line in table}) == 1  # aligned
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[2] == ["softmax:8", "41.00 ± 12.71", "2", "1,234,567", "2.5", "12.3", "3", "40.00 42.00"]
    assert cells[3] == ["smgk:4", "43.50", "1", "10", "1", "4.0", "1", "43.50"]


def test_the_interval_is_students() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert interval([1.0]) is None


def test_attentions_are_read_strictly() -> None:
    config = with_attention(recipe("lra-text"), "mgk:2:em")
    assert (config.model.attention, config.model.heads, config.model.prior) == ("mgk", 2, "em")
    for text in ("mgk", "mgk:", "mgk:two", "gauss:2", "mgk:2:soft", ":2"):
        with pytest.raises(ValueError, match="attentions: expected VARIANT:HEADS"):
            with_attention(recipe("lra-text"), text)
    with pytest.raises(ValueError, match="expected at least one"):
        compare(recipe("lra-text"), [], out="nowhere")


def test_flops_are_those_of_the_layers() -> None:
    model = ClassifierConfig(attention="smgk", heads=4, max_length=100)
    d = Dimensions(variant="smgk", heads=4, head_dim=32, queries=100, keys=100, embed_dim=64)
    feed_forward = 3 * 2 * (100 * 64 * 128 * 2)  # three products of each of two matrices
    assert flops(model) == 2 * (attention_flops(d).total + projection_flops(d).total + feed_forward)
    assert flops(MatcherConfig(attention="smgk", heads=4, max_length=100)) == 2 * flops(model)
    assert flops(recipe("wikitext103").model) > 0
    assert flops(recipe("cifar10").model) > 0
