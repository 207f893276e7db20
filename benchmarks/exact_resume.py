"""Whether a resumed run ends with the bits of one that was not stopped: `python -m benchmarks.exact_resume`.

For every model and mode, four processes train a small classifier on generated ListOps: twice straight through (which
shows whether training repeats its bits at all), once until it is told to stop half-way, and once to resume that. The
table compares weights, optimiser state, log and test scores, bit for bit. The modes:

    eager          each step launches its kernels
    graph          each step is replayed from a CUDA graph (the default on one GPU)
    compile        torch.compile, replayed from a CUDA graph
    deterministic  as graph, with torch.use_deterministic_algorithms

Needs only torch, Triton, NumPy, safetensors and Fabric. The exit status is 1 if a mixture model is not exact.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import mgk.data
from mgk.environment import environment
from mgk.files import read_lines, write_json
from mgk.recipes import recipe
from mgk.tables import Table
from mgk.train import Config, checkpoint, replace, train
from mgk.train.learner import Learner
from mgk.variants import MIXTURES

MODES: dict[str, dict[str, Any]] = {
    "eager": {"graphs": "off", "compile": "off"},
    "graph": {"graphs": "auto", "compile": "off"},
    "compile": {"graphs": "auto", "compile": "on"},
    "deterministic": {"graphs": "auto", "compile": "off"},
}
MODELS = ("softmax", "mgk", "smgk")
SIZES = (400, 32, 32)
Start = Callable[[list[str]], None]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    mode: str
    steps: int
    device: str
    precision: str
    length: int

    @property
    def data(self) -> dict[str, Any]:
        return {"sizes": SIZES, "lengths": (self.length // 8, self.length - 2)}

    @property
    def config(self) -> Config:
        """Batches of four padded lengths, with dropout."""
        options = tuple(f"{name}={list(value)}" for name, value in self.data.items())
        return replace(
            recipe("lra-listops"),
            model__attention=self.model,
            model__heads=8 if self.model == "softmax" else 4,
            model__max_length=self.length,
            data__options=options,
            data__batch=32 if self.device == "cuda" else 4,
            data__valid_batch=32,
            data__pad_multiple=self.length // 4,
            optimiser__warmup=2,
            optimiser__lr=1e-3,
            steps=self.steps,
            eval_every=max(2, self.steps // 3),
            log_every=1,
            workers=0,
            device=self.device,
            precision=self.precision,
            **MODES[self.mode],
        )


def work(arguments: list[str]) -> None:
    """Train in this process: `arguments` are the fields of a case as JSON, the run, the data, and the step to stop at,
    0 for none.
    """
    fields, run, data, stop = arguments
    case = Case(**json.loads(fields))
    update = Learner.update

    def update_and_stop(self: Learner, step: int, batch: Any) -> None:
        update(self, step, batch)
        if step + 1 == int(stop):
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler stops a run

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(case.mode == "deterministic")
    try:
        with mock.patch.object(Learner, "update", update_and_stop):
            result = train(case.config, run, data_root=data, resume=True)
    finally:
        torch.use_deterministic_algorithms(before)
    if result.finished == bool(int(stop)):
        raise RuntimeError(f"{run}: expected the run to {'stop' if int(stop) else 'finish'}, it is at {result.step}")


def in_new_process(arguments: list[str]) -> None:
    """Run `work` in a new process, as a resumed run is."""
    command = [sys.executable, "-m", "benchmarks.exact_resume", "--work", *arguments]
    # cuBLAS refuses to be deterministic without a fixed workspace, which must be set before it starts.
    variables = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if '"deterministic"' in arguments[0] else None
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"exit status {done.returncode}: {lines[-1]}")


def measure(case: Case, folder: Path, data: Path, start: Start = in_new_process) -> dict[str, Any]:
    """Train the four runs of a case and compare their bits."""
    fields = json.dumps(vars(case))
    straight, again, resumed = (
        folder / f"{case.model}-{case.mode}-{name}" for name in ("straight", "again", "resumed")
    )
    row: dict[str, Any] = vars(case).copy()
    try:
        for run, stop in ((straight, 0), (again, 0), (resumed, case.steps // 2), (resumed, 0)):
            start([fields, str(run), str(data), str(stop)])
    except RuntimeError as error:
        return row | {"error": str(error)}
    return row | {"repeated": compare(straight, again), "resumed": compare(straight, resumed)}


def compare(one: Path, two: Path) -> dict[str, Any]:
    """Compare two finished runs: "weights" and "state" count tensors with other bits; "log" is the first other step."""
    first, second = (checkpoint.load(found) for run in (one, two) if (found := checkpoint.find(run)))
    differences = [
        float((first.weights[name].double() - other.double()).abs().max()) for name, other in second.weights.items()
    ]
    states = zip(tree_leaves(first.state["optimiser"]), tree_leaves(second.state["optimiser"]), strict=True)
    logs = zip(*(losses(run) for run in (one, two)), strict=True)
    return {
        "weights": sum(not same_bits(first.weights[name], other) for name, other in second.weights.items()),
        "largest": max(differences),
        "state": sum(not same_bits(a, b) for a, b in states),
        "log": next((a["step"] for a, b in logs if a != b), None),
        "best": [json.loads((run / "result.json").read_text())["best_step"] for run in (one, two)],
    }


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have the same bytes; NaN equals itself, and 0 differs from -0."""
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (one, two))
    return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(a, b))


def losses(run: Path) -> list[dict[str, Any]]:
    """The lines of the log without times."""
    kept = ("event", "step", "loss", "accuracy", "norm", "lr")
    return [{name: line[name] for name in kept if name in line} for line in read_lines(run / "log.jsonl")]


def exact(found: dict[str, Any]) -> bool:
    """Whether a comparison found no difference."""
    return found["weights"] == found["state"] == 0 and found["log"] is None and len(set(found["best"])) == 1


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table."""
    lines = []
    for row in rows:
        head = [row["model"], row["mode"], row["precision"]]
        if "error" in row:
            lines.append([*head, row["error"], "", "", ""])
            continue
        found = row["resumed"]
        step = "none" if found["log"] is None else str(found["log"])
        told = [("yes" if exact(row[name]) else "no") for name in ("repeated", "resumed")]
        lines.append([*head, *told, step, f"{found['weights']} ({found['largest']:.1e})"])
    header = ["model", "mode", "precision", "repeated exactly", "resumed exactly", "first other step", "other weights"]
    return Table(header, lines).markdown()


def main(arguments: list[str] | None = None, start: Start = in_new_process) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.exact_resume", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--models", nargs="*", default=list(MODELS), choices=MODELS)
    add("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    add("--precisions", nargs="*", default=["bf16-mixed"], choices=("bf16-mixed", "32-true"))
    add("--steps", type=int, default=24)
    add("--length", type=int, default=0, help="longest example; 1,024 if not given, 32 on a CPU")
    add("--jobs", type=int, default=6, help="cases at a time; they share the GPU")
    add("--output", type=Path, default=None, help="JSON file to write, too")
    chosen = parser.parse_args(arguments)
    length = chosen.length or (1024 if chosen.device == "cuda" else 32)
    cases = [
        Case(model, mode, chosen.steps, chosen.device, precision, length)
        for model in chosen.models
        for mode in chosen.modes
        for precision in chosen.precisions
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        data = Path(folder) / "data"
        mgk.data.prepare("listops", root=data, **cases[0].data)
        runs = [Path(folder) / case.precision for case in cases]
        rows = list(pool.map(lambda case, run: measure(case, run, data, start), cases, runs))
    facts = environment()
    print(facts["gpu"] or facts["machine"], *(f"{name} {number}" for name, number in facts["versions"].items()))
    print(table(rows))
    if chosen.output:
        write_json(chosen.output, {"environment": facts, "rows": rows})
    failed = [row for row in rows if "error" in row or not exact(row["resumed"])]
    return int(any(row["model"] in MIXTURES for row in failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
    else:
        raise SystemExit(main())
