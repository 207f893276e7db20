"""`mgk bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def bench(
    what: Literal["attention", "train"] = "attention",
    device: Literal["cpu", "cuda"] = "cpu",
    cases: tuple[str, ...] = (),
    rounds: int | None = None,
    output: Path | None = None,
) -> None:
    """Time MGK and sMGK at half the heads against scaled_dot_product_attention at all of them.

    Every result is checked against the dense formula in float64 first; a wrong one stops the run. The methods take
    turns, and a speed-up is the median over the rounds of the ratio to the baseline of the same round. Memory is the
    peak beyond the inputs. All of it, with the machine, the versions and the commit, goes into a JSON file.

    In Python: `benchmarks.measure.run(Cpu(), CASES.values())`, with both names from `benchmarks.cpu`.

    Args:
        what: attention alone, or whole training steps of the Long Range Arena's text model (on cuda).
        device: what to measure. On cuda all three SDPA backends are the baseline, replayed from CUDA graphs like ours.
        cases: which of the CPU's shapes, e.g. `lra-1024 wikitext`; all if none is named. Not for cuda, nor for train.
        rounds: how often each method is timed; 5 if not given. Not for attention on cuda, which has its own.
        output: where the JSON goes; results/bench-DEVICE.json or results/train-DEVICE.json if not given, and with
            cases a file of their own, e.g. results/bench-cpu-wikitext.json.
    """
    if cases and (what, device) != ("attention", "cpu"):
        raise ValueError(f"--cases: expected none with --what {what} --device {device}, got {' '.join(cases)}")
    if rounds is not None and (what, device) == ("attention", "cuda"):
        raise ValueError(f"--rounds: expected none with --what attention --device cuda, got {rounds}")
    rounds = 5 if rounds is None else rounds
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device: expected a machine with a CUDA GPU for cuda, found none")
    if what == "train":
        from benchmarks import train as training

        if rounds < 1:
            raise ValueError(f"rounds: expected at least 1, got {rounds}")
        path = output or Path("results") / f"train-{device}.json"
        training.main(["--device", device, "--rounds", str(rounds), "--output", str(path)])
        return
    if device == "cuda":
        from benchmarks import cuda

        cuda.main(["--output", str(output or Path("results") / "bench-cuda.json")])
        return
    from rich.console import Console

    from benchmarks.cpu import CASES, Cpu
    from benchmarks.measure import run

    for name in cases:
        if name not in CASES:
            raise ValueError(f"--cases: expected some of {', '.join(CASES)}, got {name!r}")
    console = Console()
    report = run(Cpu(), [CASES[name] for name in cases or CASES], rounds=rounds, console=console)
    console.print(report.tables())
    path = output or Path("results") / f"{'-'.join(('bench', device, *cases))}.json"  # some cases are not all
    console.print(f"written to {report.save(path)}")
