"""The paper's claims, each with a verdict that follows from the records by a stated rule.

A comparison is of two rows on one task, over their seeds: "yes", "no", "within noise", or "not enough data" where a row
has less than two seeds. The verdict of a claim is the one that most of its comparisons with data have; of two that are
as frequent, the less favourable.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgk.reproduce.grid import LANGUAGE, LRA, PAIRS, TASKS, Row
from mgk.reproduce.intervals import difference, interval
from mgk.reproduce.paper import SAME, published
from mgk.reproduce.records import Record

Verdict = Literal["yes", "no", "within noise", "not enough data"]
SEVERITY: tuple[Verdict, ...] = ("no", "within noise", "yes")
PLATEAU = 25.0  # percent: ListOps sits at 17 to 20, and those that leave come to 30 and more
COMPARABLE = {"accuracy": 0.5, "perplexity": 0.01, "bits": 0.01}  # points; else shares of the baseline
FASTER = 0.02  # a share of the time that repeated runs differ by

Table = Mapping[str, Mapping[Row, Sequence[Record]]]


@dataclass(frozen=True)
class Comparison:
    what: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Claim:
    title: str
    rule: str
    comparisons: list[Comparison]

    @property
    def verdict(self) -> Verdict:
        counts: Counter[Verdict] = Counter(c.verdict for c in self.comparisons if c.verdict != "not enough data")
        if not counts:
            return "not enough data"
        return max(SEVERITY, key=lambda verdict: (counts[verdict], -SEVERITY.index(verdict)))


def claims(table: Table, timings: Sequence[dict[str, Any]] = ()) -> list[Claim]:
    """All claims; `table` holds the records by task and row, `timings` the rows of results/bench-cuda.json."""
    return [
        Claim(
            "Comparable or better at half the heads",
            "yes: the 95% interval of the gain lies above -0.5 points (-1% of perplexity or bits); no: it lies below "
            "0; else within noise. On ListOps the gain is that of the seeds that left the plateau, if both rows have "
            "two of them.",
            [compare(table, *pair, comparable) for pair in half_heads()],
        ),
        Claim(
            "Better at equal heads",
            "yes: the 95% interval of the gain lies above 0; no: below 0; else within noise.",
            [compare(table, *pair, better) for pair in equal_heads()],
        ),
        Claim(
            "Fewer parameters at half the heads",
            "yes: fewer than the baseline's; no: as many or more.",
            [cheaper(table, *pair, "parameters") for pair in half_heads()],
        ),
        Claim(
            "Fewer FLOPs at half the heads",
            "yes: fewer than the baseline's, forward and backward of the layers; no: as many or more.",
            [cheaper(table, *pair, "flops") for pair in half_heads()],
        ),
        Claim(
            "Faster in training at half the heads",
            "Time per step of cells that had one and the same kind of GPU to themselves. yes: at least 2% less; no: at "
            "least 2% more; else within noise.",
            [faster(table, *pair) for pair in half_heads()],
        ),
        Claim(
            "Faster in inference at half the heads",
            "Forward of the attention alone against the fastest kernel of PyTorch, from results/bench-cuda.json, by "
            "the same rule.",
            [timed(row) for row in timings],
        ),
        Claim(
            "Attention of higher rank at half the heads",
            "Mean rank of the attention matrices of the first 512 positions (256 in a language model). yes, no: the "
            "95% interval of the difference lies above or below 0.",
            [looked(table, *pair, rank) for pair in half_heads()],
        ),
        Claim(
            "Less redundant heads",
            "Effective number of different heads, as many heads each, by the same rule.",
            [looked(table, *pair, distinct) for pair in equal_heads() if pair[1].heads > 1],
        ),
        Claim(
            "MLK closes part of the gap from linear to softmax attention",
            "As many heads each. yes: softmax beats linear and so does the mixture, with 95% intervals above 0; no: "
            "the mixture is worse than linear; else within noise.",
            [gap(table, *pair) for pair in equal_heads() if pair[1].attention in ("mlk", "smlk")],
        ),
        Claim(
            "Our baselines are the paper's",
            "Of rows with three seeds. yes: the paper's mean lies in the 95% interval of ours; no: it does not. On "
            "ListOps the interval is that of the seeds on the paper's side of the plateau's edge.",
            [matches(table, task, Row(name, n)) for task in SAME for name in FAMILIES for n in (8, 4, 2, 1)],
        ),
    ]  # fmt: skip


Pair = tuple[str, Row, Row]  # task, mixture, baseline


def half_heads() -> Iterator[Pair]:
    for full, half in PAIRS:
        for baseline, mixtures in FAMILIES.items():
            for mixture in mixtures:
                tasks = (*LRA, *(LANGUAGE if (full, mixture) in ((8, "mgk"), (8, "smgk"), (8, "mlk")) else ()))
                yield from ((t, Row(mixture, half), Row(baseline, full)) for t in tasks if half and runs(t, full))


def equal_heads() -> Iterator[Pair]:
    for heads in (8, 4, 2, 1):
        for baseline, mixtures in FAMILIES.items():
            for mixture in mixtures:
                tasks = () if heads == 8 else LRA[:4]
                tasks = (*tasks, *(LANGUAGE if heads > 2 and mixture != "smlk" else ()))
                yield from ((task, Row(mixture, heads), Row(baseline, heads)) for task in tasks)


FAMILIES = {"softmax": ("smgk", "mgk"), "linear": ("smlk", "mlk")}


def runs(task: str, full: int) -> bool:
    return task != "listops-long" or full == 8


def left(record: Record) -> int | None:
    """The step at which a run left the plateau: the first evaluation above its edge. None if it never did."""
    steps, accuracy = record.curve("valid", "accuracy")
    return next((int(step) for step, value in zip(steps, accuracy, strict=True) if 100 * value > PLATEAU), None)


def scores(task: str, first: Sequence[Record], second: Sequence[Record]) -> tuple[list[float], list[float], str]:
    """What is compared of two rows, and which seeds that are."""
    if TASKS[task].plateau:
        a, b = ([record.test for record in row if left(record) is not None] for row in (first, second))
        if min(len(a), len(b)) >= 2:
            return a, b, f", of the {len(a)} and {len(b)} seeds that left the plateau"
    return [record.test for record in first], [record.test for record in second], ""


def compare(table: Table, task: str, mixture: Row, baseline: Row, judge: Callable[..., Verdict]) -> Comparison:
    what = f"{task}: {mixture.label} against {baseline.label}"
    ours, theirs, which = scores(task, *_both(table, task, mixture, baseline))
    sign = 1 if TASKS[task].metric == "accuracy" else -1
    found = difference([sign * value for value in ours], [sign * value for value in theirs])
    if found is None:
        return Comparison(what, "not enough data")
    scale = 1.0 if sign > 0 else statistics.mean(theirs)
    detail = f"gain {found.mean:+.3g} ({found.low:+.3g} to {found.high:+.3g}){which}"
    return Comparison(what, judge(found.low, found.high, COMPARABLE[TASKS[task].metric] * scale), detail)


def better(low: float, high: float, margin: float = 0.0) -> Verdict:
    return "yes" if low > 0 else "no" if high < 0 else "within noise"


def comparable(low: float, high: float, margin: float) -> Verdict:
    return "yes" if low > -margin else "no" if high < 0 else "within noise"


def cheaper(table: Table, task: str, mixture: Row, baseline: Row, what: str) -> Comparison:
    name = f"{task}: {mixture.label} against {baseline.label}"
    ours, theirs = _both(table, task, mixture, baseline)
    if not ours or not theirs:
        return Comparison(name, "not enough data")
    a, b = ours[0].values[what], theirs[0].values[what]
    shown = (f"{a:,}", f"{b:,}") if what == "parameters" else (f"{a / 1e9:.3g} G", f"{b / 1e9:.3g} G")
    return Comparison(name, "yes" if a < b else "no", f"{shown[0]} against {shown[1]}")


def faster(table: Table, task: str, mixture: Row, baseline: Row) -> Comparison:
    name = f"{task}: {mixture.label} against {baseline.label}"
    ours, theirs = ([r for r in row if r.values["jobs"] == 1] for row in _both(table, task, mixture, baseline))
    kinds = {r.values["gpu"] for r in ours} & {r.values["gpu"] for r in theirs} - {None}
    if not kinds:
        return Comparison(name, "not enough data")
    gpu = min(kinds)
    a, b = (
        statistics.median(r.values["seconds_per_step"] for r in row if r.values["gpu"] == gpu) for row in (ours, theirs)
    )
    return Comparison(name, speed(b / a), f"{1e3 * a:.2f} against {1e3 * b:.2f} ms, {gpu}")


def timed(row: dict[str, Any]) -> Comparison:
    batch, heads, length, width, causal = row["shape"]
    name = f"{row['method']}: B={batch} N={length} D={width}{' causal' if causal else ''}, {heads} heads halved"
    ratio = row["speedup"]["forward"]
    return Comparison(name, speed(ratio), f"{ratio:.2f} times as fast")


def speed(ratio: float) -> Verdict:
    return "yes" if ratio >= 1 + FASTER else "no" if ratio <= 1 - FASTER else "within noise"


def rank(record: Record) -> float:
    return float(statistics.mean(record.values["inside"]["rank"]))


def distinct(record: Record) -> float:
    return float(statistics.mean(record.values["inside"]["effective_heads"]))


def looked(table: Table, task: str, mixture: Row, baseline: Row, measure: Callable[[Record], float]) -> Comparison:
    name = f"{task}: {mixture.label} against {baseline.label}"
    ours, theirs = (
        [measure(r) for r in row if r.values.get("inside")] for row in _both(table, task, mixture, baseline)
    )
    found = difference(ours, theirs)
    if found is None:
        return Comparison(name, "not enough data")
    detail = (
        f"{statistics.mean(ours):.3g} against {statistics.mean(theirs):.3g} ({found.low:+.3g} to {found.high:+.3g})"
    )
    return Comparison(name, better(found.low, found.high), detail)


def gap(table: Table, task: str, mixture: Row, linear: Row) -> Comparison:
    softmax = Row("softmax", linear.heads)
    gain, whole = compare(table, task, mixture, linear, better), compare(table, task, softmax, linear, better)
    if "not enough data" in (gain.verdict, whole.verdict):
        return Comparison(gain.what, "not enough data")
    means = {
        row: statistics.mean(record.test for record in table[task][row]) for row in (mixture, linear, softmax)
    }  # over all seeds: a share needs one scale
    distance = means[softmax] - means[linear]
    share = f"{(means[mixture] - means[linear]) / distance:.0%} of the gap; " if distance else ""
    verdict: Verdict = gain.verdict if whole.verdict == "yes" or gain.verdict == "no" else "within noise"
    return Comparison(gain.what, verdict, f"{share}{gain.detail}")


def matches(table: Table, task: str, row: Row) -> Comparison:
    target = published(task, row)
    assert target is not None  # every row of Tables 1 and 2 has a number
    name = f"{task}: {row.label}"
    values = [record.test for record in table.get(task, {}).get(row, ())]
    if TASKS[task].plateau:
        values = [value for value in values if (value > PLATEAU) == (target > PLATEAU)]
    half = interval(values)
    if half is None or len(values) < 3:  # two seeds have an interval that holds everything
        return Comparison(name, "not enough data")
    mean = statistics.mean(values)
    detail = f"{mean:.2f} ± {half:.2f} ({len(values)} seeds), paper {target:.2f}"
    return Comparison(name, "yes" if abs(mean - target) <= half else "no", detail)


def _both(table: Table, task: str, first: Row, second: Row) -> tuple[Sequence[Record], Sequence[Record]]:
    rows = table.get(task, {})
    return rows.get(first, ()), rows.get(second, ())
