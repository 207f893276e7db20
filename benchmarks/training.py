"""Whole training steps of our models and of their alternatives: `python -m benchmarks.training --budget 330`.

The baseline is a GPT-2 in plain PyTorch with SDPA and `torch.compile` (`benchmarks.training_models`), with all heads.
A step is forward, backward, clipping and fused AdamW in bf16 autocast, on random tokens, 32,768 of them a step.

Models are measured in groups. Each model of a group is a process of its own. All of a group compile at the same time;
then they are timed one at a time, in turn, a few steps each, in several rounds: as steps launched from Python, and as
replays of one CUDA graph with forward, backward and optimiser. Groups are in order of importance, and results are
written after each, so that a run which is cut off still counts. `--smoke` runs toy sizes on a CPU.

N positions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_models import SIZES
from benchmarks.training_worker import STUDIES, TOKENS, Row, serve
from mgk.environment import environment
from mgk.files import write_json
from mgk.tables import Table

PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200 by the data sheet
ROUNDS = 5
BASELINE = "plain"
LENGTHS = (1024, 4096, 16384)
MODES = ("steps", "graph")  # launched from Python, and replayed from a CUDA graph


def groups() -> dict[str, list[Row]]:
    """All groups by name, the most important first."""
    found: dict[str, list[Row]] = {}
    main = (BASELINE, "softmax:12", "smgk:6", "smgk:12")
    for length in LENGTHS:
        found[f"gpt2-{length}"] = [Row("gpt2", method, length) for method in main]
        if length == LENGTHS[0]:
            found["loss"] = [Row("gpt2", "loss", length)]
    for length in LENGTHS:
        found[f"350m-{length}"] = [Row("350m", method, length) for method in (BASELINE, "smgk:4")]
    found["recompile"] = [Row("gpt2", "recompile", 1024)]
    found["lra"] = [Row("lra", method, 4096) for method in (BASELINE, "smgk:4", "mgk:4")]
    found["hf"] = [Row("gpt2", method, 1024) for method in (BASELINE, "hf-gpt2", "hf-llama")]
    found["nano"] = [Row("nano", method, 1024) for method in (BASELINE, "softmax:8", "smgk:4", "smgk:8")]
    found["eager"] = [Row("gpt2", method, 1024, compiles=False) for method in ("softmax:12", "smgk:6")]
    found["others"] = [Row("gpt2", method, 1024) for method in (BASELINE, "mgk:6", "smgk:6:hard", "mgk:6:hard")]
    found["350m-full"] = [Row("350m", method, 4096) for method in ("softmax:8", "smgk:8")]
    return found


def smoke() -> dict[str, list[Row]]:
    """Toy sizes for a CPU, one of each kind."""
    return {
        "language": [Row("smoke", method, 16) for method in (BASELINE, "softmax:2", "smgk:1", "hf-gpt2", "hf-llama")],
        "lra": [Row("smoke-lra", method, 16) for method in (BASELINE, "mgk:1:hard")],
        "eager": [Row("smoke", "smgk:1", 16, compiles=False)],
        "studies": [Row("smoke", study, 16) for study in STUDIES],
    }


class Worker:
    """A process that holds one model, and answers one request at a time."""

    def __init__(self, row: Row, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.row, self.result = row, dict(vars(row))
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, row, device))
        self.process.start()
        other.close()

    @property
    def works(self) -> bool:
        return "error" not in self.result and self.row.method not in STUDIES

    def ask(self, *request: Any) -> None:
        with suppress(OSError):  # `answer` reports a process that ended
            self.pipe.send(request)

    def answer(self, deadline: float) -> dict[str, Any]:
        """The answer to the request before, or {"error": reason}."""
        try:
            if self.pipe.poll(max(0.0, deadline - time.monotonic())):
                return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return {"error": "the process ended"}
        return {"error": "out of time"}

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def measure(rows: list[Row], device: str, deadline: float) -> list[dict[str, Any]]:
    """The results of a group."""
    workers = [Worker(row, device) for row in rows]
    try:
        for worker in workers:
            worker.ask("prepare")
        for worker in workers:
            worker.result |= worker.answer(deadline)
        for mode in MODES if device == "cuda" else MODES[:1]:
            if mode == "graph":
                each(workers, deadline, "capture")
            time_in_turn(workers, mode, deadline)
        each(workers, deadline, "profile")
    finally:
        for worker in workers:
            worker.stop()
    return [worker.result for worker in workers]


def each(workers: list[Worker], deadline: float, *request: Any) -> None:
    """Send a request to one worker after the other, and keep the answers."""
    for worker in workers:
        if worker.works and time.monotonic() < deadline:
            worker.ask(*request)
            worker.result |= worker.answer(deadline)


def time_in_turn(workers: list[Worker], mode: str, deadline: float) -> None:
    """Time the models alternately, and keep the median of the rounds."""
    times: dict[int, list[float]] = {index: [] for index in range(len(workers))}
    for _ in range(ROUNDS):
        for index, worker in enumerate(workers):
            possible = worker.works and (mode != "graph" or "not_captured" not in worker.result)
            if possible and time.monotonic() < deadline:
                worker.ask("time", mode)
                found = worker.answer(deadline)
                if "error" in found:
                    worker.result |= found
                else:
                    times[index].append(found["milliseconds"])
    for index, all_times in times.items():
        if all_times:
            workers[index].result[mode] = {"milliseconds": statistics.median(all_times), "each": all_times}


def rated(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With tokens per second, utilisation and the ratio to the baseline of the same group, for each mode."""
    base = next((found for found in results if found["method"] == BASELINE), {})
    for found in results:
        row = Row(*(found[name] for name in ("size", "method", "length", "compiles")))
        for mode in MODES:
            if mode not in found:
                continue
            seconds = found[mode]["milliseconds"] / 1e3
            found[mode]["tokens_per_second"] = row.rows * row.length / seconds
            if not row.method.startswith("hf"):
                attention = "softmax" if row.method == BASELINE else row.method.split(":")[0]
                flops = SIZES[row.size].flops(attention, row.heads, row.length)
                found[mode]["utilisation"] = flops * row.rows * row.length / seconds / PEAK
            if mode in base:
                found[mode]["speed"] = base[mode]["milliseconds"] / found[mode]["milliseconds"]
        if found.get("peak_gib") and base.get("peak_gib"):
            found["memory"] = found["peak_gib"] / base["peak_gib"]
    return results


def table(results: Iterable[dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = []
    for found in results:
        line = [found["size"], found["method"] + ("" if found["compiles"] else " eager"), str(found["length"])]
        if "error" in found:
            lines.append([*line, found["error"][:60], *[""] * 8])
            continue
        for mode in MODES:
            times = found.get(mode, {})
            for key, style in (("milliseconds", ".2f"), ("speed", ".3f"), ("utilisation", ".1%")):
                line.append(format(times[key], style) if key in times else "")
        for key, style in (("peak_gib", ".1f"), ("memory", ".2f"), ("first_step_seconds", ".1f")):
            line.append(format(found[key], style) if found.get(key) is not None else "")
        lines.append(line)
    modes = [f"{mode}: {what}" for mode in MODES for what in ("ms", "speed", "MFU")]
    return Table(["size", "model", "N", *modes, "peak GiB", "memory", "first step s"], lines).markdown()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/training-cuda.json"))
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no group starts")
    parser.add_argument("--groups", nargs="*", help="which; all if not given")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on a CPU, to see that it runs")
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    possible = smoke() if chosen.smoke else groups()
    unknown = set(chosen.groups or ()) - set(possible)
    if unknown:
        parser.error(f"--groups: expected some of {', '.join(possible)}, got {', '.join(sorted(unknown))}")
    device = "cpu" if chosen.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA GPU, found none; --smoke runs on a CPU")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    result: dict[str, Any] = {"environment": environment(), "tokens": TOKENS, "groups": {}}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen.groups or possible:
        if time.monotonic() - start > chosen.budget - 45:  # a group takes about a minute
            print(f"{name}: left out, the budget is used", flush=True)
            continue
        began = time.monotonic()
        found = rated(measure(possible[name], device, start + chosen.budget))
        result["groups"][name] = {"seconds": time.monotonic() - began, "rows": found}
        write_json(chosen.output, result)
        print(f"{name}: {time.monotonic() - began:.0f} s\n{table(found)}", flush=True)
        for each_found in found:
            for key in ("kinds", "ways", "shapes", "not_captured", "trace"):
                if key in each_found:
                    print(each_found["method"], key, each_found[key], flush=True)
    return result


if __name__ == "__main__":
    main()
