"""What runs come to, put together: figures and tables in a folder, or one page with an explorer at its end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mgk.inspect import Chart, Model, Page, Series, page
from mgk.inspect import Table as PageTable
from mgk.inspect.costs import cost_curves
from mgk.inspect.page import Block
from mgk.inspect.rank import ranks
from mgk.inspect.runs import Run
from mgk.inspect.summary import Summary, summarise
from mgk.tables import Table

Tell = Callable[[str], None]


def summaries(run: Run, *, index: int = 0, length: int | None = None, bins: int = 128) -> list[Summary]:
    """Of every layer, on one example of the test split."""
    return [summarise(layer.heads(), bins=bins) for layer in run.layers(run.of_split(index, length=length))]


def rank_table(run: Run, *, matrices: int = 1000, length: int | None = None) -> Tensor:
    """Ranks of so many attention matrices of every layer, (L, matrices): every head of one example after the other."""
    depth, heads = run.config.model.layers, run.config.model.heads
    examples = itertools.islice(run.examples(length), -(-matrices // heads))
    every = (head.rows().weights for given in examples for layer in run.layers(given) for head in layer.heads())
    return ranks(every).view(-1, depth, heads).transpose(0, 1).flatten(1)[:, :matrices]


def write_figures(
    runs: Sequence[Run], out: Path, *, matrices: int = 1000, length: int = 1024, index: int = 0, tell: Tell = print
) -> list[Path]:
    """Every figure and table that the runs allow, in `out`."""
    from mgk.inspect import figures

    written: list[Path] = []

    def put(paths: list[Path]) -> None:
        written.extend(paths)
        tell(f"{', '.join(map(str, paths))}")

    named = _named(runs)
    panels = {
        f"{event} {metric}": {name: run.curve(event, metric) for name, run in named.items()}
        for event, metric in (("train", "loss"), ("valid", "accuracy"), ("valid", "perplexity"))
    }
    panels = {title: lines for title, lines in panels.items() if any(x for x, _ in lines.values())}
    if panels:
        put(figures.save(figures.curves(panels), out / "curves"))
    maps, facts = {}, {}
    for name, run in named.items():
        facts[name] = summaries(run, index=index, length=length)
        maps[name] = [[pooled.sum(0) / s.bin_size for pooled in s.pooled] for s in facts[name]]
    put(figures.save(figures.attention_maps(maps), out / "maps"))
    put(heads_table(facts).write(out / "heads"))
    if matrices:
        found = {name: rank_table(run, matrices=matrices, length=length) for name, run in named.items()}
        put(figures.save(figures.rank_histograms(found), out / "ranks"))
    model = runs[0].config.model
    linear = model.attention in ("linear", "mlk", "smlk")
    heads = (2, 4, 8, 16)
    curves = cost_curves(
        ("linear", "mlk", "smlk") if linear else ("softmax", "mgk", "smgk"),
        heads=heads,
        head_dim=model.head_dim or model.width // model.heads,
        width=model.width,
        hidden=model.hidden,
        layers=model.layers,
        length=getattr(model, "max_length", length),
        causal=runs[0].config.kind == "language",
    )
    put(figures.save(figures.costs(curves, heads=heads), out / "costs"))
    results = {name: result for name, run in named.items() if (result := _result(run))}
    if results:
        put(figures.save(figures.bars(_techniques(results)), out / "techniques"))
        put(results_table(results).write(out / "results"))
    return written


def heads_table(facts: dict[str, list[Summary]]) -> Table:
    """How much the heads of each layer differ, and what the components are good for."""
    header = ["model", "layer", "entropy", "different heads", "mean overlap", "components used", "least needed"]
    rows = []
    for name, layers in facts.items():
        for index, s in enumerate(layers):
            count = len(s.overlap)
            apart = (s.overlap.sum() - s.overlap.trace()) / max(1, count * (count - 1))
            mixture = s.share.shape[1] > 1
            rows.append(
                [
                    name,
                    str(index + 1),
                    f"{s.entropy.mean():.2f}",
                    f"{s.effective_heads:.2f} of {count}",
                    f"{apart:.3f}" if count > 1 else "-",
                    f"{s.effective_components.mean():.2f}" if mixture else "-",
                    f"{s.removal.min():.3f}" if mixture else "-",
                ]
            )
    return Table(header, rows, "Heads and components on one example")


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """What each run scored, and what it cost."""
    metrics = list(dict.fromkeys(name for result in results.values() for name in result["test"]))
    header = ["model", *(f"test {name}" for name in metrics), "parameters", "ms/step"]
    rows = [
        [
            name,
            *(_score(metric, result["test"].get(metric)) for metric in metrics),
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
    """The models of some runs on one input, side by side."""
    models = []
    for name, run in _named(runs).items():
        given = run.of_split(index, length=length) if text is None else run.of_text(text, length)
        note = f"{run.config.recipe}, {run.parameters:,} parameters"
        models.append(Model.of_layers(name, given.tokens, run.layers(given), note=note, unseen=given.unseen))
    return page(models, title=title, report=report, progress=progress)


def comparison_page(folder: str | Path, *, text: str | None = None, data_root: Path | None = None) -> Page:
    """The report of `mgk compare`: its table, curves and costs, then the first seed's models side by side."""
    folder = Path(folder)
    table = folder / "comparison.json"
    if not table.exists():
        raise ValueError(f"{folder}: expected the folder of a comparison (mgk compare), found no {table.name} in it")
    found = json.loads(table.read_text(encoding="utf-8"))
    firsts = [sorted((folder / row["attention"].replace(":", "-")).glob("seed-*")) for row in found["rows"]]
    runs = [Run.open(seeds[0], data_root=data_root) for seeds in firsts if seeds]
    blocks: list[Block] = [_comparison_table(found)]
    named = _named(runs)
    for event, metric in (("train", "loss"), ("valid", "accuracy"), ("valid", "perplexity")):
        lines = [Series(name, *run.curve(event, metric)) for name, run in named.items()]
        if any(line.x for line in lines):
            blocks.append(Chart(lines, f"{event.capitalize()} {metric}", "step", metric, log_y=metric == "perplexity"))
    for key, label in (("flops", "FLOPs of an example"), ("parameters", "Parameters")):
        points = [Series(row["attention"], [_heads(row)], [row[key]]) for row in found["rows"]]
        blocks.append(Chart(points, label, "heads", label))
    recipe = runs[0].config.recipe if runs else folder.name
    return explore_page(runs, text=text, title=f"Comparison on {recipe}", report=blocks)


def _comparison_table(found: dict[str, Any]) -> PageTable:
    header = ["attention", f"test {found['metric']}", "seeds", "parameters", "GFLOPs", "ms/step", "peak MiB"]
    rows = [
        [
            row["attention"],
            f"{row['mean']:.2f}" + (f" ± {row['interval']:.2f}" if len(row["scores"]) > 1 else ""),
            str(len(row["scores"])),
            f"{row['parameters']:,}",
            f"{row['flops'] / 1e9:.3g}",
            f"{1000 * row['seconds_per_step']:.1f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in found["rows"]
    ]
    return PageTable(header, rows, "Results")


def _heads(row: dict[str, Any]) -> float:
    return float(row["attention"].split(":")[1])


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by names that differ: with the seed, then the folder, where two are of the same kind."""
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    names: dict[str, Run] = {}
    for run in runs:
        for name in (run.name, f"{run.name}, seed {run.config.seed}", f"{run.name}, {run.folder}"):
            if name not in names:
                names[name] = run
                break
    return names


def _result(run: Run) -> dict[str, Any] | None:
    path = run.folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _techniques(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    for name, result in results.items():
        for metric in ("accuracy", "perplexity"):
            if metric in result["test"]:
                scale = 100 if metric == "accuracy" else 1
                panels.setdefault(f"test {metric}{' %' if scale > 1 else ''}", {})[name] = (
                    scale * result["test"][metric],
                    0,
                )
        panels.setdefault("parameters", {})[name] = (result["parameters"], 0)
    return panels


def _score(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.4g}"
