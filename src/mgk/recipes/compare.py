"""A grid of runs that differ in their attention and their seed alone, and the table that comes of it."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mgk.files import write_json, write_text
from mgk.intervals import interval
from mgk.train.config import Config, replace
from mgk.train.cost import flops
from mgk.train.engine import Result, train
from mgk.train.run import share_cores
from mgk.variants import VARIANTS

OPTIONS = {
    "hard": {"model__e_step": "hard"},
    "em": {"model__prior": "em"},
    "uniform": {"model__prior": "uniform"},
}


@dataclass(frozen=True)
class Row:
    """One attention over all its seeds."""

    attention: str
    scores: list[float]
    """On the test split, one per seed: accuracy in percent, or perplexity."""
    mean: float
    interval: float | None
    """Half of the 95% confidence interval of the mean; None for one seed."""
    parameters: int
    flops: int
    seconds_per_step: float
    peak_bytes: int


@dataclass(frozen=True)
class Comparison:
    metric: str
    rows: list[Row]
    failed: dict[str, str] = field(default_factory=dict)
    """What stopped a run, by its folder."""

    def table(self) -> str:
        """As Markdown, which is readable as it is."""
        head = ("attention", f"test {self.metric}", "seeds", "parameters", "GFLOPs", "ms/step", "peak MiB", "each seed")
        lines = [
            (
                row.attention,
                f"{row.mean:.2f}" + ("" if row.interval is None else f" ± {row.interval:.2f}"),
                str(len(row.scores)),
                f"{row.parameters:,}",
                f"{row.flops / 1e9:.3g}",
                f"{row.seconds_per_step * 1e3:.1f}",
                f"{row.peak_bytes / 2**20:.0f}",
                " ".join(f"{score:.2f}" for score in row.scores),
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

        def line(cells: Iterable[str]) -> str:
            padded = (
                c.ljust(w) if i in (0, 7) else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            )
            return "| " + " | ".join(padded) + " |"

        rule = "|" + "|".join("-" * (w + 1) + ("-" if i in (0, 7) else ":") for i, w in enumerate(widths)) + "|"
        return "\n".join([line(head), rule, *map(line, lines)])


def compare(
    config: Config,
    attentions: Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path,
    jobs: int = 1,
    data_root: str | Path | None = None,
    quiet: bool = True,
) -> Comparison:
    """Train every attention with every seed, and tabulate. Runs that are finished are not run again.

    Ctrl-C and SIGTERM stop all runs with a checkpoint each, and leave no process behind; the same call goes on.

    Args:
        config: what all runs share; their seeds count up from its own.
        attentions: variant and heads, e.g. "softmax:8", "smgk:4", with options behind: "mgk:4:hard", "smgk:2:em".
        seeds: runs of each.
        out: folder of the runs, OUT/ATTENTION/seed-N, and of comparison.json and comparison.md.
        jobs: runs side by side, on the same GPU or CPU.
        data_root: where prepared data sets are.
        quiet: show no progress.
    """
    if seeds < 1 or jobs < 1:
        raise ValueError(f"seeds, jobs: expected at least 1, got {seeds} and {jobs}")
    if not attentions:
        raise ValueError("attentions: expected at least one, e.g. softmax:8 smgk:4, got none")
    settings = {text: with_attention(config, text) for text in dict.fromkeys(attentions)}
    folder = Path(out)
    runs = [
        (
            text,
            replace(setting, seed=config.seed + number),
            folder / text.replace(":", "-") / f"seed-{config.seed + number}",
        )
        for number in range(seeds)  # one seed of everything first: a table soon, and better ones later
        for text, setting in settings.items()
    ]
    results: dict[Path, Result] = {}
    failed: dict[str, str] = {}
    with closing(execute(runs, jobs, data_root, quiet)) as outcomes:
        for path, result in outcomes:
            if isinstance(result, Result) and result.finished:
                results[path] = result
            elif isinstance(result, Result):
                raise KeyboardInterrupt  # told to stop: the next call goes on here
            else:
                failed[str(path)] = result
                print(f"{path}: {result}", file=sys.stderr, flush=True)
    by_seed = {text: [results[path] for t, _, path in runs if t == text and path in results] for text in settings}
    rows = [summary(text, settings[text], found) for text, found in by_seed.items() if found]
    comparison = Comparison("perplexity" if config.kind == "language" else "accuracy %", rows, failed)
    if rows:  # else what an earlier call has written stays
        write_json(folder / "comparison.json", {"metric": comparison.metric, "rows": [vars(row) for row in rows]})
        write_text(folder / "comparison.md", comparison.table() + "\n")
    return comparison


def with_attention(config: Config, text: str) -> Config:
    """The configuration with the attention that `text` names."""
    variant, *rest = text.split(":")
    heads, options = (rest[0], rest[1:]) if rest else ("", [])
    if variant not in VARIANTS or not heads.isdecimal() or any(option not in OPTIONS for option in options):
        raise ValueError(
            f"attentions: expected VARIANT:HEADS[:OPTION], with VARIANT one of {', '.join(VARIANTS)} and OPTION one of "
            f"{', '.join(OPTIONS)}, got {text!r}"
        )
    fields: dict[str, Any] = {"model__attention": variant, "model__heads": int(heads)}
    for option in options:
        fields |= OPTIONS[option]
    return replace(config, **fields)


def execute(
    runs: list[tuple[str, Config, Path]], jobs: int, data_root: str | Path | None, quiet: bool
) -> Generator[tuple[Path, Result | str]]:
    """Results as they come; a run that failed gives its reason and does not stop the others.

    Closed early, it tells the runs that are under way to stop, and waits until they have.
    """
    here = [run for run in runs if jobs == 1 or (run[2] / "result.json").exists()]  # what is finished is only read
    for _, config, path in here:
        yield path, attempt(config, path, data_root, quiet)
    # Each run in a process of its own: a GPU is shared by processes, a Python interpreter is not.
    context = multiprocessing.get_context("spawn")
    waiting = [run for run in runs if run not in here]
    processes = min(jobs, len(waiting))
    running: dict[Any, tuple[Any, Path]] = {}
    with terminable():
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    _, config, path = waiting.pop(0)
                    receiver, sender = context.Pipe(duplex=False)
                    worker = context.Process(target=serve, args=(sender, processes, config, path, data_root, quiet))
                    running[receiver] = worker, path
                    worker.start()
                    sender.close()
                heard: list[Any] = wait(list(running))
                for receiver in heard:
                    worker, path = running[receiver]
                    try:
                        result = receiver.recv()
                    except EOFError:
                        result = None
                    worker.join()
                    del running[receiver]
                    yield path, result or f"its process died with exit status {worker.exitcode}"
        finally:
            begun = [worker for worker, _ in running.values() if worker.pid is not None]
            for worker in begun:
                worker.terminate()
            for worker in begun:
                worker.join()


def serve(sender: Connection, processes: int, *run: Any) -> None:
    """A process of `execute`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # outside training: at a Ctrl-C our parent tells us
    share_cores(processes)
    sender.send(attempt(*run))


def attempt(config: Config, path: Path, data_root: str | Path | None, quiet: bool) -> Result | str:
    try:
        return train(config, path, resume=True, data_root=data_root, quiet=quiet)
    except Exception as error:  # PyTorch, Triton and Python each have names of their own for what goes wrong
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does; only a main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def summary(text: str, config: Config, results: list[Result]) -> Row:
    scores = [100 * r.test["accuracy"] if "accuracy" in r.test else r.test["perplexity"] for r in results]
    return Row(
        text,
        scores,
        statistics.mean(scores),
        interval(scores),
        results[0].parameters,
        flops(config.model),
        statistics.median(r.seconds_per_step for r in results),
        max(r.peak_bytes for r in results),
    )
