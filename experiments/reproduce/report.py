"""docs/results.md from the records, and from nothing else: the same records give the same text."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.reproduce.claims import FAMILIES, PLATEAU, Claim, Verdict, claims, left
from experiments.reproduce.grid import GROUPS, MEANING, TASKS, Cell, Row, rows, tasks_of
from experiments.reproduce.paper import SAME, published
from experiments.reproduce.records import Record, command
from experiments.reproduce.steps import Steps
from mgk.intervals import interval
from mgk.tables import Table
from mgk.variants import LABELS

DIGITS = {"accuracy": 2, "perplexity": 2, "bits": 4}
UNITS = {"accuracy": "test accuracy %", "perplexity": "test perplexity", "bits": "test bits per byte"}
FIGURES = "figures"  # beside the report
HEAD = """# Results

Written by `python -m experiments.reproduce figures` from the records in `results/cells`, one for each training; do not
edit. `python -m experiments.reproduce --check` verifies that this page follows from them. A mean stands with half of
its 95% confidence interval (Student's t over seeds); a seed decides the initial weights,
the order of the data and dropout, and the test set is the same for all. Any record is computed again with the command
in it, e.g.
`{command}`.
"""
HEADLINE = "What says most, because it compares most at once (the rules are below):"
RULES = """A comparison is of two rows on one task, over their seeds (Welch's t, not paired); with less than two seeds
in a row there is not enough data, but one is enough for parameters, FLOPs and times. Some compare more at once: all
pairs of mixtures and baselines of one task, by the mean of their gains, and two rows over language tasks, with the
scatter between tasks, so that one seed of each will do. The verdict of a claim is the median of its comparisons with
data, from no over within noise to yes: what more than half of them say, if so many agree. Of two in the middle it is
the less favourable. Language tasks are taken as independent, though some share their text. Not all of this was settled
beforehand: the comparisons of more at once, those on the short runs, and the allowance for ListOps' test set came after
the first results had been seen.
"""
COSTS = """![FLOPs and parameters of softmax, MGK and sMGK against heads](figures/costs-softmax.svg)

![FLOPs and parameters of linear, MLK and sMLK against heads](figures/costs-linear.svg)

FLOPs and parameters of the layers against the heads of the baseline, the mixtures with half of them (Figures 3 and 7).
"""
INSIDE = """Ranks of attention matrices, and the share of its heads that a layer would need if they were all different,
after training; means over inputs, heads and seeds. Few heads differ more easily than many: the claim below is about as
many each. `mgk figures RUN ...` draws the histograms of single runs.
"""
MAPS = """Attention maps of the first seed on one test input, heads across and layers down (of 16 layers every fifth),
pooled to at most 64 x 64 blocks. Colours go to the weight that three rows in four stay below, map by map: one that is
dark all over attends to everything alike, and upright stripes are keys that all queries look at.
"""
TITLES = {
    "table1": "Table 1: softmax, sMGK and MGK on the Long Range Arena",
    "table2": "Table 2: linear, sMLK and MLK on the Long Range Arena",
    "table3": "Table 3: language modelling",
    "table4": "Table 4: how the mixture is learned, one head",
    "checkpoints": "How often the checkpoint is chosen",
    "ablations": "Ablations",
}
NOTES = {
    "table3": "No WikiText-103: its training text is not among our data. Short runs, too: the paper's models saw "
    "12,288 million tokens. So the paper's perplexities are not comparable, and stand here for their order alone.",
    "ablations": "Short runs of one length, M = 2 where nothing else is said. Keys mixed before the feature map are "
    "those of linear attention, parametrised in another way.",
}

SELDOM = TASKS["text"].config.eval_every
CURVES = ("table1", "table2", "table3")  # tables whose first rows are drawn

Rows = Mapping[Row, Sequence[Record]]


def tabulate(records: Sequence[Record]) -> dict[str, dict[Row, list[Record]]]:
    """Records by task and row, seeds in order."""
    table: dict[str, dict[Row, list[Record]]] = {}
    for record in sorted(records, key=lambda record: record.cell.seed):
        table.setdefault(record.cell.task, {}).setdefault(record.row, []).append(record)
    return table


def report(
    records: Sequence[Record], timings: Sequence[dict[str, Any]] = (), steps: Steps = MappingProxyType({})
) -> str:
    """The page."""
    table = tabulate(records)
    example = records[0].cell if records else Cell("listops", Row("smgk", 4), 0)
    found = claims(table, timings, steps)
    parts = [HEAD.format(command=command(example)), "## The paper's claims\n", summary(found), *headline(found)]
    for target, title in TITLES.items():
        parts += [f"## {title}\n", *([NOTES[target] + "\n"] if target in NOTES else [])]
        shown = [section(target, task, table[task]) for task in tasks_of(target) if task in table]
        parts += [part for part in shown if part] or ["No records yet.\n"]
    parts += ["## What it costs\n", *([costs(table, steps)] if table else []), COSTS]
    if table:
        parts += ["## Training curves\n", *map(picture, drawn(table))]
    if seen := looked_into(table):
        parts += ["## Inside the attention\n", INSIDE, *map(inside_picture, seen)]
        if maps := mapped(table):
            parts += [MAPS, *map(map_picture, maps)]
    parts += ["## How each claim fared\n", RULES, *map(verdict, found)]
    parts += ["## Where the numbers come from\n", provenance(records)]
    return "\n".join(parts)


def summary(found: Sequence[Claim]) -> str:
    """All claims at a glance."""
    kinds: tuple[Verdict, ...] = ("yes", "no", "within noise", "not enough data")
    lines = []
    for claim in found:
        counts = Counter(comparison.verdict for comparison in claim.comparisons)
        lines.append([claim.title, claim.verdict, *(str(counts[kind]) for kind in kinds)])
    return Table(["claim", "verdict", *kinds], lines).markdown()


def headline(found: Sequence[Claim]) -> list[str]:
    """Of the comparisons those that compare most at once."""
    lines = [[claim.title, c.what, c.verdict, c.detail] for claim in found for c in claim.comparisons if c.pooled]
    if not lines:
        return []
    return [f"{HEADLINE}\n", Table(["claim", "comparison", "verdict", "numbers"], lines).markdown()]


def verdict(claim: Claim) -> str:
    """A claim, its rule, and the comparisons that have data, be it too little to judge by."""
    shown = [c for c in claim.comparisons if c.detail]
    missing = len(claim.comparisons) - len(shown)
    lines = [f"### {claim.title}: {claim.verdict}\n", f"{claim.rule}\n"]
    if shown:
        body = [[c.what, c.verdict, c.detail] for c in shown]
        lines.append(Table(["comparison", "verdict", "numbers"], body).markdown())
    if missing:
        lines.append(f"Comparisons without data: {missing}.\n")
    return "\n".join(lines)


def section(target: str, task: str, found: Rows) -> str:
    """One task of one table."""
    listed = [row for row in rows(target) if row in found]
    if not listed:
        return ""
    what = TASKS[task]
    header = ["model", *(["setting"] if target in ("table4", "ablations") else [])]
    paper = any(published(task, row) is not None for row in listed)
    header += [*([paper_head(task)] if paper else []), UNITS[what.metric], "seeds"]
    header += [
        *(["sliding window"] if what.sliding else []),
        *(["left the plateau", "at step", "mean of those"] * what.plateau),
        *([f"best of every {SELDOM:,} steps"] * (task == "text-often")),
    ]
    lines = [line(target, task, row, found[row], paper) for row in listed]
    budget = f" {what.tokens / 1e6:.0f} million tokens of training for every model." if what.tokens else ""
    notes = f"{what.note}{budget}\n"
    if what.plateau:
        notes = notes[:-1] + f" A seed has left the plateau when its validation accuracy exceeds {PLATEAU:.0f}%.\n"
    return "\n".join([f"### {task}\n", notes, Table([*header, "each seed"], lines).markdown()])


def paper_head(task: str) -> str:
    return "paper" if task.removesuffix("-often") in SAME else {
        "text-sound": "paper (dev = test)", "retrieval-rebuilt": "paper (LRA's pairs)",
    }.get(task, "paper (WikiText-103)")  # fmt: skip


def line(target: str, task: str, row: Row, found: Sequence[Record], paper: bool) -> list[str]:
    what = TASKS[task]
    digits = DIGITS[what.metric]
    values = [record.test for record in found]
    result = [f"{LABELS[row.attention]} {row.heads}"]
    result += [MEANING[row.option] if row.attention not in ("softmax", "linear") else "-"] * (
        target in ("table4", "ablations")
    )
    target_value = published(task, row)
    result += ["-" if target_value is None else f"{target_value:.2f}"] * paper
    result += [mean(values, digits), str(len(values))]
    if what.sliding:
        sliding = [record.values["test_sliding"] for record in found if record.values.get("test_sliding") is not None]
        result.append(mean(sliding, digits))
    if what.plateau:
        steps = [(step, record.test) for record in found if (step := left(record)) is not None]
        when = [step for step, _ in steps]
        result.append(f"{len(steps)} of {len(found)}")
        result.append(f"{statistics.median(when):,.0f} ({min(when):,} to {max(when):,})" if when else "-")
        result.append(mean([value for _, value in steps], digits))
    if task == "text-often":
        result.append(mean([seldom(record) for record in found], digits))
    return [*result, " ".join(f"{value:.{digits}f}" for value in values)]


def seldom(record: Record) -> float:
    """The best accuracy there would have been, in percent, had the run been validated as seldom as `text` is."""
    steps, accuracies = record.curve("valid", "accuracy")
    return 100 * max(value for step, value in zip(steps, accuracies, strict=True) if step % SELDOM == 0)


def mean(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    half = interval(values)
    return f"{statistics.mean(values):.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def costs(table: Mapping[str, Rows], steps: Steps) -> str:
    """Parameters, FLOPs, time and memory of every row."""
    lines = []
    for task in TASKS:
        for row, found in sorted(table.get(task, {}).items()):
            seconds = steps[task]["rows"].get(row.name) if task in steps else None
            lines.append(
                [
                    task,
                    row.label,
                    f"{found[0].values['parameters']:,}",
                    f"{found[0].values['flops'] / 1e9:.3g}",
                    "-" if seconds is None else f"{1e3 * seconds:.2f}",
                    f"{max(record.values['peak_bytes'] for record in found) / 2**20:,.0f}",
                ]
            )
    note = (
        "GFLOPs are those of one example of full length, forward and backward of the layers. A step is timed with the "
        "GPU to itself, by `python -m experiments.reproduce steps`; the trainings ran side by side.\n"
    )
    header = ["task", "model", "parameters", "GFLOPs", "ms/step", "peak MiB"]
    return note + "\n" + Table(header, lines).markdown()


def drawn(table: Mapping[str, Rows]) -> list[tuple[str, str]]:
    """The figures of curves: family and task, where there is something to draw."""
    pairs = [(target, task) for target in CURVES for task in tasks_of(target) if task in table]
    return [(target, task) for target, task in pairs if first_rows(target, table[task])]


def first_rows(target: str, found: Rows) -> list[Row]:
    """The rows that a figure overlays: the first group of the table."""
    return [row for row in GROUPS[target][0][1] if row in found]


def looked_into(table: Mapping[str, Rows]) -> list[str]:
    """Tasks with a figure of ranks: those with rows to compare whose attention was looked into."""
    curved = {task for target in CURVES for task in tasks_of(target)}
    return [task for task in TASKS if task in curved & table.keys() and compared_rows(table[task])]


def compared_rows(found: Rows) -> list[Row]:
    """The first rows of Tables 1 to 3 that have ranks."""
    listed = dict.fromkeys(row for target in CURVES for row in first_rows(target, found))
    return [row for row in listed if any(record.values.get("inside") for record in found[row])]


def mapped(table: Mapping[str, Rows]) -> dict[tuple[str, str], dict[Row, Mapping[str, Any]]]:
    """What there is of maps, by task and baseline: of each row that is compared, one look inside."""
    found: dict[tuple[str, str], dict[Row, Mapping[str, Any]]] = {}
    for task, (baseline, mixtures) in product(looked_into(table), FAMILIES.items()):
        for row in compared_rows(table[task]):
            looks = [look for record in table[task][row] if "maps" in (look := record.values.get("inside") or {})]
            if looks and row.attention in (baseline, *mixtures):
                found.setdefault((task, baseline), {})[row] = looks[0]
    return found


def picture(of: tuple[str, str]) -> str:
    target, task = of
    return (
        f"![Training loss and validation score on {task}, rows of {target}]({FIGURES}/{target}-{task}.svg)\n\n"
        f"{task}, the first rows of {TITLES[target].partition(':')[0]}, every seed of each.\n"
    )


def inside_picture(task: str) -> str:
    return f"![Rank of attention and effective heads by layer on {task}]({FIGURES}/ranks-{task}.svg)\n\n{task}.\n"


def map_picture(of: tuple[str, str]) -> str:
    task, baseline = of
    return f"![Attention maps on {task}, {baseline} and mixtures]({FIGURES}/maps-{task}-{baseline}.svg)\n\n{task}.\n"


def provenance(records: Sequence[Record]) -> str:
    """GPUs, versions, commits and data of all records, and how many each made."""
    if not records:
        return "No records yet.\n"

    def count(values: list[str]) -> str:
        return "; ".join(f"{value} ({number})" for value, number in sorted(Counter(values).items()))

    versions = [
        ", ".join(
            f"{name} {each.values['versions'][name]}" for name in ("torch", "triton") if name in each.values["versions"]
        )
        for each in records
    ]
    data = [f"{each.values['data']['name']} {each.values['data']['digest'][:12]}" for each in records]
    return "\n".join(
        [
            f"- records: {len(records)}",
            f"- GPU: {count([str(each.values['gpu'] or 'none') for each in records])}",
            f"- versions: {count(versions)}",
            f"- commits: {count([each.values['commit'] for each in records])}",
            f"- data: {count(data)}\n",
        ]
    )


def read_timings(path: Path) -> list[dict[str, Any]]:
    """The attention's times of `mgk bench --device cuda`, where there are any."""
    return list(json.loads(path.read_text()).get("operators", [])) if path.exists() else []
