"""The cells of the study in the order of experiments/PLAN.md. Later pieces depend on the records of earlier ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mgk.data
from experiments.cells import records
from experiments.cells.cell import Adapt, Measure, Metric
from experiments.lm import noise
from experiments.lm.masked import predict_tokens
from experiments.lm.own import give_own_values, more_flops
from experiments.lm.tasks import CONTEXTS, MODERN, TASKS
from experiments.lm.translation import bleu
from mgk.models.cost import dimensions
from mgk.ops.cost import cache_bytes
from mgk.train.config import Config, replace
from mgk.train.data import options
from mgk.train.evaluate import flops
from mgk.variants import LABELS, LINEAR, VARIANTS

SWEEP_SEED = 1000  # of no other piece
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LIMITS = (1.25e-4, 1.6e-2)
AS_SOFTMAX = ("softmax", "linear")  # these use the rate that was chosen for softmax, the others that of sMGK

OPTIONS: dict[str, dict[str, Any]] = {
    "m1": {"model__components": 1},
    "m3": {"model__components": 3},
    "m4": {"model__components": 4},
    "hard": {"model__e_step": "hard"},
    "em": {"model__prior": "em"},
    "variance": {"model__learn_variance": True},
}
MEANING = {
    "": "", "m1": "M = 1", "m3": "M = 3", "m4": "M = 4", "hard": "hard E-step", "em": "prior by EM",
    "variance": "learned variance", "own": "own values",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Row:
    """A model of the study: an attention, its heads, and what differs from the task's configuration."""

    attention: str
    heads: int
    kv_heads: int = 0
    """Heads of keys and values; 0 is as many as query heads."""
    head_dim: int = 0
    """Width of a head; 0 is that of the task."""
    option: str = ""

    def __post_init__(self) -> None:
        for what, value, known in (("attention", self.attention, VARIANTS), ("option", self.option, MEANING)):
            if value not in known:
                raise ValueError(f"{what}: expected one of {', '.join(known)}, got {value!r}")

    @property
    def name(self) -> str:
        """E.g. smgk-h4, softmax-h4-d128, softmax-h8-kv4, smgk-h4-m3."""
        parts = [f"{self.attention}-h{self.heads}", *([f"d{self.head_dim}"] if self.head_dim else [])]
        return "-".join([*parts, *([f"kv{self.kv_heads}"] if self.kv_heads else []), *filter(None, [self.option])])

    @property
    def label(self) -> str:
        """E.g. "sMGK 4", "softmax 4x128", "softmax 8/4", "sMGK 4, M = 3"."""
        size = f"{self.heads}" + (f"x{self.head_dim}" if self.head_dim else "")
        size += f"/{self.kv_heads}" if self.kv_heads else ""
        return f"{LABELS[self.attention]} {size}" + (f", {MEANING[self.option]}" if self.option else "")

    @property
    def family(self) -> str:
        """Return whose learning rate the row uses: softmax or smgk."""
        return "softmax" if self.attention in AS_SOFTMAX else "smgk"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the configuration that are the row's."""
        found = {"model__attention": self.attention, "model__heads": self.heads} | OPTIONS.get(self.option, {})
        found |= {"model__num_kv_heads": self.kv_heads} if self.kv_heads else {}
        return found | ({"model__head_dim": self.head_dim} if self.head_dim else {})


@dataclass(frozen=True)
class Cell:
    """One training."""

    task: str
    row: Row
    seed: int
    rate: float
    """The highest learning rate."""

    @property
    def name(self) -> str:
        rate = f"-lr{self.rate:g}" if self.task == "sweep" else ""
        return f"{self.task}/{self.row.name}{rate}-s{self.seed}"

    @property
    def config(self) -> Config:
        return replace(TASKS[self.task].config, **self.row.fields, optimiser__lr=self.rate, seed=self.seed)

    @property
    def metric(self) -> Metric:
        return TASKS[self.task].metric

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"task": self.task, "row": self.row.name, "seed": self.seed, "rate": self.rate}

    @property
    def command(self) -> str:
        return f"python -m experiments.lm --cells {self.name} --again again"

    @property
    def pretraining(self) -> tuple[Config, Adapt] | None:
        return (self.config, predict_tokens) if TASKS[self.task].pretrained else None

    @property
    def adapt(self) -> Adapt | None:
        return give_own_values if self.row.option == "own" else None

    @property
    def cache_per_token(self) -> float | None:
        """Bytes that each token adds to the decoding cache in bf16, over all layers; None for a state of fixed size."""
        model = self.config.model
        if model.attention in LINEAR:
            return None
        size = dimensions(model, 1, causal=True)
        values = (size.M - 1) * size.G * size.Dv if self.row.option == "own" else 0  # and one value for each component
        return float(model.layers * (cache_bytes(size, 2) + 2 * values))

    def measures(self, run: Path, data_root: Path | None, gpu: str | None) -> Mapping[str, Measure]:
        """Return the bytes per token of a text with a tokenizer, and FLOPs that the configuration does not show."""
        config = self.config
        if self.metric == "bleu":
            return {"test_bleu": partial(bleu, run, data_root)}
        if self.row.option == "own":
            return {"flops": lambda: flops(config.model) + more_flops(config.model, config.model.max_length)}  # type: ignore[union-attr]
        if not any(option.startswith("bpe=") for option in config.data.options):
            return {}
        return {"bytes_per_token": partial(bytes_per_token, config, data_root)}


def bytes_per_token(config: Config, data_root: Path | None) -> float:
    """Return the mean length of a token of the test set."""
    facts = mgk.data.load(config.data.name, root=data_root, **options(config)).manifest["facts"]
    return float(facts["bytes_per_token"][config.data.test])


Record = records.Record[Cell]
Rates = Mapping[str, float]

HALF, FULL = Row("smgk", 4), Row("softmax", 8)
MAIN = [
    FULL, HALF, Row("softmax", 4), Row("softmax", 4, head_dim=128), Row("softmax", 8, 4), Row("smgk", 8),
    Row("smgk", 4, head_dim=128), Row("softmax", 8, 2), Row("smgk", 8, 4), Row("mgk", 4), Row("mgk", 8),
]  # fmt: skip
OWN_VALUES = [Row("smgk", 4, option="own"), Row("mgk", 4, option="own")]
SIDE = [
    *(Row("smgk", 4, option=option) for option in ("m1", "m3", "m4", "hard", "em", "variance")),
    Row("linear", 8), Row("mlk", 4), Row("smlk", 4),
]  # fmt: skip
PLAIN = [FULL, HALF, Row("softmax", 4), Row("smgk", 8)]
SMALL = [Row("softmax", 12), Row("smgk", 6), Row("softmax", 12, 6), Row("smgk", 12)]
TRANSLATION = [FULL, HALF, Row("softmax", 4), Row("smgk", 2), Row("mgk", 4)]
LENGTH = [FULL, HALF, Row("smgk", 8)]


def parse(name: str, rates: Rates) -> Cell:
    """Return the cell with a name such as nano/smgk-h4-m3-s0; sweep/smgk-h4-lr0.001-s1000 names its rate."""
    found = re.fullmatch(
        r"([\w-]+)/([a-z]+)-h(\d+)(?:-d(\d+))?(?:-kv(\d+))?(?:-(?!lr)([a-z]\w*))?(?:-lr([\d.e-]+))?-s(\d+)", name
    )
    if found is None or found[1] not in TASKS or (found[7] is not None) != (found[1] == "sweep"):
        raise ValueError(f"cells: expected TASK/ROW-sSEED with a task of {', '.join(TASKS)}, got {name!r}")
    row = Row(found[2], int(found[3]), int(found[5] or 0), int(found[4] or 0), found[6] or "")
    rate = float(found[7]) if found[7] else rate_of(found[1], row, rates)
    if rate is None:
        raise ValueError(f"cells: {name} needs the learning rate that the piece sweep chooses; finish the sweep first")
    return Cell(found[1], row, int(found[8]), rate)


def rate_of(task: str, row: Row, rates: Rates) -> float | None:
    """Return the learning rate of a row: the chosen one, or that of the task; None if it is not chosen yet."""
    return rates.get(row.family) if TASKS[task].chosen_rate else TASKS[task].config.optimiser.lr


def sweep_scores(found: Iterable[Record]) -> dict[str, dict[float, float]]:
    """Return the validation score of every learning rate, by family."""
    scores: dict[str, dict[float, float]] = {"softmax": {}, "smgk": {}}
    for record in found:
        if record.cell.task == "sweep" and record.row in (FULL, HALF) and record.cell.seed == SWEEP_SEED:
            scores[record.row.family][record.cell.rate] = float(record.values["dev"])
    return scores


def rates_to_try(scores: Mapping[float, float]) -> list[float]:
    """Return the rates that the rule asks for: all of RATES, and the next factor of two while the best is at an end."""
    tried = sorted({*RATES, *scores})
    if any(rate not in scores for rate in tried):
        return tried
    best = min(tried, key=lambda rate: scores[rate])
    low, high = best / 2, best * 2
    if best == tried[0] and low >= LIMITS[0]:
        return [low, *tried]
    return [*tried, high] if best == tried[-1] and high <= LIMITS[1] else tried


def chosen_rates(found: Iterable[Record]) -> dict[str, float]:
    """Return the best rate of each family whose sweep is finished."""
    return {
        family: min(scores, key=lambda rate, scores=scores: scores[rate])  # type: ignore[misc]
        for family, scores in sweep_scores(found).items()
        if all(rate in scores for rate in rates_to_try(scores))
    }


def pieces(found: Sequence[Record]) -> dict[str, list[Cell] | None]:
    """Return the cells of each piece of language models, in order; None for a piece that waits for an earlier one."""
    scores, rates = sweep_scores(found), chosen_rates(found)
    measured = [r.test for r in found if r.cell.task == "nano" and r.row == FULL and r.cell.seed < noise.LEAST]
    result: dict[str, list[Cell] | None] = {
        "sweep": [
            Cell("sweep", row, SWEEP_SEED, rate) for row in (FULL, HALF) for rate in rates_to_try(scores[row.family])
        ]
    }

    def each(task: str, rows: Sequence[Row], seeds: int) -> list[Cell] | None:
        """All rows with one seed before any has two."""
        found = [(row, rate_of(task, row, rates)) for row in rows]
        if any(rate is None for _, rate in found):
            return None
        return [Cell(task, row, seed, rate) for seed in range(seeds) for row, rate in found if rate is not None]

    result["noise"] = each("nano", [FULL], noise.LEAST)
    result["main"] = each("nano", MAIN, noise.seeds_of_main(measured)) if len(measured) == noise.LEAST else None
    result["own"] = each("nano", OWN_VALUES, 3)
    result["side"] = each("nano", SIDE, 3)
    result["plain"] = each("plain", PLAIN, 3)
    result["scale"] = each("small", SMALL, 2)
    length = [each(f"context-{context}", LENGTH, 1) for context in CONTEXTS[1:]]
    result["translation"] = each("multi30k", TRANSLATION, 3)
    arena = [each(f"{name}-{kind}", [FULL, HALF], 1) for kind in ("modern", "pretrained") for name in MODERN]
    result["lra-modern"] = [cell for cells in arena for cell in cells or ()]
    result["length"] = None if None in length else [cell for cells in length for cell in cells or ()]
    return result
