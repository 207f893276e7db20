"""Figures and tables of runs in a folder (`mgk figures`), and explorer pages of runs (`mgk explore`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mgk.files import read_json
from mgk.inspect.costs import cost_curves
from mgk.inspect.page import Block, Chart, Model, Page, Series, page
from mgk.inspect.rank import ranks
from mgk.inspect.runs import Run
from mgk.inspect.summary import Summary, summarise
from mgk.tables import Table
from mgk.variants import GAUSSIAN, LINEAR

CURVES = (("train", "loss"), ("valid", "accuracy"), ("valid", "perplexity"))
HEADS = (2, 4, 8, 16)  # of the baseline in the cost curves


def write_figures(
    runs: Sequence[Run], out: Path, *, matrices: int = 1000, length: int = 1024, index: int = 0
) -> list[Path]:
    """Write all figures and tables of some runs to the folder `out`, print their paths and return them.

    Args:
        matrices: attention matrices per layer whose rank is computed; 0 for no ranks.
        length: longer inputs are cut to this many tokens.
        index: example of the test split that the maps show.
    """
    from mgk.inspect import figures

    written: list[Path] = []

    def add(paths: list[Path]) -> None:
        written.extend(paths)
        print(", ".join(map(str, paths)))

    named = _named(runs)
    curves = {f"{event} {metric}": lines for event, metric, lines in _curves(named)}
    if curves:
        add(figures.save(figures.curves(curves), out / "curves"))
    summaries = {
        name: [summarise(layer.heads()) for layer in run.layers(run.example(index, length))]
        for name, run in named.items()
    }
    maps = {
        name: [[pooled.sum(0) / layer.bin_size for pooled in layer.pooled] for layer in layers]
        for name, layers in summaries.items()
    }
    add(figures.save(figures.attention_maps(maps), out / "maps"))
    add(heads_table(summaries).write(out / "heads"))
    if matrices:
        found = {name: rank_table(run, matrices=matrices, length=length) for name, run in named.items()}
        add(figures.save(figures.rank_histograms(found), out / "ranks"))
    model = runs[0].config.model
    costs = cost_curves(
        LINEAR if model.attention in LINEAR else ("softmax", *GAUSSIAN),
        model=model,
        heads=HEADS,
        length=getattr(model, "max_length", length),
        causal=runs[0].config.kind == "language",
    )
    add(figures.save(figures.costs(costs, heads=HEADS), out / "costs"))
    results = {name: result for name, run in named.items() if (result := run.result)}
    if results:
        add(figures.save(figures.bars(_scores_and_sizes(results)), out / "techniques"))
        add(results_table(results).write(out / "results"))
    return written


def rank_table(run: Run, *, matrices: int = 1000, length: int | None = None) -> Tensor:
    """Return the ranks of attention matrices of every layer, (L, matrices): all heads of one example after another."""
    depth, heads = run.config.model.layers, run.config.model.heads
    examples = itertools.islice(run.examples(length), -(-matrices // heads))
    weights = (head.rows().weights for given in examples for layer in run.layers(given) for head in layer.heads())
    return ranks(weights).view(-1, depth, heads).transpose(0, 1).flatten(1)[:, :matrices]


def heads_table(summaries: dict[str, list[Summary]]) -> Table:
    """Tabulate how much the heads of each layer differ and how much their components contribute."""
    header = ["model", "layer", "entropy", "effective heads", "mean overlap", "effective components", "least removal"]
    rows = []
    for name, layers in summaries.items():
        for number, summary in enumerate(layers, 1):
            count = len(summary.overlap)
            overlap = (summary.overlap.sum() - summary.overlap.trace()) / max(1, count * (count - 1))
            mixture = summary.share.shape[1] > 1
            rows.append(
                [
                    name,
                    str(number),
                    f"{summary.entropy.mean():.2f}",
                    f"{summary.effective_heads:.2f} of {count}",
                    f"{overlap:.3f}" if count > 1 else "-",
                    f"{summary.effective_components.mean():.2f}" if mixture else "-",
                    f"{summary.removal.min():.3f}" if mixture else "-",
                ]
            )
    return Table(header, rows, "Heads and components on one example")


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Tabulate the test scores, parameters and step times of runs."""

    def score(metric: str, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.4g}"

    metrics = list(dict.fromkeys(name for result in results.values() for name in result["test"]))
    header = ["model", *(f"test {name}" for name in metrics), "parameters", "ms/step"]
    rows = [
        [
            name,
            *(score(metric, result["test"].get(metric)) for metric in metrics),
            f"{result['parameters']:,}",
            f"{1000 * result['seconds_per_step']:.1f}",
        ]
        for name, result in results.items()
    ]
    return Table(header, rows, "Results")


def explore_page(
    runs: Sequence[Run],
    *,
    text: str | None = None,
    index: int = 0,
    length: int | None = None,
    title: str = "Inside mixture-key attention",
    report: Sequence[Block] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Page:
    """Create a page of the models of some runs on one input: `text`, or example `index` of the test split."""
    models = []
    for name, run in _named(runs).items():
        given = run.example(index, length) if text is None else run.encode(text, length)
        note = f"{run.config.recipe}, {run.parameters:,} parameters"
        models.append(Model.of_layers(name, given.tokens, run.layers(given), note=note, unseen=given.unseen))
    return page(models, title=title, report=report, progress=progress)


def comparison_page(folder: str | Path, *, text: str | None = None, data_root: Path | None = None) -> Page:
    """Create the report of `mgk compare`: its table, curves and costs, then an explorer of the first seed's models."""
    folder = Path(folder)
    table = folder / "comparison.json"
    if not table.exists():
        raise ValueError(f"{folder}: expected the folder of a comparison (mgk compare), found no {table.name} in it")
    found = read_json(table)
    if not isinstance(found, dict) or not found.get("rows"):
        raise ValueError(f"{table}: expected the rows of a comparison, got none")
    firsts = [sorted((folder / row["attention"].replace(":", "-")).glob("seed-*")) for row in found["rows"]]
    runs = [Run.open(seeds[0], data_root=data_root) for seeds in firsts if seeds]
    blocks: list[Block] = [_comparison_table(found)]
    if not runs:
        raise ValueError(f"{folder}: expected the folders of the runs that {table.name} names, found none")
    for event, metric, lines in _curves(_named(runs)):
        series = [Series(name, *points) for name, points in lines.items()]
        blocks.append(Chart(series, f"{event.capitalize()} {metric}", "step", metric, log_y=metric == "perplexity"))
    for key, label in (("flops", "FLOPs of an example"), ("parameters", "Parameters")):
        costs = [(row["attention"], row[key]) for row in found["rows"]]
        points = [Series(name, [float(name.split(":")[1])], [cost]) for name, cost in costs]
        blocks.append(Chart(points, label, "heads", label))
    return explore_page(runs, text=text, title=f"Comparison on {runs[0].config.recipe}", report=blocks)


def _comparison_table(found: dict[str, Any]) -> Table:
    header = ["attention", f"test {found['metric']}", "seeds", "parameters", "GFLOPs", "ms/step", "peak MiB"]
    rows = [
        [
            row["attention"],
            _score(row["mean"]) + (f" ± {_score(row['interval'])}" if len(row["scores"]) > 1 else ""),
            str(len(row["scores"])),
            f"{row['parameters']:,}",
            f"{row['flops'] / 1e9:.3g}",
            f"{1000 * row['seconds_per_step']:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in found["rows"]
    ]
    return Table(header, rows, "Results")


def _score(value: float | None) -> str:
    """Show a score; None stands for one that is not finite."""
    return "∞" if value is None else f"{value:.2f}"


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Give each run a unique name: with its seed, or else its folder, if two runs have the same name."""
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    names: dict[str, Run] = {}
    for run in runs:
        candidates = (run.name, f"{run.name}, seed {run.config.seed}", f"{run.name}, {run.folder}")
        names[next((name for name in candidates if name not in names), candidates[-1])] = run
    return names


def _curves(runs: dict[str, Run]) -> Iterator[tuple[str, str, dict[str, tuple[list[float], list[float]]]]]:
    """Iterate over the event, metric and curves by name of each metric that at least one run has logged."""
    for event, metric in CURVES:
        lines = {name: run.curve(event, metric) for name, run in runs.items()}
        if any(steps for steps, _ in lines.values()):
            yield event, metric, lines


def _scores_and_sizes(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the panels of a bar chart, see `figures.bars`."""
    panels = {
        label: {name: (scale * r["test"][metric], 0.0) for name, r in results.items() if metric in r["test"]}
        for label, metric, scale in (("test accuracy %", "accuracy", 100), ("test perplexity", "perplexity", 1))
    }
    panels["parameters"] = {name: (result["parameters"], 0.0) for name, result in results.items()}
    return {label: values for label, values in panels.items() if values}
