"""Compare attentions: train each with several seeds and tabulate the test scores and costs."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mgk.files import holder, locked, tidy, write_json, write_text
from mgk.intervals import interval
from mgk.ops.arguments import check_count
from mgk.recipes.runner import Failure, Job, Stop, run_jobs
from mgk.tables import Table
from mgk.train.config import Config, replace
from mgk.train.engine import Result, train
from mgk.train.evaluate import flops
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
    """Test score of each seed: accuracy in percent, or perplexity."""
    mean: float
    interval: float | None
    """Half the width of the 95% confidence interval of the mean; None for one seed."""
    parameters: int
    flops: int
    seconds_per_step: float
    peak_bytes: int


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    metric: str
    rows: list[Row]
    failed: dict[str, str] = field(default_factory=dict)
    """Reason of each run that failed, by its folder."""

    def table(self) -> str:
        """Return the rows as a Markdown table."""
        head = ("attention", f"test {self.metric}", "seeds", "parameters", "GFLOPs", "ms/step", "peak MiB", "each seed")
        rows = [
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
        return Table(head, rows, left=(0, 7)).markdown().rstrip("\n")


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
    """Train every attention with every seed, and tabulate. Finished runs are not trained again.

    Ctrl-C and SIGTERM stop all runs, each with a checkpoint, and raise KeyboardInterrupt; the same call resumes them.

    Args:
        config: settings that all runs share; its seed is the first of the seeds.
        attentions: variant and heads, e.g. "softmax:8", "smgk:4", and options: "mgk:4:hard", "smgk:2:em".
        seeds: runs of each attention.
        out: folder of the runs, OUT/ATTENTION/seed-N, and of comparison.json and comparison.md.
        jobs: runs at a time, on the same GPU or CPU.
        data_root: folder of the prepared data sets; None is `mgk.data.root()`.
        quiet: show no progress.
    """
    check_count("seeds", seeds)
    check_count("jobs", jobs)
    if not attentions:
        raise ValueError("attentions: expected at least one, e.g. softmax:8 smgk:4, got none")
    settings = {text: with_attention(config, text) for text in dict.fromkeys(attentions)}
    folder = Path(out)
    runs = {
        (text, seed): folder / text.replace(":", "-") / f"seed-{seed}"
        for seed in range(config.seed, config.seed + seeds)  # one seed of every attention before the next seed
        for text in settings
    }
    todo = {
        path: partial(finish, replace(settings[text], seed=seed), path, data_root, quiet)
        for (text, seed), path in runs.items()
    }
    lock = folder / ".lock"
    with locked(lock, wait=False, remove=True) as ours:
        if not ours:
            raise ValueError(
                f"{folder}: {holder(lock)} makes this comparison; wait until it has ended, or choose another --out"
            )
        tidy(folder)
        outcomes = run_all(todo, jobs)
        comparison = collect(config, settings, runs, outcomes)
        if comparison.rows:  # otherwise keep the table of an earlier call
            rows = [{name: finite(value) for name, value in vars(row).items()} for row in comparison.rows]
            write_json(folder / "comparison.json", {"metric": comparison.metric, "rows": rows})
            write_text(folder / "comparison.md", comparison.table() + "\n")
    return comparison


def collect(
    config: Config,
    settings: Mapping[str, Config],
    runs: Mapping[tuple[str, int], Path],
    outcomes: Mapping[Path, Result | Failure],
) -> Comparison:
    """Tabulate the outcomes of runs; `runs` has the folder of each attention and seed."""
    results = {path: outcome for path, outcome in outcomes.items() if isinstance(outcome, Result)}
    rows = []
    for text, setting in settings.items():
        found = [results[path] for (name, _), path in runs.items() if name == text and path in results]
        if found:
            rows.append(summary(text, setting, found))
    failed = {str(path): outcome.reason for path, outcome in outcomes.items() if isinstance(outcome, Failure)}
    return Comparison("perplexity" if config.kind in ("language", "translation") else "accuracy %", rows, failed)


def run_all(todo: Mapping[Path, Job[Result]], jobs: int) -> dict[Path, Result | Failure]:
    """Finish all runs; raise KeyboardInterrupt if they are told to stop. Finished runs are read in this process."""

    def report(path: Path, reason: str) -> None:
        print(f"{path}: {reason}", file=sys.stderr, flush=True)

    done = {path: job for path, job in todo.items() if (path / "result.json").exists()}
    outcomes = run_jobs(done, on_failure=report)
    if len(outcomes) == len(done):
        rest = {path: job for path, job in todo.items() if path not in done}
        outcomes |= run_jobs(rest, processes=jobs, on_failure=report)
    if len(outcomes) < len(todo):
        raise KeyboardInterrupt
    return outcomes


def finish(config: Config, path: Path, data_root: str | Path | None, quiet: bool) -> Result:
    """Train or resume a run to its end."""
    result = train(config, path, resume=True, data_root=data_root, quiet=quiet)
    if not result.finished:
        raise Stop
    return result


def with_attention(config: Config, text: str) -> Config:
    """Return the configuration with the attention that `text` names."""
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


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not know, such as an infinite perplexity, by None."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(text: str, config: Config, results: list[Result]) -> Row:
    scores = [100 * r.test["accuracy"] if "accuracy" in r.test else r.test["perplexity"] for r in results]
    return Row(
        text,
        scores,
        statistics.mean(scores),
        interval(scores) if all(map(math.isfinite, scores)) else math.inf,
        results[0].parameters,
        flops(config.model),
        statistics.median(r.seconds_per_step for r in results),
        max(r.peak_bytes for r in results),
    )
