"""Figures and tables of runs in a folder (`mgk figures`), and explorer pages of runs (`mgk explore`)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mgk.files import read_json
from mgk.inspect.blocks import Bar, Bars, Block, Chart, Series
from mgk.inspect.costs import cost_curves
from mgk.inspect.page import Model, Page, page
from mgk.inspect.rank import ranks
from mgk.inspect.runs import Run
from mgk.inspect.summary import Summary, summarise
from mgk.intervals import interval
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
    others: Sequence[Model] = (),
    text: str | None = None,
    index: int | None = None,
    length: int | None = None,
    title: str = "",
    report: Sequence[Block] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Page:
    """Create a page of the models of some runs on one input: `text`, or an example of the test split.

    Args:
        runs: the runs.
        others: more models, shown after those of the runs; see `mgk.inspect.pretrained`.
        text: the input.
        index: example of the test split, if there is no text; None chooses one, see `Run.example`.
        length: cut the input to this many tokens.
        title: title of the page; by default it says whether there are mixture keys.
        report: what is shown above the explorer.
        progress: called with the number of finished layers and the total.
    """
    models = []
    for name, run in _named(runs).items():
        given = run.example(index, length) if text is None else run.encode(text, length)
        note, answer = f"{run.config.recipe}, {run.parameters:,} parameters", run.answer(given)
        layers = run.layers(given)
        models.append(Model.of_layers(name, given.tokens, layers, note=note, unseen=given.unseen, answer=answer))
    models += others
    mixture = any(head.num_components > 1 for model in models for heads in model.layers for head in heads)
    title = title or ("Inside mixture-key attention" if mixture else "Inside attention")
    return page(models, title=title, report=report, progress=progress)


def comparison_page(folder: str | Path, *, text: str | None = None, data_root: Path | None = None) -> Page:
    """Create the report of `mgk compare`: scores, costs and curves, then an explorer of the first seed's models."""
    folder = Path(folder)
    table = folder / "comparison.json"
    if not table.exists():
        raise ValueError(f"{folder}: expected the folder of a comparison (mgk compare), found no {table.name} in it")
    found = read_json(table)
    if not isinstance(found, dict) or not found.get("rows"):
        raise ValueError(f"{table}: expected the rows of a comparison, got none")
    rows, seeds = [], []
    for row in found["rows"]:
        folders = sorted((folder / row["attention"].replace(":", "-")).glob("seed-*"))
        if folders:
            rows.append(row)
            seeds.append([Run.open(each, data_root=data_root) for each in folders])
    if not rows:
        raise ValueError(f"{folder}: expected the folders of the runs that {table.name} names, found none")
    named = _named([runs[0] for runs in seeds])
    blocks: list[Block] = [
        *_scores_and_costs(dict(zip(named, rows, strict=True)), dict(zip(named, seeds, strict=True)), found["metric"]),
        *_charts(dict(zip(named, seeds, strict=True))),
    ]
    title = f"Comparison on {seeds[0][0].config.recipe}"
    return explore_page([runs[0] for runs in seeds], text=text, title=title, report=blocks)


def _scores_and_costs(rows: dict[str, dict[str, Any]], seeds: dict[str, list[Run]], metric: str) -> list[Bars]:
    """Return the test scores and the costs of a comparison as bars; with several seeds, with 95% intervals."""
    most = max(len(row["scores"]) for row in rows.values())
    unit = " %" if metric.endswith("%") else ""
    scores = [_bar(name, row["mean"], "{:.2f}", unit, row["interval"]) for name, row in rows.items()]
    times = []
    for name, row in rows.items():
        each = [1000 * run.result["seconds_per_step"] for run in seeds[name] if run.result]
        mean = statistics.mean(each or [1000 * row["seconds_per_step"]])
        times.append(_bar(name, mean, "{:.1f}", " ms", interval(each)))
    seeded = f"Mean of {most} seeds with its 95% confidence interval. " if most > 1 else "One seed: no interval. "
    better = "Higher is better." if unit else "Lower is better."

    mega = max(row["flops"] for row in rows.values()) < 1e9
    flops = (1e6, "{:.1f}", " MFLOPs") if mega else (1e9, "{:,.1f}", " GFLOPs")

    def exact(key: str, scale: float, form: str, unit: str = "") -> list[Bar]:
        return [_bar(name, row[key] / scale, form, unit) for name, row in rows.items()]

    return [
        Bars(scores, f"Test {metric.removesuffix(' %')}", seeded + better),
        Bars(exact("parameters", 1, "{:,.0f}"), "Parameters", "Numbers that training adjusts."),
        Bars(exact("flops", *flops), "Computation", "To train on one example of full length; layers."),
        Bars(times, "Time per step", "Forward, backward and update, on the machine that trained."),
        Bars(exact("peak_bytes", 2**20, "{:,.0f}", " MiB"), "Peak memory", "The most that training held at once."),
    ]


def _bar(name: str, value: float | None, form: str, unit: str, half: float | None = None) -> Bar:
    """Write a number, and the half width of its interval if it has one; None stands for one that is not finite."""
    if value is None:
        return Bar(name, 0, "not finite")
    text = form.format(value)
    if half is None:
        return Bar(name, value, text + unit)
    return Bar(name, value, f"{text} ± {form.format(half)}{unit}", max(0.0, value - half), value + half)


def _charts(seeds: dict[str, list[Run]]) -> Iterator[Chart]:
    """Iterate over a chart of each logged metric: the mean of the seeds, and a band from the lowest to the highest."""
    for event, metric in CURVES:
        lines = [
            _mean_line(name, [dict(zip(*run.curve(event, metric), strict=True)) for run in runs])
            for name, runs in seeds.items()
        ]
        if any(line.x for line in lines):
            several = any(len(runs) > 1 for runs in seeds.values())
            note = "Line: mean of the seeds. Band: from the lowest seed to the highest." if several else ""
            title = f"{'Training' if event == 'train' else 'Validation'} {metric}"
            yield Chart(lines, title, "step", metric, log_y=metric == "perplexity", note=note)


def _mean_line(name: str, curves: Sequence[dict[float, float]]) -> Series:
    """Return the mean of several curves at the steps that all of them have."""
    curves = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [[curve[step] for curve in curves] for step in steps]
    mean = [sum(each) / len(each) for each in values]
    if len(curves) < 2:
        return Series(name, steps, mean)
    return Series(name, steps, mean, [min(each) for each in values], [max(each) for each in values])


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Give each run a unique name: with its seed, or else its folder, if two runs have the same name."""
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
