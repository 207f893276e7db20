"""The time of the first call of a new shape, forward+backward, in a new process: `python -m benchmarks.first_call`.

With an empty Triton cache it is the time of importing Triton and compiling, with a full one of importing and loading.
It prints a table of calls that each had the machine to itself, and exits with 1 if a first one took LIMIT seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.operators import DEVICE, attend_and_grad, inputs_of
from benchmarks.problems import Problem
from mgk.ops.measure import MIXTURES, seconds
from mgk.tables import Table

LENGTH = 4096
LIMIT = 10.0
JOBS = [(method.operator, method.e_step, str(width)) for width in (64, 128) for method in MIXTURES]


def compile_times(at_a_time: int = len(JOBS)) -> dict[str, dict[str, float]]:
    """Return the seconds of the first call, "new" with an empty cache and "cached" in a second process.

    So many jobs run at a time, each in a process and with a cache of its own.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_a_time) as pool:
        runs = {kind: list(pool.map(lambda job: run(job, folder), JOBS)) for kind in ("new", "cached")}
    return {
        f"{operator} {e_step} D={width}": {kind: found[index] for kind, found in runs.items()}
        for index, (operator, e_step, width) in enumerate(JOBS)
    }


def run(job: tuple[str, ...], folder: str) -> float:
    """Measure a job in a process of its own."""
    variables = {**os.environ, "TRITON_CACHE_DIR": os.path.join(folder, "-".join(job))}
    command = [sys.executable, "-m", "benchmarks.first_call", *job]
    done = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main(operator: str, e_step: str, width: str) -> None:
    problem = Problem("first call", 1, 16, LENGTH, int(width), is_causal=True)
    method = next(each for each in MIXTURES if (each.operator, each.e_step) == (operator, e_step))
    inputs = inputs_of(problem, method)
    grad = torch.randn_like(inputs["value"])

    def call() -> None:
        attend_and_grad(method, inputs, grad, is_causal=True)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    print(seconds(call))


def report() -> int:
    """Print the times of calls one after the other; 0 if all are below LIMIT."""
    found = compile_times(1)
    lines = [[name, f"{times['new']:.1f}", f"{times['cached']:.1f}"] for name, times in found.items()]
    print(Table(["first call, forward+backward", "empty cache, s", "full cache, s"], lines).markdown())
    return int(max(times["new"] for times in found.values()) >= LIMIT)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(report())
    main(*sys.argv[1:])
