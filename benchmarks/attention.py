"""Attention alone: mixtures with half the heads against `scaled_dot_product_attention` with all of them.

    python -m benchmarks.attention --device cpu [--cases lra-1024 wikitext] [--rounds 5]
    python -m benchmarks.attention --device cuda [--parts operators growth] [--cases wide d96] [--anchors cudnn fa4]

On a CPU it measures time and memory of several cases (benchmarks/cpu.py). On a GPU it compares with the fastest softmax
(benchmarks/softmax.py) on the cases of benchmarks/problems.py, and also measures compilation, decoding, padding, the
M-step, attention layers and growth with N (benchmarks/cuda.py); that needs only torch, Triton and safetensors. Results
are checked before they are timed. The numbers go to a JSON file with the machine, the versions and the commit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks import cpu, cuda
from benchmarks.softmax import ANCHORS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=[], help="all if not given")
    parser.add_argument("--rounds", type=int, default=5, help="cpu only: how many times each method is timed")
    parser.add_argument(
        "--parts", nargs="+", choices=cuda.PARTS, default=[],
        help="cuda only; all if not given, and those that have cases if --cases are",
    )  # fmt: skip
    parser.add_argument("--anchors", nargs="+", choices=ANCHORS, default=[], help="cuda only: softmax to compare with")
    parser.add_argument(
        "--output", "--json", type=Path,
        help="results/bench-DEVICE.json if not given; for a selection, a file named after it",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    if options.device == "cpu" and (options.parts or options.anchors):
        parser.error("--parts and --anchors are for --device cuda, got --device cpu")
    problems = [problem.name for part in cuda.PROBLEMS.values() for problem in part]
    known = list(cpu.CASES) if options.device == "cpu" else problems
    if unknown := set(options.cases) - set(known):
        parser.error(f"--cases: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a machine with a CUDA GPU for cuda, found none")
    name = "-".join(["bench", options.device, *options.cases, *options.parts, *options.anchors]).replace(" ", "-")
    path = options.output or Path("results") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.device == "cpu":
        cpu.main(options.cases or list(cpu.CASES), options.rounds, path)
    else:
        parts = options.parts or list(cuda.PROBLEMS if options.cases else cuda.PARTS)
        cuda.main(parts, path, options.cases, options.anchors)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
