"""`mgk bench` compares within a round, does not time wrong results, and ends with a conclusion."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mgk.cli as cli
from mgk.ops import measure
from mgk.ops.measure import Method, WrongResultError

bench: Any = importlib.import_module("mgk.cli.bench")  # the package has a function of the same name
SHAPES = ("1,4,24,8", "2,2,9,4,causal")
METHODS = ["sdpa", "smgk soft", "smgk hard", "mgk soft", "mgk hard"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let every call of a round take the next of these milliseconds, again and again."""
    times = [2.0, 1.0, 2.0, 4.0, 8.0]
    calls = 0

    def milliseconds(work: Callable[[], object], device: str) -> float:
        nonlocal calls
        work()
        calls += 1
        return times[(calls - 1) % len(times)] * (1 + (calls - 1) // len(times))  # each round is slower

    monkeypatch.setattr(bench, "milliseconds_of", milliseconds)
    return times


def test_methods_alternate_and_a_slower_round_changes_no_ratio(clock: list[float]) -> None:
    rows = bench.compare(bench.parse(SHAPES[0]), "cpu", rounds=3)
    assert [row.method for row in rows] == METHODS
    assert [row.heads for row in rows] == [4, 2, 2, 2, 2]
    assert [row.speedup["forward"] for row in rows] == [1.0, 2.0, 1.0, 0.5, 0.25]
    assert rows[1].milliseconds == {"forward": 2.0, "forward+backward": 5.0}


def test_it_prints_a_table_and_a_conclusion_and_writes_json(
    clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "bench.json"
    bench.bench(device="cpu", shapes=SHAPES, rounds=2, output=path)
    printed = capsys.readouterr().out
    assert "| 2, 2, 9, 4 causal |" in printed
    assert printed.rstrip().endswith(
        "On this machine, forward and backward, sMGK with half the heads is 2.0x as fast as PyTorch with all heads at "
        "24 positions, 2.0x at 9; MGK with half the heads is 0.5x as fast as PyTorch with all heads at 24 positions, "
        "0.5x at 9."
    )
    found = json.loads(path.read_text())
    assert [row["method"] for row in found["rows"]] == 2 * METHODS
    assert found["rows"][0]["case"]["length"] == 24
    assert {"commit", "versions", "gpu"} <= set(found["environment"])


def test_a_wrong_result_is_not_timed(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = measure.attend

    def spoiled(method: Method, inputs: dict[str, torch.Tensor], *, is_causal: bool, **options: Any) -> torch.Tensor:
        out = real(method, inputs, is_causal=is_causal, **options)
        return out + 1 if method.name == "smgk soft" and options["impl"] == "auto" else out

    monkeypatch.setattr(measure, "attend", spoiled)
    with pytest.raises(WrongResultError, match="smgk soft on 1,4,24,8: output has an error of"):
        bench.bench(device="cpu", shapes=SHAPES[:1], rounds=1)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "smgk soft" in line)
    assert line.replace(" ", "").endswith("|smgksoft|2|-|-|-|-|wrong|")


@pytest.mark.parametrize("shape", ["4,8,1024", "4,8,1024,32,full", "a,8,1024,32", "4,8,1024,32,causal,"])
def test_a_shape_that_cannot_be_read_is_an_error(shape: str) -> None:
    with pytest.raises(ValueError, match=f"--shapes: expected B,H,N,D or B,H,N,D,causal, got '{shape}'"):
        bench.parse(shape)


def test_wrong_options_are_errors_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--rounds: expected at least 1, got 0"):
        bench.bench(rounds=0)
    with pytest.raises(ValueError, match="--device: expected a machine with a CUDA GPU for cuda, found none"):
        bench.bench(device="cuda")
    with pytest.raises(ValueError, match=r"heads: expected an even number, .* got 3"):
        bench.bench(device="cpu", shapes=("1,3,4,4",))


def test_plan_prints_what_a_call_gets_without_timing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--plan", "--gpu", "8.0", "--shapes", "4,8,8192,128,causal"]) == 0
    text = capsys.readouterr().out
    assert "sMGK, 4, 8, 8192, 128 causal, bfloat16:" in text
    assert "generic kernel, heads on the fast path, tile 128 x 64, 8 warps, 3 stages" in text
    assert cli.main(["bench", "--plan", "--gpu", "8.9", "--shapes", "4,8,8192,128,causal"]) == 0
    assert "generic kernel, heads on the fast path, tile 128 x 64, 8 warps, 2 stages" in capsys.readouterr().out
    assert cli.main(["bench", "--plan", "--device", "cpu"]) == 0
    assert "(CPU tensors)" in capsys.readouterr().out
    assert cli.main(["bench", "--plan", "--gpu", "A100"]) == 2
    assert "--gpu: expected a compute capability" in capsys.readouterr().err
