"""The study: the grid follows the plan, verdicts follow from the records, and a session goes on where one stopped."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mgk.data
from experiments.cells import records, steps
from experiments.lm import grid, noise, tasks
from experiments.lm.claims import Comparison, Finding, comparisons, findings, judge, tabulate
from experiments.lm.costs import Point, beaten, cost, frontier, points
from experiments.lm.folders import Folders
from experiments.lm.grid import FULL, HALF, MAIN, OPTIONS, SIDE, SWEEP_SEED, Cell, Record, Row, parse, pieces
from experiments.lm.main import main
from experiments.lm.noise import detectable, seeds_needed, seeds_of_main
from experiments.lm.report import report
from mgk.models import build
from mgk.train.config import replace, to_dict

RATES = {"softmax": 1e-3, "smgk": 2e-3}
PLAN = Path(__file__).parents[2] / "experiments" / "PLAN.md"
NOISE = [1.5000, 1.5010, 1.4990, 1.5005, 1.4995]


def made_up(task: str, row: Row, seed: int, test: float, rate: float | None = None, **changes: Any) -> Record:
    """A record as a session would have written it."""
    cell = Cell(task, row, seed, rate or RATES[row.family])
    values: dict[str, Any] = {
        **cell.identity, "metric": cell.metric, "dev": test, "test": test, "steps": 3000, "command": cell.command,
        "parameters": 10**6 * (12 + row.heads), "flops": 10**9 * row.heads, "seconds_per_step": 0.02, "jobs": 1,
        "peak_bytes": 2**30, "gpu": "GPU 1", "versions": {"torch": "2.11", "triton": "3.6"}, "commit": "abc1234",
        "data": {"name": "enwik8", "digest": "0123456789abcdef", "options": {}},
        "curve": {"train": {"step": [50], "loss": [1.0]}, "valid": {"step": [500], "loss": [1.0]}},
        "configuration": to_dict(cell.config),
    }  # fmt: skip
    return Record(cell, values | changes)


def seeds(task: str, row: Row, tests: Sequence[float], **changes: Any) -> list[Record]:
    return [made_up(task, row, seed, test, **changes) for seed, test in enumerate(tests)]


def sweep(row: Row, scores: dict[float, float]) -> list[Record]:
    return [made_up("sweep", row, SWEEP_SEED, dev, rate) for rate, dev in scores.items()]


SWEEP = [
    *sweep(FULL, {5e-4: 1.53, 1e-3: 1.50, 2e-3: 1.51, 4e-3: 1.6}),
    *sweep(HALF, {5e-4: 1.53, 1e-3: 1.52, 2e-3: 1.50, 4e-3: 1.6}),
]


def test_every_row_of_the_plan_is_a_model() -> None:
    """Their names are unique, are read back, and their configurations can be built."""
    found = [*SWEEP, *seeds("nano", FULL, NOISE)]
    cells = [cell for group in pieces(found).values() for cell in group or ()]
    assert len({cell.name for cell in cells}) == len(set(cells))
    assert all(parse(cell.name, RATES) == cell for cell in cells)
    for row in (*MAIN, *SIDE):
        config = replace(Cell("nano", row, 0, 1e-3).config, model__layers=1, model__width=16, model__hidden=16)
        build(config.model)
    labels = {row.label for row in MAIN}
    main = re.search(r"\*\*main\.\*\*(.*?)\n4\.", PLAN.read_text(), re.S)
    assert main is not None
    said = re.sub(r"\(.*?\)", "", main[1].replace("\n", " ").split(". ")[0])
    assert {label for label in labels if label in said} | {"softmax 8/2"} == labels
    both = (parse(f"nano/{name}-s0", RATES) for name in ("smgk-h4", "linear-h8"))
    assert [cell.config.optimiser.lr for cell in both] == [2e-3, 1e-3]
    assert parse("small/smgk-h6-s0", {}).config.optimiser.lr == 6e-4


@pytest.mark.parametrize("name", ["nano/smgk-h4", "nono/smgk-h4-s0", "nano/smgk-h4-lr0.1-s0", "nano/smgk-h4-x-s0"])
def test_a_wrong_name_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse(name, RATES)
    with pytest.raises(ValueError, match="finish the sweep first"):
        parse("nano/smgk-h4-s0", {})


def test_the_sweep_goes_on_while_its_best_rate_is_at_an_end() -> None:
    assert grid.rates_to_try({}) == [5e-4, 1e-3, 2e-3, 4e-3]
    falling = {5e-4: 1.5, 1e-3: 1.6, 2e-3: 1.7, 4e-3: 1.8}
    assert grid.rates_to_try(falling)[0] == 2.5e-4
    assert grid.rates_to_try(falling | {2.5e-4: 1.4, 1.25e-4: 1.3})[0] == 1.25e-4  # the limit
    assert grid.rates_to_try({rate: -rate for rate in grid.RATES})[-1] == 8e-3
    assert grid.chosen_rates(SWEEP) == RATES
    assert grid.chosen_rates(SWEEP[:-1]) == {"softmax": 1e-3}


def test_pieces_wait_for_what_they_depend_on() -> None:
    nothing = pieces([])
    waiting = [name for name, cells in nothing.items() if cells is None]
    assert waiting == ["noise", "main", "own", "side", "plain", "length"]
    assert len(nothing["sweep"] or ()) == 8
    chosen = pieces(SWEEP)
    assert chosen["main"] is None  # the noise decides the number of seeds
    assert [cell.seed for cell in chosen["noise"] or ()] == [0, 1, 2, 3, 4]
    measured = pieces([*SWEEP, *seeds("nano", FULL, NOISE)])["main"] or []
    assert len(measured) == len(MAIN) * seeds_of_main(NOISE) == len(set(measured))
    assert [cell.seed for cell in measured] == sorted(cell.seed for cell in measured)


def test_the_number_of_seeds_follows_from_the_noise() -> None:
    """n = 2 (1.96 + 0.84)^2 (s / d)^2 for large n; a smaller n would not find the difference."""
    noisy = [1.0, 1.01, 0.99, 1.005, 0.995]
    needed = seeds_needed(noisy)
    spread = (sum((x - 1) ** 2 for x in noisy) / 4) ** 0.5
    assert needed == pytest.approx(2 * 2.8**2 * (spread / 0.003) ** 2, rel=0.05)
    assert detectable(noisy, needed) <= 0.003 < detectable(noisy, needed - 1)
    assert (seeds_of_main(noisy), seeds_of_main([1.0, 1.0001, 0.9999, 1.0, 1.0])) == (10, 5)


@pytest.mark.parametrize(
    ("ours", "verdict", "comparable"),
    [
        ([1.490, 1.491, 1.489, 1.490, 1.490], "better", True),
        ([1.5000, 1.5010, 1.4990, 1.5005, 1.4995], "equal", True),
        ([1.5030, 1.5030, 1.5030, 1.5030, 1.5030], "worse", True),  # by 0.2%
        ([1.5100, 1.5100, 1.5100, 1.5100, 1.5100], "worse", False),
        ([1.5000, 1.5300, 1.4700, 1.5200, 1.4800], "undecided", False),
        ([1.4900], "not enough data", False),
    ],
)
def test_verdicts(ours: list[float], verdict: str, comparable: bool) -> None:
    table = tabulate([*seeds("nano", FULL, NOISE), *seeds("nano", HALF, ours)])
    found = judge(Comparison("", "nano", HALF, FULL), table)
    assert (found.verdict, found.comparable, found.seeds) == (verdict, comparable, (len(ours), 5))
    assert found.gain == pytest.approx((1.5 - sum(ours) / len(ours)) / 1.5)


def test_what_has_few_seeds_by_the_plan_is_not_judged() -> None:
    table = tabulate([*seeds("small", Row("smgk", 6), [3.0, 3.1]), *seeds("small", Row("softmax", 12), [3.2, 3.3])])
    found = judge(Comparison("", "small", Row("smgk", 6), Row("softmax", 12)), table)
    assert (found.verdict, round(found.gain or 0, 4)) == ("not judged", round(0.2 / 3.25, 4))
    side = Comparison("", "nano", Row("smgk", 4, option="m3"), HALF)
    two = tabulate([*seeds("nano", side.row, [1.5, 1.4]), *seeds("nano", HALF, NOISE)])
    assert judge(side, two).verdict == "not enough data"  # this piece has three seeds
    tokens = tabulate(seeds("small", Row("smgk", 6), [3.0, 3.1], bytes_per_token=4.0))
    assert findings(tokens)[0].effect == "-"


def test_costs_and_the_frontier() -> None:
    table = tabulate(
        [
            *seeds("nano", FULL, NOISE),
            *seeds("nano", HALF, [1.490, 1.491, 1.489]),
            *seeds("nano", Row("smgk", 8), [1.480, 1.481, 1.479]),
            *seeds("nano", Row("softmax", 8, 4), [1.52, 1.521, 1.519]),
        ]
    )
    times = {"nano": {"rows": {FULL.name: 0.02, HALF.name: 0.01, "smgk-h8": 0.03}}}
    assert [p.row for p in points("time", table, times)] == [HALF, FULL, Row("smgk", 8)]
    # keys and values of 8, 4, 8 and 4 heads of 64 in 6 layers, 2 bytes each
    assert {p.row: p.cost for p in points("cache", table, times)} == {
        FULL: 12288, HALF: 6144, Row("smgk", 8): 12288, Row("softmax", 8, 4): 6144,
    }  # fmt: skip
    by_cache = points("cache", table, times)
    assert [p.row for p in frontier(by_cache)] == [HALF, Row("smgk", 8)]
    lost = beaten(by_cache, table)
    assert set(lost[FULL]) == {HALF, Row("smgk", 8)}
    assert lost[Row("softmax", 8, 4)] == [HALF]
    own = Row("smgk", 4, option="own")
    assert Cell("nano", own, 0, 1e-3).cache_per_token == 6144 + 6 * 4 * 64 * 2  # one more value a key
    assert Cell("nano", Row("linear", 8), 0, 1e-3).cache_per_token is None
    assert cost("flops", table["nano", HALF], times) == 4.0
    alone = Point(FULL, 1.0, 1.0, None)
    assert frontier([alone, Point(HALF, 1.0, 1.0, None)]) == [alone, Point(HALF, 1.0, 1.0, None)]  # equals


def test_the_report_names_seeds_and_effects_and_does_not_depend_on_the_order() -> None:
    found = [*SWEEP, *seeds("nano", FULL, NOISE), *seeds("nano", HALF, [1.49, 1.491, 1.489])]
    found += seeds("small", Row("smgk", 6), [4.4], bytes_per_token=4.0)
    page = report(found, {"nano": {"rows": {FULL.name: 0.02, HALF.name: 0.01}}})
    assert page == report(found[::-1], {"nano": {"rows": {FULL.name: 0.02, HALF.name: 0.01}}})
    assert re.search(r"sMGK 4 against softmax 8 +\| better +\| \+0.67% \(\+0.\d\d% to \+0.\d\d%\) +\| +3, 5", page)
    assert "Chosen: softmax 0.001, smgk 0.002." in page
    assert re.search(r"\| sMGK 6 +\| +1\.1000 \|", page)  # bits per byte, not per token
    assert "(figures/study-time.svg)" in page
    assert f"Comparisons without data: {len(comparisons()) - 2}" in page  # two claims have this one
    assert report([]).endswith("No records yet.\n")


def test_findings_in_points() -> None:
    assert Finding(comparisons()[0], "equal", (3, 3), 0.1, -0.2, 0.4, points=True).effect == "+0.10 (-0.20 to +0.40)"


TINY: dict[str, Any] = {
    "model__layers": 1, "model__width": 16, "model__hidden": 16, "model__head_dim": 8, "model__max_length": 16,
    "data__batch": 4, "data__pad_multiple": 16, "optimiser__warmup": 1, "steps": 3, "eval_every": 3, "eval_batches": 2,
    "log_every": 1,
}  # fmt: skip
ROWS = [FULL, HALF, Row("softmax", 8, 4), Row("smgk", 4, option="own")]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The study with tiny models on a tiny text, and the options that say where it is."""
    (tmp_path / "enwik8").write_bytes(bytes(range(32, 122)) * 40)
    mgk.data.prepare("enwik8", source=tmp_path / "enwik8", root=tmp_path / "data")
    shrunk = {
        name: tasks.Task(replace(task.config, **TINY), task.metric, task.note, task.minutes, task.chosen_rate)
        for name, task in tasks.TASKS.items()
        if task.config.data.name == "enwik8" and not task.config.data.options
    }
    monkeypatch.setattr(grid, "TASKS", tasks.TASKS | shrunk)
    monkeypatch.setattr(grid, "MAIN", ROWS[:2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(noise, "LEAST", 2)
    monkeypatch.setattr(noise, "MOST", 2)
    monkeypatch.setattr(steps, "BATCHES", 1)
    monkeypatch.setattr(steps, "ROUNDS", 1)
    for name in ("RATES", "LIMITS"):
        monkeypatch.setattr(grid, name, (1e-3, 2e-3))
    places = {"--results": "lm", "--paper": "cells", "--runs": "runs", "--data-root": "data", "--out": "docs/study.md"}
    return ["--device", "cpu", *(word for option, path in places.items() for word in (option, str(tmp_path / path)))]


def test_a_session_goes_on_where_one_stopped(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sweep, noise, main rows and step times; then everything is recorded, checked and saved, and nothing remains."""
    pieces_ = ["sweep", "noise", "main", "steps"]
    assert main([*small, "--pieces", "sweep"]) == 0
    assert main([*small, "--plan"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"sweep +0 cells.*\nnoise +2 cells.*next nano/softmax-h8-s0", said)
    assert re.search(
        r"data, .*: enwik8 \(noise\), enwiki-\w{8} \(scale\), elife \(lra\), lra-image \(lra\), multi30k", said
    )
    assert "experiments.reproduce.pack data enwik8 --to" in said
    assert main([*small, "--pieces", *pieces_, "--save", str(tmp_path / "out" / "records.tar")]) == 0
    assert "4 cells finished" in capsys.readouterr().out  # two of noise, and two of sMGK 4
    assert len(Folders(tmp_path / "lm", tmp_path / "cells", tmp_path / "runs").records()) == 8
    timed = json.loads((tmp_path / "lm" / "steps.json").read_text())["nano"]
    assert set(timed["rows"]) == {"softmax-h8", "smgk-h4", "smgk-h4-own", "mgk-h4-own"}
    assert list(timed["again"]) == ["softmax-h8"]
    with tarfile.open(tmp_path / "out" / "records.tar") as archive:
        assert sum(name.endswith(".json") for name in archive.getnames()) == 9
    assert main([*small, "--pieces", *pieces_]) == 0
    assert "0 cells finished" in capsys.readouterr().out
    assert main([*small, "--report"]) == 0
    assert main([*small, "--check"]) == 0
    (tmp_path / "docs" / "study.md").write_text("changed")
    assert main([*small, "--check"]) == 1
    assert "does not follow from the records" in capsys.readouterr().err


def test_a_cell_is_computed_again_by_the_command_in_its_record(small: list[str], tmp_path: Path) -> None:
    for record in SWEEP:  # of the grid's full size: the rates alone are read from them
        if record.cell.rate in (1e-3, 2e-3):
            records.write(tmp_path / "lm" / "cells", record.cell, record.values)
    names = [f"nano/{row.name}-s0" for row in ROWS[2:]]
    assert main([*small, "--cells", *names]) == 0
    for name in names:
        first = json.loads((tmp_path / "lm" / "cells" / f"{name}.json").read_text())
        words = first["command"].split()
        assert words[:3] == ["python", "-m", "experiments.lm"]
        assert main([*words[3:], *small]) == 0
        second = json.loads((tmp_path / "again" / "cells" / f"{name}.json").read_text())
        assert (first["test"], first["parameters"]) == (second["test"], second["parameters"])
    assert OPTIONS["m3"] == {"model__components": 3}
