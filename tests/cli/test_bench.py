"""`mgk bench`: options reach the benchmarks, and an error is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cpu, measure
from benchmarks import train as bench_train
from benchmarks.common import Case, Report
from mgk import cli

TINY = {"tiny": Case("tiny", batch=1, heads=2, length=16, width=4)}


def run(command: str) -> int:
    return cli.main(command.split())


def test_bench_writes_the_report_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "CASES", TINY)
    path = tmp_path / "bench.json"
    assert run(f"bench --device cpu --cases tiny --rounds 1 --output {path}") == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["method"] for row in rows} == {"sdpa", "smgk soft", "smgk hard", "mgk soft", "mgk hard"}
    assert {row["direction"] for row in rows} == {"forward", "forward+backward"}
    assert "tiny: B=1 N=16 D=4" in capsys.readouterr().out


def test_bench_without_output_writes_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cases to a file of their own: they do not replace all of them."""
    monkeypatch.setattr(cpu, "CASES", TINY)
    monkeypatch.setattr(measure, "run", lambda *_, **__: Report({}, []))
    monkeypatch.chdir(tmp_path)
    assert run("bench --rounds 1") == run("bench --cases tiny --rounds 1") == 0
    assert {path.name for path in Path("results").iterdir()} == {"bench-cpu.json", "bench-cpu-tiny.json"}


def test_bench_of_training_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(bench_train, "main", seen.append)
    assert run("bench --what train --rounds 2 --output here.json") == 0
    assert seen == [["--device", "cpu", "--rounds", "2", "--output", "here.json"]]


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("bench --rounds many", 2, "--rounds"),
        ("bench --device cuda --cases wikitext", 1, "--cases: expected none with --what attention --device cuda"),
        ("bench --what train --cases wikitext", 1, "--cases: expected none with --what train --device cpu"),
        ("bench --device cuda --rounds 0", 1, "--rounds: expected none with --what attention --device cuda, got 0"),
        ("bench --device abacus", 2, "abacus"),
        ("bench --rouns 3", 2, "--rouns"),
        ("bench --cases nowhere", 1, "--cases: expected some of lra-1024"),
        ("bench --rounds 0", 1, "rounds: expected at least 1, got 0"),
        ("bench --what train --rounds 0", 1, "rounds: expected at least 1, got 0"),
    ],
)
def test_an_error_is_one_line(command: str, status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == status
    error = capsys.readouterr().err
    assert error.startswith("mgk: error: ")
    assert error.count("\n") == 1
    assert says in error
