"""The command line is a thin face: options reach the functions, an error is one line, help teaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgk import cli
from mgk.bench import cpu
from mgk.bench.common import Case

TINY = {"tiny": Case("tiny", batch=1, heads=2, length=16, width=4)}


def test_bench_writes_the_report_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "CASES", TINY)
    path = tmp_path / "bench.json"
    assert cli.main(["bench", "--device", "cpu", "--cases", "tiny", "--rounds", "1", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["method"] for row in rows} == {"sdpa", "smgk soft", "smgk hard", "mgk soft", "mgk hard"}
    assert {row["direction"] for row in rows} == {"forward", "forward+backward"}
    assert "tiny: B=1 N=16 D=4" in capsys.readouterr().out


def test_bench_without_output_writes_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CASES", TINY)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "--rounds", "1"]) == 0
    assert (tmp_path / "results" / "bench-cpu.json").exists()


def test_demo_shows_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--length", "32", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    for word in ("mgk soft", "mgk hard", "smgk soft", "smgk hard", "mlk", "smlk", "sdpa"):
        assert word in shown


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("", 2, "bench"),
        ("nonsense", 2, "nonsense"),
        ("bench --rounds many", 2, "--rounds"),
        ("bench --device abacus", 2, "abacus"),
        ("bench --rouns 3", 2, "--rouns"),
        ("bench --cases nowhere", 1, "--cases: expected some of lra-1024"),
        ("bench --rounds 0", 1, "rounds: expected at least 1, got 0"),
        ("demo --length 0", 1, "length: expected at least 1, got 0"),
    ],
)
def test_an_error_is_one_line(command: str, status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == status
    error = capsys.readouterr().err
    assert error.startswith("mgk: error: ")
    assert error.count("\n") == 1
    assert says in error


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="got 'nowhere'"):
        cli.main(["bench", "--cases", "nowhere", "--debug"])


def test_a_break_is_not_an_error_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", lambda arguments: stop)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.__name__)
def test_help_teaches(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command.__name__, "--help"])  # type: ignore[attr-defined]
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert "In Python:" in shown
    assert "how often each method is timed" in shown


def test_python_m_mgk_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "mgk", "--help"], capture_output=True, text=True, check=True)
    assert "bench" in done.stdout
    assert "demo" in done.stdout
    assert done.stderr == ""
