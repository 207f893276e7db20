"""The command line, `mgk` or `python -m mgk`: a thin face over functions that Python callers have too.

A subcommand is a function below: its docstring is its help, its signature its options. It imports what it needs when
it is called, so that `mgk --help` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro


def bench(
    device: Literal["cpu", "cuda"] = "cpu",
    cases: tuple[str, ...] = (),
    rounds: int = 5,
    output: Path | None = None,
) -> None:
    """Time MGK and sMGK at half the heads against scaled_dot_product_attention at all of them.

    Every result is checked against the dense formula in float64 first; a wrong one stops the run. The methods take
    turns, and a speed-up is the median over the rounds of the ratio to the baseline of the same round. Memory is the
    peak beyond the inputs. All of it, with the machine, the versions and the commit, goes into a JSON file.

    In Python: `mgk.bench.measure.run(Cpu(), CASES.values())`, with both names from `mgk.bench.cpu`.

    Args:
        device: what to measure. On cuda all three SDPA backends are the baseline, replayed from CUDA graphs like ours.
        cases: which of the CPU's shapes, e.g. `lra-1024 wikitext`; all if none is named.
        rounds: how often each method is timed.
        output: where the JSON goes; results/bench-DEVICE.json if not given.
    """
    if device == "cuda":
        import torch

        from mgk.bench import cuda

        if not torch.cuda.is_available():
            raise ValueError("--device: expected a machine with a CUDA GPU for cuda, found none")
        cuda.main(["--output", str(output or Path("results") / "bench-cuda.json")])
        return
    from rich.console import Console

    from mgk.bench.cpu import CASES, Cpu
    from mgk.bench.measure import run

    for name in cases:
        if name not in CASES:
            raise ValueError(f"--cases: expected some of {', '.join(CASES)}, got {name!r}")
    console = Console()
    report = run(Cpu(), [CASES[name] for name in cases or CASES], rounds=rounds, console=console)
    console.print(report.tables())
    console.print(f"written to {report.save(output or Path('results') / f'bench-{device}.json')}")


def demo(
    length: Annotated[int, tyro.conf.arg(metavar="N")] = 2048,
    rounds: int = 3,
) -> None:
    """Show every variant agree with the dense formula, then its speed and memory on this CPU.

    In Python: `mgk.bench.demo.demo(console=rich.console.Console())`.

    Args:
        length: positions in the sequences of the timing.
        rounds: how often each method is timed.
    """
    import dataclasses

    from rich.console import Console

    from mgk.bench.demo import CASE
    from mgk.bench.demo import demo as show

    show(dataclasses.replace(CASE, length=length), rounds=rounds, console=Console())


COMMANDS = (bench, demo)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for an error, 2 for a command that does not parse."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        command = parse([argument for argument in arguments if argument != "--debug"])
    except UsageError as error:
        print(f"mgk: error: {error} (see mgk --help)", file=sys.stderr)
        return 2
    try:
        command()
    except Exception as error:
        if debug:
            raise
        print(f"mgk: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class UsageError(Exception):
    """A command line that does not parse."""


def parse(arguments: Sequence[str]) -> Callable[[], None]:
    """The subcommand with its options, ready to be called; tyro's boxed complaint becomes one line."""

    def later(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        @functools.wraps(function)
        def with_options(*args: object, **kwargs: object) -> Callable[[], None]:
            return functools.partial(function, *args, **kwargs)

        return with_options

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
                {function.__name__: later(function) for function in COMMANDS},
                prog="mgk",
                description="Transformers whose attention keys are mixtures. --debug shows the traceback of an error.",
                args=arguments,
            )
    except SystemExit as stop:
        if not stop.code:  # --help was shown
            raise
        _, *lines = (line.strip("│╭╮╰╯─ ") for line in complaint.getvalue().splitlines())
        raise UsageError(" ".join(itertools.takewhile(bool, lines))) from None
    return command
