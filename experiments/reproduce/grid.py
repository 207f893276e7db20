"""The trainings that the tables consist of, in the order in which they are most useful.

A cell is one training: a task, an attention, a number of heads, at most one option, and a seed. A task is a recipe with
the changes that the table needs. Its name says what it is trained on, which may differ from the paper's data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.cells import records
from experiments.cells.cell import Adapt, Measure, Metric
from experiments.cells.inside import inside
from mgk.models.config import LanguageModelConfig
from mgk.recipes import recipe
from mgk.train.config import Config, replace
from mgk.train.evaluate import evaluate
from mgk.variants import LABELS, VARIANTS

SEEDS = 5
SLIDING = "sliding by one"  # as mgk.train.evaluate calls the paper's perplexity


@dataclass(frozen=True)
class Task:
    """A recipe, and how its score is reported."""

    config: Config
    metric: Metric
    note: str
    """How it differs from the paper's experiment."""
    plateau: bool = False
    """Whether accuracy stays on a plateau before it rises, if it rises at all."""
    sliding: bool = False
    """Whether the paper's perplexity, with a window that slides by one token, is measured too."""

    @property
    def tokens(self) -> int:
        """Tokens of a language model's training, the same for all attentions; 0 for other models."""
        model = self.config.model
        if not isinstance(model, LanguageModelConfig):
            return 0
        return self.config.steps * self.config.data.batch * model.max_length


def _lra(name: str, **changes: Any) -> Config:
    """Return a task of the Long Range Arena as the paper trained it."""
    return replace(recipe(f"lra-{name}", paper=True), **changes)


def _words(name: str, **changes: Any) -> Config:
    """Return the paper's language model, with fewer steps."""
    return replace(recipe(name), **({"model__dropout": 0.1, "eval_every": 1000, "log_every": 50} | changes))


# Few different lengths, so that few CUDA graphs are captured, and no padding outside the attention. Neither changes a
# result, because padding is masked and not pooled.
_FEW_LENGTHS: dict[str, Any] = {"data__pad_multiple": 512, "data__pack": 8192, "data__valid_batch": 128}
_BYTES: dict[str, Any] = {
    "model__layers": 16, "model__hidden": 2048, "optimiser__lr": 2.5e-4, "optimiser__warmup": 1000,
}  # fmt: skip

TASKS: dict[str, Task] = {
    "listops": Task(
        _lra("listops", eval_every=250, **_FEW_LENGTHS),
        "accuracy",
        "LRA's procedure with our generator; 5,000 steps, as in the paper, validated every 250 steps, not every 50.",
        plateau=True,
    ),
    "text": Task(
        _lra("text", eval_every=2000, **_FEW_LENGTHS),
        "accuracy",
        "As in the paper: IMDb's official split, pooling over the padded length, and no validation set: the checkpoint "
        "is chosen on the test set. 20,000 steps, validated every 2,000, not every 500.",
    ),
    "text-sound": Task(
        _lra("text", data__train="train", data__valid="dev", eval_every=2000, **_FEW_LENGTHS),
        "accuracy",
        "As `text`, but 2,500 training reviews are held out and choose the checkpoint.",
    ),
    "text-often": Task(
        _lra("text", eval_every=500, **_FEW_LENGTHS),
        "accuracy",
        "As `text`, but validated on the test set every 500 steps, as in the paper. Test accuracy fluctuates by whole "
        "points, so the best of forty validations is above the best of ten. Both are given for the same run.",
    ),
    "listops-often": Task(
        _lra("listops", eval_every=50, **_FEW_LENGTHS),
        "accuracy",
        "As `listops`, but validated every 50 steps, as in the paper. The training is the same, so the results of a "
        "seed differ only by the checkpoint.",
        plateau=True,
    ),
    "retrieval-rebuilt": Task(
        _lra("retrieval", data__name="aan-rebuilt", steps=4000, optimiser__warmup=320, eval_every=500),
        "accuracy",
        "Pairs rebuilt from papers and citations: not LRA's pairs, a twentieth of their number, and no paper in two "
        "splits. 4,000 steps instead of 30,000, with a warm-up of 320 instead of 800. Not comparable with the paper's "
        "numbers.",
    ),
    "listops-long": Task(
        _lra("listops", steps=15_000, eval_every=500, **_FEW_LENGTHS),
        "accuracy",
        "As `listops`, with three times the steps, to give every seed time to leave the plateau.",
        plateau=True,
    ),
    "retrieval-elife": Task(
        _lra("retrieval", data__name="elife", steps=6000, eval_every=500, data__valid_batch=64),
        "accuracy",
        "Pairs rebuilt from 20,430 articles of eLife and their citations: not LRA's pairs, a sixth of their number, "
        "and no article in two splits. 6,000 steps instead of 30,000. Not comparable with the paper's numbers.",
    ),
    "image": Task(
        _lra("image", eval_every=875, **_FEW_LENGTHS | {"data__pack": 0}),
        "accuracy",
        "CIFAR-10 as a sequence of 1,024 grey pixels, which the paper does not have; Nystromformer's settings.",
    ),
    "enwik8": Task(
        replace(recipe("enwik8"), **_BYTES),
        "bits",
        "The paper's 16 layers on bytes of Wikipedia, with an ordinary softmax output.",
    ),
    "wikitext2": Task(
        _words("wikitext2", steps=2000, optimiser__warmup=200, eval_every=400),
        "perplexity",
        "The paper's 16 layers on WikiText-2: two million words instead of 103 million. 2,000 steps, with a warm-up of "
        "200. Not comparable with the paper's numbers.",
        sliding=True,
    ),
    "enwiki": Task(
        _words("enwiki", steps=4000, optimiser__warmup=400, eval_every=1000),
        "perplexity",
        "The paper's 16 layers on 32 million words of Wikipedia articles, with held-out articles for validation and "
        "test; WikiText-103's training text is not among our data. 4,000 steps, with a warm-up of 400. Not comparable "
        "with the paper's numbers.",
    ),
    "enwik8-short": Task(
        replace(recipe("enwik8"), steps=3000),
        "bits",
        "A short run: 8 layers on bytes of Wikipedia, 3,000 steps. For ablations; not in the paper.",
    ),
    "enwik8-tiny": Task(
        replace(
            recipe("enwik8"),
            model__layers=2,
            model__max_length=128,
            data__batch=16,
            data__pad_multiple=128,
            steps=1000,
            optimiser__warmup=100,
            eval_every=250,
        ),
        "bits",
        "A run of minutes on a CPU, in float32: 2 layers, windows of 128 bytes, batches of 16, 1,000 steps. For Eqn "
        "13: its only training on a GPU, in bfloat16, stopped at a gradient that was not finite. The M-step has been "
        "fixed since, but has not been run there again (docs/math.md, 7).",
    ),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "hard": {"model__e_step": "hard"},
    "em": {"model__prior": "em"},
    "positions": {"model__prior": "em", "model__prior_positions": "max_length"},
    "uniform": {"model__prior": "uniform"},
    "variance": {"model__learn_variance": True},
    "means": {"model__means": "em"},
    "keys": {"model__mixing": "keys"},
    "m1": {"model__components": 1},
    "m3": {"model__components": 3},
    "m4": {"model__components": 4},
}
MEANING = {
    "": "prior learned (SGD)",
    "hard": "hard E-step",
    "em": "soft E-step, M-step for the prior",
    "positions": "M-step, a prior per key position",
    "uniform": "no prior",
    "variance": "learned variance",
    "means": "M-step for shifts and variances (Eqn 13)",
    "keys": "mixed before the feature map",
    "m1": "M = 1",
    "m3": "M = 3",
    "m4": "M = 4",
}


@dataclass(frozen=True, order=True)
class Row:
    """A row of a table: an attention, its heads and at most one option."""

    attention: str
    heads: int
    option: str = ""

    @property
    def name(self) -> str:
        """E.g. smgk-h4-hard."""
        return f"{self.attention}-h{self.heads}" + (f"-{self.option}" if self.option else "")

    @property
    def label(self) -> str:
        """E.g. "sMGK 4, hard E-step"."""
        return f"{LABELS[self.attention]} {self.heads}" + (f", {MEANING[self.option]}" if self.option else "")


@dataclass(frozen=True)
class Cell:
    """One training."""

    task: str
    row: Row
    seed: int

    def __post_init__(self) -> None:
        for what, value, known in (
            ("task", self.task, TASKS), ("attention", self.row.attention, VARIANTS),
            ("option", self.row.option, ("", *OPTIONS)),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{what}: expected one of {', '.join(known)}, got {value!r}")

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell with a name such as listops/smgk-h4-hard-s0."""
        found = re.fullmatch(r"([\w-]+)/([a-z]+)-h(\d+)(?:-([a-z]\w*))??-s(\d+)", text)
        if found is None:
            raise ValueError(f"cells: expected RECIPE/ATTENTION-hHEADS[-OPTION]-sSEED, got {text!r}")
        task, attention, heads, option, seed = found.groups()
        return cls(task, Row(attention, int(heads), option or ""), int(seed))

    @property
    def name(self) -> str:
        return f"{self.task}/{self.row.name}-s{self.seed}"

    @property
    def config(self) -> Config:
        base = TASKS[self.task].config
        fields = {"model__attention": self.row.attention, "model__heads": self.row.heads, "seed": self.seed}
        for name, value in OPTIONS.get(self.row.option, {}).items():
            fields[name] = getattr(base.model, value) if value == "max_length" else value
        return replace(base, **fields)

    @property
    def metric(self) -> Metric:
        return TASKS[self.task].metric

    @property
    def identity(self) -> Mapping[str, Any]:
        row = self.row
        return {"recipe": self.task, "attention": row.attention, "heads": row.heads, "option": row.option,
                "seed": self.seed}  # fmt: skip

    @property
    def command(self) -> str:
        return f"python -m experiments.reproduce all --cells {self.name} --results again/cells --runs again/runs"

    @property
    def pretraining(self) -> tuple[Config, Adapt] | None:
        return None

    @property
    def adapt(self) -> Adapt | None:
        return None

    def measures(self, run: Path, data_root: Path | None, gpu: str | None) -> Mapping[str, Measure]:
        """Return the paper's perplexity, and what the attention looks like inside."""
        found: dict[str, Measure] = {}
        if TASKS[self.task].sliding and gpu is not None:  # half a minute on a GPU, days on a CPU
            found["test_sliding"] = lambda: math.exp(
                evaluate(run, sliding=True, batch=1024, data_root=data_root)[SLIDING]["loss"]
            )
        first = self.seed == 0 and not self.row.option  # the report shows maps of one seed
        found["inside"] = lambda: inside(run, data_root, maps=first)
        return found


Record = records.Record[Cell]


def read_all(results: Path) -> list[Record]:
    """Read all records, in the order of their names."""
    return records.read_all(results, Cell.parse)


PAIRS = ((8, 4), (4, 2), (2, 1), (1, None))  # heads of a baseline, and of the mixtures that are compared with it
LRA = ("listops", "text", "retrieval-rebuilt", "text-sound", "listops-long", "retrieval-elife", "image")
ALL_HEADS = LRA[:4]  # tasks that have rows with fewer than 8 heads, too
LANGUAGE = ("enwik8", "wikitext2", "enwiki")
SHORT = ("enwik8-short", "enwik8-tiny")
_ABLATED = ("m1", "m3", "m4", "variance", "em", "positions", "uniform", "hard")


# Tasks, and rows that are compared with each other. A group is trained on all its tasks before the next begins.
Group = tuple[tuple[str, ...], list[Row]]


def _paired(baseline: str, mixtures: Sequence[str]) -> list[Group]:
    """Return a group per number of heads; only the first has the long runs."""
    return [
        (
            LRA if full == PAIRS[0][0] else ALL_HEADS,
            [Row(baseline, full), *(Row(mixture, half) for mixture in mixtures if half)],
        )
        for full, half in PAIRS
    ]


GROUPS: dict[str, list[Group]] = {
    "table1": _paired("softmax", ("smgk", "mgk")),
    "table2": _paired("linear", ("smlk", "mlk")),
    "table3": [
        (LANGUAGE, [Row("softmax", 8), Row("smgk", 4), Row("mgk", 4), Row("linear", 8), Row("mlk", 4)]),
        (LANGUAGE, [Row("softmax", 4), Row("smgk", 8), Row("mgk", 8), Row("linear", 4), Row("mlk", 8)]),
    ],
    "table4": [
        (LRA[:3], [Row(attention, 1, option) for attention, option in product(("smgk", "mgk"), ("hard", "em", ""))])
    ],
    "checkpoints": [
        (("text-often",), [Row("softmax", 1), Row("linear", 8), Row("softmax", 4), Row("linear", 2)]),
        (("listops-often",), [Row("linear", 2)]),
    ],
    "ablations": [
        (SHORT[:1], [Row("softmax", 8), Row("softmax", 4), Row("smgk", 4), Row("mgk", 4)]),
        (SHORT[:1], [Row("smgk", 4, option) for option in (*_ABLATED, "means")]),
        (
            SHORT[:1],
            [
                Row("linear", 4),
                *(Row(attention, 4, option) for attention, option in product(("mlk", "smlk"), ("", "keys"))),
            ],
        ),
        (SHORT[:1], [Row("mgk", 4, option) for option in _ABLATED]),
        (SHORT[1:], [Row("softmax", 4), *(Row("smgk", 4, option) for option in ("", "variance", "means"))]),
    ],
}
TARGETS = (*GROUPS, "all")


def rows(target: str) -> list[Row]:
    """Return the rows of a table, in the order of its groups."""
    return list(dict.fromkeys(row for _, group in GROUPS[target] for row in group))


def tasks_of(target: str) -> list[str]:
    """Return the tasks of a table, in the order of its groups."""
    return list(dict.fromkeys(task for tasks, _ in GROUPS[target] for task in tasks))


def rows_on(task: str) -> set[Row]:
    """Return all rows that any table has on a task."""
    return {cell.row for target in GROUPS for cell in _once(target, 0, (task,), ())}


def cells(target: str, *, seeds: int = SEEDS, tasks: Iterable[str] = (), heads: Iterable[int] = ()) -> list[Cell]:
    """Return the cells of a table, most useful first: all rows with one seed before the next, and many heads first.

    Args:
        target: one of TARGETS.
        seeds: number of trainings of each row.
        tasks: only these tasks, in this order; all if empty.
        heads: only groups whose baseline has one of these numbers of heads; all if empty.
    """
    if target not in TARGETS:
        raise ValueError(f"what: expected one of {', '.join(TARGETS)}, got {target!r}")
    if seeds < 1:
        raise ValueError(f"seeds: expected at least 1, got {seeds}")
    wanted, counts = tuple(tasks), tuple(heads)
    for task in wanted:
        if task not in TASKS:
            raise ValueError(f"recipes: expected some of {', '.join(TASKS)}, got {task!r}")
    targets = tuple(GROUPS) if target == "all" else (target,)
    found = [cell for seed in range(seeds) for each in targets for cell in _once(each, seed, wanted, counts)]
    if not found:
        own = dict.fromkeys(task for each in targets for task in tasks_of(each))
        full = dict.fromkeys(str(group[0].heads) for each in targets for _, group in GROUPS[each])
        raise ValueError(
            f"recipes, heads: expected some that {target} has rows for, recipes of {', '.join(own)} and heads of "
            f"{', '.join(full)}, got {' '.join(wanted) or 'all'} and {' '.join(map(str, counts)) or 'all'}"
        )
    return list(dict.fromkeys(found))


def _once(target: str, seed: int, wanted: tuple[str, ...], heads: tuple[int, ...]) -> Iterator[Cell]:
    """Yield the cells of a table with one seed."""
    for tasks, group in GROUPS[target]:
        chosen = [task for task in wanted if task in tasks] if wanted else tasks
        if not heads or group[0].heads in heads:
            yield from (Cell(task, row, seed) for task in chosen for row in group)
