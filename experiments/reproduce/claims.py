"""The paper's claims, each with a verdict that follows from the records by a stated rule.

A comparison is between two rows on one task, over their seeds. It ends in "yes", "no", "within noise", or "not enough
data" if a row has fewer than two seeds. Pooled comparisons take all pairs of a task, or two rows over all language
tasks. The verdict of a claim is the median of its comparisons that have data, in the order "no", "within noise", "yes".
If two verdicts are in the middle, it is the less favourable one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from experiments.cells.steps import Steps
from experiments.reproduce.grid import LANGUAGE, LRA, PAIRS, SHORT, TASKS, Record, Row, rows_on
from experiments.reproduce.paper import SAME, SEEDS, published
from mgk.intervals import NORMAL, Contrast, contrast, difference, interval

Verdict = Literal["yes", "no", "within noise", "not enough data"]
SEVERITY: tuple[Verdict, ...] = ("no", "within noise", "yes")
PLATEAU = 25.0  # percent; on ListOps runs stay at 17 to 20 for a long time, then rise to 30 and more
MARGINS = {"accuracy": 0.5, "perplexity": 0.01, "bits": 0.01}  # a loss that counts as comparable: points, or shares
ON_LISTOPS = (
    "On ListOps only seeds that left the plateau are compared, if both rows have at least two of them; otherwise all "
    "seeds are. If no seed of either row left it, the verdict is within noise."
)
TEST_EXAMPLES = 2000  # in the test set of ListOps, which is not the paper's
FASTER = 0.02  # smaller differences of time are within noise: repeated runs differ by as much

Table = Mapping[str, Mapping[Row, Sequence[Record]]]


@dataclass(frozen=True)
class Comparison:
    """Two rows, or several pairs of rows, and what follows from their records."""

    what: str
    verdict: Verdict
    detail: str = ""
    pooled: bool = False
    """Whether it is over several tasks or pairs."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the rule by which it is judged, and its comparisons."""

    title: str
    rule: str
    comparisons: list[Comparison]

    @property
    def verdict(self) -> Verdict:
        found = [SEVERITY.index(c.verdict) for c in self.comparisons if c.verdict != "not enough data"]
        return SEVERITY[statistics.median_low(found)] if found else "not enough data"


def claims(table: Table, timings: Sequence[dict[str, Any]] = (), steps: Steps = MappingProxyType({})) -> list[Claim]:
    """Judge all claims.

    Args:
        table: the records by task and row.
        timings: the rows of results/bench-cuda.json.
        steps: the content of results/steps.json.
    """
    return [*quality_claims(table), *cost_claims(table, timings, steps), *other_claims(table)]


def quality_claims(table: Table) -> list[Claim]:
    """Judge the claims about test scores."""
    return [
        Claim(
            "Comparable or better at half the heads",
            "yes: the 95% interval of the gain lies above -0.5 points (-1% of perplexity or bits); no: it lies below "
            f"0; otherwise within noise. {ON_LISTOPS}",
            judge_all(table, half_heads(), comparable),
        ),
        Claim(
            "Better at equal heads",
            f"yes: the 95% interval of the gain lies above 0; no: below 0; otherwise within noise. {ON_LISTOPS}",
            judge_all(table, equal_heads(), better),
        ),
    ]


def cost_claims(table: Table, timings: Sequence[dict[str, Any]], steps: Steps) -> list[Claim]:
    """Judge the claims about parameters, FLOPs and time."""
    return [
        Claim(
            "Fewer parameters at half the heads",
            "yes: fewer than the baseline; no: as many or more.",
            [cheaper(table, pair, "parameters") for pair in half_heads()],
        ),
        Claim(
            "Fewer FLOPs at half the heads",
            "yes: fewer than the baseline, forward and backward of the layers; no: as many or more.",
            [cheaper(table, pair, "flops") for pair in half_heads()],
        ),
        Claim(
            "Faster in training at half the heads",
            "Time per training step. Rows are timed one after the other, each alone on the GPU "
            "(`python -m experiments.reproduce steps`, results/steps.json). "
            "yes: at least 2% less; no: at least 2% more; otherwise within noise.",
            [faster(steps, pair) for pair in half_heads()],
        ),
        Claim(
            "Faster in inference at half the heads",
            "Forward pass of attention alone against the fastest kernel of PyTorch, from results/bench-cuda.json, by "
            "the same rule.",
            [timed(row) for row in timings if "speedup" in row],  # wrong results are not timed
        ),
    ]


def other_claims(table: Table) -> list[Claim]:
    """Judge the claims about attention matrices and about linear attention, and compare our baselines."""
    return [
        Claim(
            "Attention of higher rank at half the heads",
            "Mean rank of the attention matrices over the first 512 positions (256 in a language model). yes or no: "
            "the 95% interval of the difference lies above or below 0.",
            [compare_inside(table, pair, "rank") for pair in half_heads()],
        ),
        Claim(
            "Less redundant heads",
            "Effective number of different heads, at equal numbers of heads, by the same rule.",
            [compare_inside(table, pair, "effective_heads") for pair in equal_heads() if pair[1].heads > 1],
        ),
        Claim(
            "MLK closes part of the gap from linear to softmax attention",
            "At equal heads, on tasks where softmax is better than linear with a 95% interval above 0; elsewhere there "
            "is no gap to close. yes: the mixture is better than linear, too; no: it is worse; otherwise within noise.",
            [gap(table, pair) for pair in equal_heads() if pair[1].attention in ("mlk", "smlk")],
        ),
        Claim(
            "Our baselines agree with the paper's",
            "For rows with three seeds or more. yes: the 95% interval of the difference to the paper's mean contains "
            "0; no: it does not. The paper's mean is over five seeds, which are assumed to vary as ours do. On ListOps "
            "our mean is over the seeds on the same side of the plateau's edge as the paper's value; without any, "
            f"the verdict is no. Our test set there is not the paper's, but {TEST_EXAMPLES:,} other examples of the "
            "same procedure; the interval includes the sampling error of both. Where we also validated as often as the "
            "paper, that result is given too.",
            [matches(table, task, Row(name, n)) for task in SAME for name in FAMILIES for n in (8, 4, 2, 1)],
        ),
    ]


Pair = tuple[str, Row, Row]  # task, mixture, baseline


def half_heads() -> Iterator[Pair]:
    """Yield mixtures with half the heads of their baselines."""
    return comparable_rows((full, half) for full, half in PAIRS if half)


def equal_heads() -> Iterator[Pair]:
    """Yield mixtures with as many heads as their baselines."""
    return comparable_rows((full, full) for full, _ in PAIRS)


def comparable_rows(heads: Iterable[tuple[int, int]]) -> Iterator[Pair]:
    """Yield the pairs with these heads of baseline and mixture, on every task whose grid has both rows."""
    there = {task: rows_on(task) for task in (*LRA, *LANGUAGE, *SHORT)}
    for full, own in heads:
        for baseline, mixtures in FAMILIES.items():
            for mixture in mixtures:
                pair = Row(mixture, own), Row(baseline, full)
                yield from ((task, *pair) for task, rows in there.items() if rows.issuperset(pair))


FAMILIES = {"softmax": ("smgk", "mgk"), "linear": ("smlk", "mlk")}


def left(record: Record) -> int | None:
    """Return the step at which a run left the plateau, its first validation above the edge; None if it never did."""
    steps, accuracy = record.curve("valid", "accuracy")
    return next((int(step) for step, value in zip(steps, accuracy, strict=True) if 100 * value > PLATEAU), None)


@dataclass(frozen=True)
class Scores:
    """The test scores of two rows that are compared."""

    first: list[float]
    second: list[float]
    which: str = ""
    """Which seeds they are of, where not all left the plateau."""
    stuck: bool = False
    """Whether no seed left the plateau."""


def scores(task: str, first: Sequence[Record], second: Sequence[Record]) -> Scores:
    """Select the seeds to compare. On ListOps those that left the plateau, if both rows have at least two."""
    a, b = ([record.test for record in row] for row in (first, second))
    if not TASKS[task].plateau:
        return Scores(a, b)
    gone_a, gone_b = ([record.test for record in row if left(record) is not None] for row in (first, second))
    share = f"{len(gone_a)} of {len(a)} and {len(gone_b)} of {len(b)}"
    if min(len(gone_a), len(gone_b)) >= 2:
        return Scores(gone_a, gone_b, f", of the {share} seeds that left the plateau")
    return Scores(a, b, f", of all seeds; {share} left the plateau", stuck=not gone_a and not gone_b)


def judge_all(table: Table, pairs: Iterable[Pair], judge: Callable[..., Verdict]) -> list[Comparison]:
    """Return the pooled comparisons, over language tasks and over the pairs of a task, then those of single pairs."""
    single = list(pairs)
    rows: dict[tuple[Row, Row], list[str]] = {}
    families: dict[tuple[str, str], list[Pair]] = {}
    for task, mixture, baseline in single:
        if TASKS[task].metric != "accuracy":
            rows.setdefault((mixture, baseline), []).append(task)
        families.setdefault((task, baseline.attention), []).append((task, mixture, baseline))
    pooled = [over_tasks(table, tasks, *pair, judge) for pair, tasks in rows.items()]
    pooled += [together(table, task, group, judge) for (task, _), group in families.items()]
    return [*(one for one in pooled if one is not None), *(compare(table, pair, judge) for pair in single)]


def over_tasks(
    table: Table, tasks: Sequence[str], mixture: Row, baseline: Row, judge: Callable[..., Verdict]
) -> Comparison | None:
    """Judge the mean gain, as a share of perplexity or bits, over at least three tasks. One seed of each is enough."""
    both = [records_of(table, (task, mixture, baseline)) for task in tasks]
    means = [[statistics.mean(record.test for record in row) for row in pair] for pair in both if all(pair)]
    gains = [1 - ours / theirs for ours, theirs in means]
    half = interval(gains)
    if half is None or len(gains) < 3:
        return None
    mean = statistics.mean(gains)
    detail = f"gain {mean:+.1%} ({mean - half:+.1%} to {mean + half:+.1%})"
    name = f"{len(gains)} language tasks: {mixture.label} against {baseline.label}"
    return Comparison(name, judge(mean - half, mean + half, MARGINS["bits"]), detail, pooled=True)


def together(table: Table, task: str, pairs: Sequence[Pair], judge: Callable[..., Verdict]) -> Comparison | None:
    """Judge the mean gain of all pairs, as one contrast of rows, since two mixtures may share a baseline."""
    sign = 1 if TASKS[task].metric == "accuracy" else -1
    rows = {
        row: [sign * r.test for r in table.get(task, {}).get(row, ()) if not TASKS[task].plateau or left(r) is not None]
        for _, *both in pairs
        for row in both
    }
    pairs = [pair for pair in pairs if min(len(rows[row]) for row in pair[1:]) >= 2]
    weights: Counter[Row] = Counter()
    for _, mixture, baseline in pairs:
        weights[mixture] += 1
        weights[baseline] -= 1
    found = contrast([(weight / len(pairs), rows[row]) for row, weight in weights.items()])
    if len(pairs) < 2 or found is None:
        return None
    margin = MARGINS[TASKS[task].metric]
    if sign < 0:
        margin *= statistics.mean(-statistics.mean(rows[baseline]) for _, _, baseline in pairs)
    which = ", of the seeds that left the plateau" if TASKS[task].plateau else ""
    name = f"{task}: mean of {len(pairs)} pairs of mixtures and {pairs[0][2].attention}"
    return Comparison(name, judge(found.low, found.high, margin), gain(found) + which, pooled=True)


def compare(table: Table, pair: Pair, judge: Callable[..., Verdict]) -> Comparison:
    """Judge the gain of a mixture over a baseline on one task."""
    task, metric = pair[0], TASKS[pair[0]].metric
    found = scores(task, *records_of(table, pair))
    sign = 1 if metric == "accuracy" else -1
    gained = difference([sign * value for value in found.first], [sign * value for value in found.second])
    if gained is None:
        return Comparison(name_of(pair), "not enough data", single_seed(found, sign))
    margin = MARGINS[metric] * (1.0 if sign > 0 else statistics.mean(found.second))
    verdict = "within noise" if found.stuck else judge(gained.low, gained.high, margin)
    return Comparison(name_of(pair), verdict, gain(gained) + found.which)


def name_of(pair: Pair) -> str:
    task, mixture, baseline = pair
    return f"{task}: {mixture.label} against {baseline.label}"


def records_of(table: Table, pair: Pair) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the records of the mixture and of the baseline."""
    rows = table.get(pair[0], {})
    return rows.get(pair[1], ()), rows.get(pair[2], ())


def gain(found: Contrast) -> str:
    return f"gain {found.mean:+.3g} ({found.low:+.3g} to {found.high:+.3g})"


def single_seed(found: Scores, sign: int) -> str:
    """Describe a gain that has too few seeds to be judged."""
    if not found.first or not found.second:
        return ""
    base = statistics.mean(found.second)
    change = sign * (statistics.mean(found.first) - base)
    share = "" if sign > 0 else f" ({change / base:+.1%})"
    return f"gain {change:+.3g}{share}, seeds: {len(found.first)} and {len(found.second)}{found.which}"


def better(low: float, high: float, margin: float = 0.0) -> Verdict:
    return "yes" if low > 0 else "no" if high < 0 else "within noise"


def comparable(low: float, high: float, margin: float) -> Verdict:
    return "yes" if low > -margin else "no" if high < 0 else "within noise"


def cheaper(table: Table, pair: Pair, what: str) -> Comparison:
    """Compare parameters or FLOPs."""
    ours, theirs = records_of(table, pair)
    if not ours or not theirs:
        return Comparison(name_of(pair), "not enough data")
    a, b = ours[0].values[what], theirs[0].values[what]
    shown = (f"{a:,}", f"{b:,}") if what == "parameters" else (f"{a / 1e9:.3g} G", f"{b / 1e9:.3g} G")
    return Comparison(name_of(pair), "yes" if a < b else "no", f"{shown[0]} against {shown[1]}")


def faster(steps: Steps, pair: Pair) -> Comparison:
    """Compare the time of a training step."""
    task, mixture, baseline = pair
    times = steps[task]["rows"] if task in steps else {}
    ours, theirs = times.get(mixture.name), times.get(baseline.name)
    if ours is None or theirs is None:
        return Comparison(name_of(pair), "not enough data")
    gpu = steps[task]["environment"]["gpu"]
    return Comparison(name_of(pair), speed(theirs / ours), f"{1e3 * ours:.2f} against {1e3 * theirs:.2f} ms, {gpu}")


def timed(row: dict[str, Any]) -> Comparison:
    """Compare the time of a forward pass of attention."""
    batch, heads, length, width, causal = row["shape"]
    name = f"{row['method']}: B={batch} N={length} D={width}{' causal' if causal else ''}, half of {heads} heads"
    ratio = row["speedup"]["forward"]
    return Comparison(name, speed(ratio), f"{ratio:.2f} times as fast")


def speed(ratio: float) -> Verdict:
    return "yes" if ratio >= 1 + FASTER else "no" if ratio <= 1 - FASTER else "within noise"


def compare_inside(table: Table, pair: Pair, quantity: str) -> Comparison:
    """Compare the mean over layers of a quantity that was measured inside the attention."""
    ours, theirs = (
        [statistics.mean(r.values["inside"][quantity]) for r in row if r.values.get("inside")]
        for row in records_of(table, pair)
    )
    found = difference(ours, theirs)
    if found is None:
        return Comparison(name_of(pair), "not enough data")
    means = f"{statistics.mean(ours):.3g} against {statistics.mean(theirs):.3g}"
    return Comparison(name_of(pair), better(found.low, found.high), f"{means} ({found.low:+.3g} to {found.high:+.3g})")


def gap(table: Table, pair: Pair) -> Comparison:
    """Return which share of the gap from linear to softmax a mixture closes."""
    task, mixture, linear = pair
    softmax = Row("softmax", linear.heads)
    gained, full = compare(table, pair, better), compare(table, (task, softmax, linear), better)
    if gained.verdict == "not enough data" or full.verdict != "yes":
        return Comparison(gained.what, "not enough data")
    means = {row: statistics.mean(record.test for record in table[task][row]) for row in (mixture, linear, softmax)}
    share = (means[mixture] - means[linear]) / (means[softmax] - means[linear])  # over all seeds of each
    return Comparison(gained.what, gained.verdict, f"{share:.0%} of the gap; {gained.detail}")


def matches(table: Table, task: str, row: Row) -> Comparison:
    """Compare a baseline with the paper's number."""
    target = published(task, row)
    assert target is not None  # every row of Tables 1 and 2 has a number
    name = f"{task}: {row.label}"
    every = [record.test for record in table.get(task, {}).get(row, ())]
    values = [value for value in every if not TASKS[task].plateau or (value > PLATEAU) == (target > PLATEAU)]
    if len(every) >= 3 and not values:
        return Comparison(name, "no", f"no seed of {len(every)} on the paper's side of the plateau's edge")
    half = interval(values)
    if half is None or len(values) < 3:  # the interval of two seeds contains almost everything
        return Comparison(name, "not enough data")
    half *= math.sqrt(1 + len(values) / SEEDS)  # the paper's mean is not exact either
    mean = statistics.mean(values)
    if TASKS[task].plateau:
        half = math.hypot(half, NORMAL * math.sqrt(2 * mean * (100 - mean) / TEST_EXAMPLES))
    detail = f"{mean:.2f} against {target:.2f}: {mean - target:+.2f} ± {half:.2f}, {len(values)} of {len(every)} seeds"
    if often := [record.test for record in table.get(f"{task}-often", {}).get(row, ())]:
        detail += f"; {statistics.mean(often):.2f} when validated as often as in the paper, seeds: {len(often)}"
    return Comparison(name, "yes" if abs(mean - target) <= half else "no", detail)
