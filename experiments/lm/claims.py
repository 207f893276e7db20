"""The verdicts of the study, by the rules of experiments/PLAN.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.lm.grid import FULL, HALF, MAIN, Record, Row
from experiments.lm.noise import SMALLEST
from experiments.lm.tasks import CONTEXTS, MODERN
from mgk.intervals import difference

Verdict = Literal["better", "worse", "equal", "undecided", "not judged", "not enough data"]
POINTS = 0.5  # a difference of BLEU or of accuracy in percent that counts as none
NOT_JUDGED = (
    "small",
    *(f"{name}-{kind}" for name in MODERN for kind in ("modern", "pretrained")),
    *(f"context-{length}" for length in CONTEXTS[1:]),
)  # one or two seeds
Table = Mapping[tuple[str, Row], Sequence[Record]]


@dataclass(frozen=True)
class Comparison:
    """A row and its rival on one task, and the claim that they decide."""

    claim: str
    task: str
    row: Row
    rival: Row

    @property
    def name(self) -> str:
        """E.g. "sMGK 4 against softmax 8", with the task if it is not the main one."""
        where = "" if self.task == "nano" else f"{self.task}: "
        return f"{where}{self.row.label} against {self.rival.label}"

    @property
    def least(self) -> int:
        """Seeds of each row below which nothing is judged."""
        return 2 if self.task == "nano" and self.row in MAIN and self.rival in MAIN else 3


@dataclass(frozen=True)
class Finding:
    """What the records say about a comparison. A gain is positive if the row is better than its rival."""

    comparison: Comparison
    verdict: Verdict
    seeds: tuple[int, int]
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    points: bool = False
    """Whether the gain is in points, not a share of the rival's mean."""

    @property
    def margin(self) -> float:
        return POINTS if self.points else SMALLEST

    @property
    def comparable(self) -> bool:
        """Better, equal, or worse by less than the margin at the lower end of the interval."""
        return self.low is not None and self.low > -self.margin

    @property
    def effect(self) -> str:
        """E.g. "+0.21% (-0.05% to +0.47%)"."""
        if self.gain is None:
            return "-"
        if self.low is None or self.high is None:
            return self._text(self.gain)
        return f"{self._text(self.gain)} ({self._text(self.low)} to {self._text(self.high)})"

    def _text(self, value: float) -> str:
        return f"{value:+.2f}" if self.points else f"{value:+.2%}"


def comparisons() -> list[Comparison]:
    """Return all comparisons, in the order of the plan."""
    softmax4, smgk8, mgk4, mgk8 = Row("softmax", 4), Row("smgk", 8), Row("mgk", 4), Row("mgk", 8)
    wide, grouped = Row("softmax", 4, head_dim=128), Row("softmax", 8, 4)
    pairs: dict[str, list[tuple[str, Row, Row]]] = {
        "half the heads are enough": [("nano", HALF, FULL), ("nano", mgk4, FULL)],
        "better at equal heads": [
            ("nano", HALF, softmax4), ("nano", smgk8, FULL), ("nano", Row("smgk", 4, head_dim=128), wide),
            ("nano", Row("smgk", 8, 4), grouped), ("nano", mgk4, softmax4), ("nano", mgk8, FULL),
        ],
        "better than the rivals of the same cost": [
            ("nano", HALF, wide), ("nano", HALF, grouped), ("nano", HALF, Row("softmax", 8, 2)),
            ("nano", Row("smgk", 8, 4), FULL),
        ],
        "own values help": [
            ("nano", Row("smgk", 4, option="own"), HALF), ("nano", Row("smgk", 4, option="own"), smgk8),
            ("nano", Row("mgk", 4, option="own"), mgk4),
        ],
        "what the parts do": [
            *(("nano", Row("smgk", 4, option=o), HALF) for o in ("m1", "m3", "m4", "hard", "em", "variance")),
            ("nano", Row("mlk", 4), Row("linear", 8)), ("nano", Row("smlk", 4), Row("linear", 8)),
        ],
        "QK-norm matters": [("plain", HALF, FULL), ("plain", HALF, softmax4), ("plain", smgk8, FULL)],
        "it holds at scale": [
            ("small", Row("smgk", 6), Row("softmax", 12)), ("small", Row("smgk", 6), Row("softmax", 12, 6)),
            ("small", Row("smgk", 12), Row("softmax", 12)),
        ],
        "translation": [
            ("multi30k", HALF, FULL), ("multi30k", mgk4, FULL), ("multi30k", Row("smgk", 2), softmax4),
        ],
        "it holds for longer contexts": [
            (task, row, FULL)
            for task in ("nano", *(f"context-{length}" for length in CONTEXTS[1:]))
            for row in (HALF, smgk8)
        ],
    }  # fmt: skip
    return [Comparison(claim, *pair) for claim, found in pairs.items() for pair in found]


def tabulate(records: Sequence[Record]) -> dict[tuple[str, Row], list[Record]]:
    """Group the records by task and row, in the order of their seeds; the sweep chose rates and is left out."""
    table: dict[tuple[str, Row], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.cell.seed):
        if record.cell.task != "sweep":
            table.setdefault((record.cell.task, record.row), []).append(record)
    return table


def scores(records: Sequence[Record]) -> list[float]:
    """Return the test scores as they are reported: bits per byte, accuracy in percent, or BLEU."""
    found = []
    for record in records:
        if record.cell.metric == "bleu":
            found += [float(record.values["test_bleu"])] if record.values.get("test_bleu") is not None else []
        else:
            found.append(record.test / float(record.values.get("bytes_per_token") or 1))
    return found


def judge(comparison: Comparison, table: Table) -> Finding:
    """Judge one comparison."""
    rows = [table.get((comparison.task, row), ()) for row in (comparison.row, comparison.rival)]
    ours, theirs = map(scores, rows)
    seeds = len(ours), len(theirs)
    if not ours or not theirs:
        return Finding(comparison, "not enough data", seeds)
    points = rows[0][0].cell.metric in ("accuracy", "bleu")
    unit = 1.0 if points else -statistics.mean(theirs)  # bits: less is better
    gain = (statistics.mean(ours) - statistics.mean(theirs)) / unit
    found = difference([value / unit for value in ours], [value / unit for value in theirs])
    low, high = (None, None) if found is None else (found.low, found.high)
    if comparison.task in NOT_JUDGED:
        return Finding(comparison, "not judged", seeds, gain, low, high, points)
    if found is None or min(seeds) < comparison.least:
        return Finding(comparison, "not enough data", seeds, gain, low, high, points)
    margin = POINTS if points else SMALLEST
    return Finding(comparison, verdict(found.low, found.high, margin), seeds, gain, low, high, points)


def verdict(low: float, high: float, margin: float) -> Verdict:
    """Return the verdict of an interval of a gain."""
    if low > 0:
        return "better"
    if high < 0:
        return "worse"
    return "equal" if low >= -margin and high <= margin else "undecided"


def findings(table: Table) -> list[Finding]:
    """Judge all comparisons."""
    return [judge(comparison, table) for comparison in comparisons()]
