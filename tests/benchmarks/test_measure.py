"""A benchmark refuses wrong results, compares within a round, and says what it was made with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import common, cuda, measure
from benchmarks.common import BASELINE, MIXTURES, Case, Method, make_inputs

SMALL = Case("small", batch=2, heads=4, length=48, width=8)
CASES = (SMALL, Case("causal", batch=1, heads=2, length=33, width=4, is_causal=True))


class FakeDevice:
    """A clock that shows what it is told, and remembers who was timed."""

    name = "cpu"

    def __init__(self, *seconds: float) -> None:
        self.queue, self.timed = list(seconds), 0

    def describe(self) -> dict[str, Any]:
        return {"device": "a fake", "threads": 1}

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        self.timed += 1
        return self.queue.pop(0)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        return None


def inputs_of(case: Case, method: Method) -> dict[str, Tensor]:
    return make_inputs(case, method, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("method", [BASELINE, *MIXTURES], ids=lambda method: method.name)
def test_a_right_result_passes_and_its_error_is_rounding(case: Case, method: Method) -> None:
    # The dense formula in float32 against itself in float64: sums of 48 terms, exponents of some tens.
    assert measure.check(case, method, inputs_of(case, method), "reference") < 48 * 40 * torch.finfo(torch.float32).eps


def spoil_value(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return out + 1e-3


def spoil_last_entry(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = torch.zeros_like(out)
    mask[-1, -1, -1, -1] = 1e-3
    return out + mask


def return_nan(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return out * torch.nan


def spoil_gradient(name: str) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """The value stays; the gradient of one input gains a thousandth of the incoming one's size."""

    def spoil(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        extra = 1e-3 * (inputs[name] - inputs[name].detach()).sum()
        return out + extra

    return spoil


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoil_value, "output is off"),
        (spoil_last_entry, "output is off"),
        (return_nan, "output is off by nan"),
        *((spoil_gradient(name), f"the gradient of {name} is off") for name in ("query", "key", "value", "shift")),
        (spoil_gradient("log_prior"), "the gradient of log_prior is off"),
    ],
)
def test_a_wrong_result_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, dict[str, Tensor]], Tensor], complaint: str
) -> None:
    def spoiled(method: Method, inputs: dict[str, Tensor], *, is_causal: bool, impl: str = "auto") -> Tensor:
        out = common.attend(method, inputs, is_causal=is_causal, impl="reference")
        return out if impl == "reference" or method == BASELINE else spoil(out, inputs)

    monkeypatch.setattr(measure, "attend", spoiled)
    device = FakeDevice()
    with pytest.raises(measure.WrongResultError, match=f"smgk soft on small: {complaint}"):
        measure.run(device, [SMALL], [Method("smgk")], rounds=1)
    assert device.timed == 0


def test_rounding_of_a_sum_that_cancels_is_judged_by_its_terms() -> None:
    terms = torch.tensor([[1e6, -1e6 + 1.0]], dtype=torch.float64)
    assert measure.relative_error(torch.tensor([1.1]), terms) == pytest.approx(0.1 / (2e6 - 1), rel=1e-5)
    assert measure.relative_error(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(0.1, rel=1e-5)


def test_queries_with_a_near_tie_are_left_out_of_the_hard_gradient() -> None:
    query = torch.tensor([[[[0.0, 0.0], [3.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[[1.0, 0.0]], [[-1.0, 0.0]]]]], dtype=torch.float64)  # a tie for the first
    kept = measure.decided(Method("mgk", "hard"), {"query": query, "key": key})
    assert isinstance(kept, Tensor)
    assert kept.flatten().tolist() == [0.0, 1.0]


def test_methods_take_turns_and_a_machine_that_slows_down_changes_no_ratio() -> None:
    forward = [4.0, 2.0, 8.0, 4.0, 80.0, 40.0]  # baseline, mixture, baseline, ...
    both = [3.0, 1.0, 3.0, 3.0, 12.0, 6.0]
    device = FakeDevice(*forward, *both)
    report = measure.run(device, [SMALL], [Method("smgk")], rounds=3, impl="reference")
    rows = {(row.method, row.direction): row for row in report.rows}
    assert device.queue == []
    assert rows["smgk soft", "forward"].speedup == 2.0
    assert rows["smgk soft", "forward"].milliseconds == 4e3
    turn = rows["smgk soft", "forward+backward"]
    assert (turn.speedup_lowest, turn.speedup, turn.speedup_highest) == (1.0, 2.0, 3.0)
    assert all(row.speedup == 1.0 for row in report.rows if row.method == "sdpa")


def test_a_mixture_has_half_the_heads_and_the_same_inputs_every_time() -> None:
    assert inputs_of(SMALL, BASELINE)["query"].shape[1] == 4
    for method in MIXTURES:
        first, second = inputs_of(SMALL, method), inputs_of(SMALL, method)
        assert first["query"].shape[1] == first["value"].shape[1] == 2
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in first.values())
    with pytest.raises(ValueError, match=r"heads: expected an even number, .* got 3"):
        Case("odd", batch=1, heads=3, length=4, width=4)


def test_a_report_carries_its_circumstances_and_its_shapes(tmp_path: Path) -> None:
    report = measure.run(FakeDevice(*[1.0] * 4), [SMALL], [Method("mgk", "hard")], rounds=1, impl="reference")
    saved = json.loads(report.save(tmp_path / "new" / "report.json").read_text())
    circumstances = {"device", "threads", "dtype", "mgk", "torch", "python", "commit", "rounds", "impl"}
    assert circumstances <= set(saved["environment"])
    assert saved["environment"]["dtype"] == "float32"
    assert [row["case"]["length"] for row in saved["rows"]] == [48] * 4
    console = Console(width=80)
    with console.capture() as shown:
        console.print(report.tables())
    assert "small: B=2 N=48 D=8" in shown.get()
    assert "mgk hard" in shown.get()
    assert "a fake" in shown.get()


def test_a_report_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: object, target: object) -> None:
        raise OSError("killed")

    path = tmp_path / "bench.json"
    path.write_text("as it was")
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="killed"):
        common.Report({}, []).save(path)
    monkeypatch.setattr(cuda, "environment", dict)
    monkeypatch.setattr(cuda, "PARTS", {"growth": dict})
    with pytest.raises(OSError, match="killed"):
        cuda.main(["--output", str(path)])
    assert path.read_text() == "as it was"


def test_some_parts_have_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda, "environment", dict)
    monkeypatch.setattr(cuda, "PARTS", {"growth": dict, "padded": dict})
    for arguments in ([], ["--parts", "growth"]):
        cuda.main(arguments)
    assert {path.name for path in Path("results").iterdir()} == {"bench-cuda.json", "bench-cuda-growth.json"}


def test_no_rounds_is_an_error_before_any_work() -> None:
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        measure.run(FakeDevice(), [SMALL], rounds=0)
