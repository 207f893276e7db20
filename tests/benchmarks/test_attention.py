"""The attention benchmarks compare within a round, measure peak memory, and record the machine and the versions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks import attention, cpu, cuda, first_call, operators, serving, softmax
from benchmarks.problems import Problem
from mgk.ops import measure
from mgk.ops.measure import Case, Method

SMALL = Case("small", batch=2, heads=4, length=48, width=8)
MIB = 2**20
SLACK = 4 * MIB  # two huge pages, and allocations of Python itself


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that the calls take, in order; memory is not measured."""
    times: list[float] = []

    def seconds(call: Callable[[], object]) -> float:
        call()
        return times.pop(0)

    monkeypatch.setattr(cpu, "seconds", seconds)
    monkeypatch.setattr(cpu, "peak_bytes", lambda call: None)
    return times


def test_methods_alternate_and_a_slower_round_changes_no_ratio(clock: list[float]) -> None:
    forward = [4.0, 2.0, 8.0, 4.0, 80.0, 40.0]  # baseline, mixture, baseline, ...
    both = [3.0, 1.0, 3.0, 3.0, 12.0, 6.0]
    clock += [*forward, *both]
    found = cpu.measure(SMALL, [Method("smgk")], rounds=3, impl="reference")
    rows = {(row.method, row.direction): row for row in found}
    assert clock == []
    assert rows["smgk soft", "forward"].speedup == 2.0
    assert rows["smgk soft", "forward"].milliseconds == 4e3
    turn = rows["smgk soft", "forward+backward"]
    assert (turn.speedup_lowest, turn.speedup, turn.speedup_highest) == (1.0, 2.0, 3.0)
    assert all(row.speedup == 1.0 for row in found if row.method == "sdpa")


def test_a_wrong_result_is_not_timed(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.attend

    def spoiled(method: Method, inputs: dict[str, Tensor], *, is_causal: bool, impl: str = "auto") -> Tensor:
        out = real(method, inputs, is_causal=is_causal, impl="reference")
        return out + (impl == "auto")

    monkeypatch.setattr(measure, "attend", spoiled)
    with pytest.raises(
        measure.WrongResultError, match="sdpa on small: output has an error"
    ):  # before the clock is read
        cpu.measure(SMALL, [Method("smgk")], rounds=1)


def test_a_report_has_the_machine_the_versions_and_the_shapes(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "CASES", {"small": SMALL})
    clock += [1.0] * 10
    path = tmp_path / "new" / "report.json"
    attention.main(["--device", "cpu", "--rounds", "1", "--output", str(path)])
    saved = json.loads(path.read_text())
    assert {"device", "threads", "dtype", "versions", "commit", "load", "rounds"} <= set(saved["environment"])
    assert saved["environment"]["device"] == cpu.cpu_model() != ""
    assert [row["case"]["length"] for row in saved["rows"]] == [48] * 10
    assert {row["direction"] for row in saved["rows"]} == {"forward", "forward+backward"}
    printed = capsys.readouterr().out
    assert "small: B, H, N, D = 2, 4, 48, 8" in printed
    assert "| mgk hard " in printed


def test_a_report_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: object, target: object) -> None:
        raise OSError("killed")

    path = tmp_path / "bench.json"
    path.write_text("unchanged")
    monkeypatch.setattr(os, "replace", fails)
    monkeypatch.setattr(cuda, "PARTS", {"growth": dict})
    with pytest.raises(OSError, match="killed"):
        cpu.main([], 1, path)
    with pytest.raises(OSError, match="killed"):
        cuda.main(["growth"], path)
    assert path.read_text() == "unchanged"


def test_a_selection_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(cuda, "PARTS", {"growth": dict, "padded": dict})
    monkeypatch.setattr(cpu, "measure", lambda case, rounds: [])
    monkeypatch.setattr(cpu, "table", lambda rows: "")
    monkeypatch.setattr(cuda, "PROBLEMS", {"operators": cuda.CASES})
    monkeypatch.setitem(cuda.PARTS, "operators", lambda cases, anchors: [])
    for words in ([], ["--parts", "growth"], ["--cases", "wide", "--anchors", "flex flash"]):
        attention.main(["--device", "cuda", *words])
    for words in ([], ["--cases", "wikitext"]):
        attention.main(["--device", "cpu", *words])
    names = {"bench-cuda", "bench-cuda-growth", "bench-cuda-wide-flex-flash", "bench-cpu", "bench-cpu-wikitext"}
    assert {path.stem for path in Path("results").iterdir()} == names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cpu", "--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--device", "cpu", "--cases", "nowhere"], "--cases: expected some of lra-1024"),
        (["--device", "cuda", "--cases", "lra-1024"], "--cases: expected some of lra-4096"),
        (["--device", "cpu", "--parts", "growth"], "--parts and --anchors are for --device cuda, got --device cpu"),
        (["--device", "cuda"], "expected a machine with a CUDA GPU"),
    ],
)
def test_wrong_options_are_errors(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        attention.main(words)
    assert says in capsys.readouterr().err


def fill(mebibytes: int) -> Tensor:
    return torch.ones(mebibytes * MIB // 4)


def in_turn() -> None:
    fill(48)
    fill(48)


def together() -> tuple[Tensor, Tensor]:
    return fill(48), fill(48)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_is_what_is_held_at_once() -> None:
    held = fill(64)  # memory that was allocated before does not count
    for call, expected in ((in_turn, 48), (together, 96)):
        peak = cpu.peak_bytes(call)
        assert peak is not None
        assert abs(peak - expected * MIB) < SLACK
    assert held.numel() == 16 * MIB


def test_cases_are_those_the_claims_are_about() -> None:
    shapes = {(case.length, case.width) for case in cpu.CASES.values()}
    assert shapes == {(1024, 32), (2048, 32), (4096, 32), (256, 16), (2048, 64), (16, 32), (32, 32), (64, 32)}
    assert cpu.CASES["wikitext"].is_causal


TINY = (
    Problem("small", 2, 4, 48, 8, dtype="float32", methods=measure.MIXTURES),
    Problem("causal", 1, 2, 16, 4, is_causal=True, dtype="float32"),
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the GPU benchmark on the CPU with tiny cases. Every call takes a millisecond."""

    def milliseconds(work: Callable[[], object], rounds: int = 3) -> float:
        work()
        return 1.0

    def in_turns(works: dict[str, Callable[[], object]]) -> dict[str, float]:
        trains = {name: "train" in getattr(work, "__qualname__", "") for name, work in works.items()}
        return {name: milliseconds(work) * (1 + trains[name]) for name, work in works.items()}

    patched: dict[Any, dict[str, Any]] = {
        cuda: {
            "DEVICE": "cpu", "CASES": TINY, "CACHE": TINY[0], "sdpa_kernel": nullcontext,
            "graph_milliseconds": milliseconds, "cuda_milliseconds": milliseconds,
        },
        measure: {"capture": lambda work: work, "in_turns": in_turns},
        operators: {"DEVICE": "cpu", "capture": lambda work: work, "in_turns": in_turns, "peak_mib": milliseconds},
    }  # fmt: skip
    for module, patches in patched.items():
        for name, value in patches.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(cuda.PARTS, "operators", partial(operators.measure_problems, TINY))
    monkeypatch.setattr(operators, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


def test_the_gpu_benchmark_runs(on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(problem: Problem, method: Method, std: float = 1.0) -> dict[str, float]:
        return {"output": 3.0 if method.name == "mgk hard" else 1.0}

    monkeypatch.setattr(operators, "error", error)
    monkeypatch.setattr(cuda, "error", error)
    path = tmp_path / "bench.json"
    parts = ["operators", "decode", "numerics", "padded", "m_step", "modules"]  # the others are large
    cuda.main(parts, path, anchors=["flash", "fa4"])
    found = json.loads(path.read_text())
    assert "cudnn" in found["environment"]["versions"]
    untimed = [row for row in found["operators"] if "speedup" not in row]
    assert [(row["method"], row["failed"]) for row in untimed] == [
        ("mgk hard", "error over twice that of eager float32: {'output': 3.0}")
    ]
    row = found["operators"][0]
    assert (row["case"], row["shape"], row["dtype"]) == ("small", [2, 4, 48, 8, False], "float32")
    assert row["speedup"] == {"forward": 1.0, "backward": 1.0, "train": 1.0, "eager_train": 1.0}
    assert row["milliseconds"]["backward"] == 1.0  # 2 ms for both directions, of which 1 is forward
    assert set(row["baseline"]) == {"flash"}
    assert row["without"]["fa4"] == "ModuleNotFoundError: No module named 'flash_attn'"
    assert row["tflops"]["flash"]["train"] == pytest.approx(3.5 * 4 * 2 * 4 * 48**2 * 8 / 2e-3 / 1e12)
    assert found["decode"]["shape"] == [2, 4, 48, 8, True]
    assert set(found["m_step"]) == {"smgk M-step", "smgk forward", "mgk M-step", "mgk forward"}
    assert found["padded"]["speedup"] == 1.0
    assert len(found["numerics"]) == 12
    assert set(found["modules"][0]["speedup"]) == {"eager", "eager, graph", "compiled", "compiled, graph"}
    text = path.with_suffix(".md").read_text()
    assert "| 1, 2, 16, 4 causal |" in text
    assert "small, fa4: ModuleNotFoundError" in text


def test_an_anchor_that_raises_or_is_wrong_is_recorded_with_its_reason(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(problem: Problem, inputs: dict[str, Tensor]) -> softmax.Contender:
        return lambda: inputs["value"] * 1.0, inputs

    monkeypatch.setitem(softmax.ANCHORS, "flex", wrong)
    dropout = replace(TINY[1], name="dropout", dropout=0.1)
    rows = operators.measure_problems([TINY[1], dropout], cases=["dropout", "causal"])
    assert rows[0]["without"]["flex"].startswith("WrongResultError: an error of")
    assert set(rows[0]["baseline"]) == {"flash"}
    assert rows[-1]["without"]["fa4"] == "NotImplementedError: FlashAttention-4 has no dropout"
    assert "support non-zero dropout" in rows[-1]["without"]["flash"]
    assert operators.measure_problems(TINY, cases=["elsewhere"]) == []


FURTHER = (*(Method("smgk", components=count) for count in (1, 3)), Method("mgk", components=4))


@pytest.mark.parametrize(
    "method", [*measure.MIXTURES, *FURTHER, Method("smgk", variances=True)], ids=lambda method: method.name
)
def test_the_error_is_relative_to_eager_code_in_the_same_precision(method: Method, on_cpu: None) -> None:
    found = operators.error(TINY[0], method)
    assert {"output", "query", "key", "value"} <= set(found)
    assert ("shift" in found, "variance" in found) == (method.operator == "smgk", method.variances)
    found |= operators.error(replace(TINY[0], padded=True), method)
    assert max(found.values()) < 0.1  # float32 on both sides: 1e-4 is added to the error of the eager code


def test_half_of_a_padded_batch_is_padding() -> None:
    problem = Problem("padded", 32, 8, 4096, 32, padded=True)
    mask = problem.mask("cpu")
    assert mask is not None
    assert float(mask.float().mean()) == pytest.approx(0.5, abs=0.05)
    assert torch.equal(mask.sum(1), problem.lengths)
    assert problem.pairs == float(problem.lengths.double().square().sum())


GROUPED = Problem("grouped", 2, 8, 48, 8, is_causal=True, dtype="float32", kv_heads=4, methods=measure.MIXTURES[::2])
WINDOW = Problem("window", 1, 4, 48, 8, is_causal=True, dtype="float32", window=7)


def test_grouped_queries_and_windows_are_measured(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Softmax has twice the heads of both kinds. A window is compared with the same model without one."""
    problems = (GROUPED, WINDOW, replace(WINDOW, name="no-window", window=None))
    monkeypatch.setattr(cuda, "PROBLEMS", {"decoder": problems})
    monkeypatch.setitem(cuda.PARTS, "decoder", partial(operators.measure_problems, problems))
    cuda.main(["decoder"], tmp_path / "bench.json", anchors=["flash"])
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["window over full causal"]["smgk soft"] == {"forward": 1.0, "train": 1.0}
    rows = {(row["case"], row["method"]): row for row in found["decoder"]}
    assert {name: row.get("failed") for name, row in rows.items()} == dict.fromkeys(rows)
    assert rows["grouped", "smgk soft"]["kv_heads"] == 4
    assert rows["grouped", "smgk soft"]["without"] == {}
    assert rows["grouped", "smgk soft"]["speedup"]["train"] == 1.0
    assert rows["grouped", "mgk soft"]["error"].keys() >= {"output", "key"}
    inputs = operators.inputs_of(GROUPED, Method("smgk"))
    assert (inputs["query"].shape[1], inputs["key"].shape[1]) == (4, 2)
    assert "2, 8/4, 48, 8 causal" in (tmp_path / "bench.md").read_text()
    assert "1, 4, 48, 8 window 7" in (tmp_path / "bench.md").read_text()


def test_the_decoder_problems_are_those_of_the_claims() -> None:
    grouped, window, whole = cuda.DECODER
    assert (*grouped.shape[1:4], grouped.kv_heads) == (16, 8192, 128, 4)
    assert (window.length, window.width, window.window) == (16384, 64, 1024)
    assert replace(window, name=whole.name, window=None) == whole
    cache = serving.CACHE
    assert (cache.batch, cache.heads, cache.kv_heads, cache.length, cache.width) == (16, 16, 4, 32768, 128)
    assert window.pairs == sum(min(i + 1, 1024) for i in range(16384)) * window.batch


def test_serving_is_checked_and_timed(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: softmax and mixtures, contiguous and in pages; a wrong result is not timed."""
    monkeypatch.setattr(serving, "PAGE", 16)
    small = Problem("cache", 2, 8, 72, 8, kv_heads=4, dtype="float32")
    found = serving.measure_serving(small)
    ours = {f"{method.name}{pages}" for method in serving.METHODS for pages in ("", ", pages")}
    assert set(found["rows"]) >= ours | {"softmax, sdpa flash", "softmax, pages"}
    row = found["rows"]["smgk soft, pages"]
    assert row["tokens per second"] == pytest.approx(2000)
    assert row["share of bandwidth"] * operators.LIMITS["bytes"] == pytest.approx(2 * 2 * 72 * 16 * 4 / 1e-3)
    real = serving.in_pages

    def spoiled(inputs: dict[str, Tensor]) -> Any:
        pools, pages = real(inputs)
        return pools, pages._replace(table=pages.table.roll(1, 0))

    monkeypatch.setattr(serving, "in_pages", spoiled)
    found = serving.measure_serving(small)
    wrong = {name for name, reason in found["failed"].items() if reason.startswith("WrongResultError")}
    assert wrong == {"softmax, pages", "smgk soft, pages", "mgk soft, pages"}


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # on a CPU
@pytest.mark.parametrize("name", ["flex", "flex flash"])
def test_flex_attention_agrees_with_sdpa(name: str, on_cpu: None) -> None:
    for problem in (*TINY, replace(TINY[0], padded=True), GROUPED):
        leaves = measure.make_inputs(problem, measure.BASELINE, device="cpu", dtype=torch.float32)
        inputs = {name: tensor.detach() for name, tensor in leaves.items()}
        mask = problem.mask("cpu")
        real = torch.ones(problem.batch, problem.length, dtype=torch.bool) if mask is None else mask
        anchors = softmax.ANCHORS[name], partial(softmax.sdpa, SDPBackend.MATH)
        found, expected = (anchor(problem, inputs)[0]().transpose(1, 2)[real] for anchor in anchors)
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_first_call_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(operators, "DEVICE", "cpu")
    monkeypatch.setattr(first_call, "DEVICE", "cpu")
    monkeypatch.setattr(first_call, "LENGTH", 16)
    first_call.main("mgk", "hard", "8")
    assert float(capsys.readouterr().out) > 0
    monkeypatch.setattr(first_call, "run", lambda job, folder: float(job[2]))
    assert first_call.compile_times()["smgk soft D=128"] == {"new": 128.0, "cached": 128.0}
