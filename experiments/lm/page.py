"""The page at the head of docs/results.md: what was asked, what holds, what does not, for a busy reader."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from experiments.cells.steps import Steps
from experiments.lm.claims import Finding, Table, findings, tabulate
from experiments.lm.costs import COSTS, beaten, frontier, points
from experiments.lm.grid import HALF, Record, Row
from experiments.lm.report import FIGURES
from mgk import tables

NAMES = {"parameters": "parameters", "time": "time of a training step", "flops": "FLOPs", "cache": "cache"}
SHOWN = ("time", "cache", "parameters")  # figures
RIVALS = (Row("softmax", 4, head_dim=128), Row("softmax", 8, 4), Row("softmax", 8, 2))
ASKED = """## What was asked

Is a language model of a given quality cheaper with mixture keys than with what one would use otherwise: fewer softmax
heads, wider ones, or grouped queries? {trainings} trainings were judged by rules that had been fixed before them
(`experiments/PLAN.md`). A verdict is about one comparison: its gain is the relative difference
of the test scores, positive if the first row is better, with a 95% interval over the seeds of both rows. All tables are
in [study.md](study.md).
"""
OLDER = """## Where the older rules say otherwise

The older trainings follow the paper's recipe and stop far from its end; their rules are below. Both verdicts stand.
"""


Older = Sequence[tuple[str, str, str]]


def page(records: Sequence[Record], steps: Steps = MappingProxyType({}), older: Older = ()) -> str:
    """Return the page; empty without records of the main rows.

    Args:
        records: all records of the study.
        steps: the content of results/lm/steps.json.
        older: comparison, verdict and numbers of the pooled language comparisons at half the heads by the older rules.
    """
    table = tabulate(records)
    found = [each for each in unique(findings(table)) if each.gain is not None]
    if not found:
        return ""
    holds = [f for f in found if f.verdict in ("better", "equal")]
    fails = [f for f in found if f.verdict == "worse"]
    open_ = [f for f in found if f not in holds and f not in fails]
    parts = [headline(table, steps), ASKED.format(trainings=len(records))]
    for title, some in (("What holds", holds), ("What does not", fails), ("What is open", open_)):
        parts += [f"## {title}\n", "\n".join(map(line, some)) + "\n" if some else "Nothing.\n"]
    figures = [name for name in SHOWN if len(points(name, table, steps)) > 1]
    parts += [f"![Bits per byte against {COSTS[name]}]({FIGURES}/study-{name}.svg)\n" for name in figures]
    if differ := different(found, older):
        parts += [OLDER, differ]
    return "\n".join(parts)


def unique(found: Sequence[Finding]) -> list[Finding]:
    """Leave out a comparison that another claim has, too."""
    return list({(f.comparison.task, f.comparison.row, f.comparison.rival): f for f in reversed(found)}.values())[::-1]


def line(found: Finding) -> str:
    """Return one line of a list: the comparison, its verdict, effect and seeds."""
    small = ", a loss below the margin" if found.verdict == "worse" and found.comparable else ""
    return (
        f"- {found.comparison.name}: **{found.verdict}**{small}, {found.effect}; "
        f"seeds: {found.seeds[0]} and {found.seeds[1]}."
    )


def headline(table: Table, steps: Steps) -> str:
    """Say in one sentence at which costs sMGK with 4 heads is on the frontier, and at which a rival beats it."""
    found = {name: points(name, table, steps) for name in COSTS}
    measured = {name: rows for name, rows in found.items() if any(point.row == HALF for point in rows)}
    if not measured:
        return f"**{HALF.label} has no records yet.**\n"
    ahead, behind = [], []
    for name, rows in measured.items():
        winners = [row.label for row in beaten(rows, table).get(HALF, []) if row in RIVALS]
        behind += [f"{NAMES[name]} (by {', '.join(winners)})"] if winners else []
        ahead += [NAMES[name]] if any(point.row == HALF for point in frontier(rows)) else []
    if len(behind) == len(COSTS):
        what = "beaten by a softmax row that costs no more, at all four costs"
        return f"**{HALF.label} is {what}**: {'; '.join(behind)}.\n"
    text = f"**{HALF.label} is on the Pareto frontier of {join(ahead) if ahead else 'no cost'}"
    more = f"; a wide or grouped softmax row that costs no more beats it at {'; '.join(behind)}" if behind else ""
    return f"{text}{more}.**\n"


def join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def different(found: Sequence[Finding], older: Older) -> str:
    """Return a table of the comparisons at half the heads whose verdict by the older rules is another."""
    now = {f.comparison.name: f for f in found if f.comparison.claim.startswith("half the heads")}
    lines = []
    for name, verdict, numbers in older:
        short = name.split(": ", 1)[-1]
        if short in now and (verdict == "yes") != now[short].comparable:
            lines.append([short, f"{verdict}: {numbers}", f"{now[short].verdict}: {now[short].effect}"])
    header = ["half the heads", "older rules", "the study"]
    return tables.Table(header, lines, left=(0, 1, 2)).markdown() if lines else ""
