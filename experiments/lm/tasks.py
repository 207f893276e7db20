"""What the study trains on: recipes with the changes that experiments/PLAN.md fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.cells.cell import Metric
from mgk.recipes import recipe
from mgk.train.config import Config, replace

CONTEXTS = (512, 2048, 8192)
TOKENS = 32_768  # of a step


@dataclass(frozen=True)
class Task:
    """A configuration without its attention, and how its score is reported."""

    config: Config
    metric: Metric
    note: str
    minutes: float
    """About how long a cell takes on an H200, with compilation."""
    chosen_rate: bool = False
    """Whether the learning rate is the one that the sweep chose, not that of the configuration."""
    pretrained: bool = False
    """Whether the model first learns to predict hidden tokens of the same inputs, for as many steps."""


def nano(context: int = 512, **changes: Any) -> Config:
    """Return the small language model at some context, with the same number of tokens in a step."""
    fields = {"model__max_length": context, "data__batch": TOKENS // context, "data__pad_multiple": context}
    return replace(recipe("lm"), **fields, **{"steps": 3000, "eval_every": 500, "eval_batches": 0} | changes)


MODERN = {"listops": (10_000, 64), "text": (10_000, 32), "image": (20_000, 64)}  # steps, and examples of a batch


def modern(name: str) -> Config:
    """Return a task of the Long Range Arena with a model as one would build it today."""
    steps, batch = MODERN[name]
    model = {
        "layers": 6, "width": 256, "hidden": 1024, "head_dim": 32, "classifier_hidden": 256, "positions": "rotary",
        "attention_dropout": 0.0,
    }  # fmt: skip
    optimiser = {
        "lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.05, "decay": "matrices", "clip": 1.0,
        "schedule": "cosine", "warmup": 500,
    }  # fmt: skip
    fields = {f"model__{field}": value for field, value in model.items()}
    fields |= {f"optimiser__{field}": value for field, value in optimiser.items()}
    data = {"data__batch": batch, "data__pad_multiple": 512}
    return replace(recipe(f"lra-{name}"), **fields, **data, steps=steps, eval_every=1000)


def tasks() -> dict[str, Task]:
    """Return all tasks by name."""
    return {
        "sweep": Task(nano(), "bits", "The model of `nano`, to choose the learning rate on the validation set.", 1.7),
        "nano": Task(
            nano(), "bits", "Bytes of enwik8, 6 layers of width 512, context 512, 98 million bytes of training.", 1.7,
            chosen_rate=True,
        ),
        "plain": Task(nano(model__qk_norm=False), "bits", "As `nano`, without QK-norm.", 1.7, chosen_rate=True),
        **{
            f"context-{length}": Task(
                nano(length), "bits", f"As `nano`, with context {length:,} and {TOKENS // length} sequences a step.",
                1.7 + length / 4096, chosen_rate=True,
            )
            for length in CONTEXTS[1:]
        },
        "small": Task(
            replace(recipe("lm-small"), data__batch=64, steps=3000, eval_every=500),
            "bits",
            "Articles of Wikipedia with a trained tokenizer of 32,768 tokens, 12 layers of width 768, context 1,024, "
            "197 million tokens of training.",
            10.0,
        ),
        "multi30k": Task(
            recipe("multi30k"), "bleu",
            "Multi30k, English to German, an encoder-decoder of 3 + 3 layers of width 256, greedy decoding, "
            "test_2016_flickr.", 3.0,
        ),
        **{
            f"{name}-modern": Task(
                modern(name), "accuracy",
                "LRA's task with 6 layers of width 256, rotary positions and pre-LN, trained from scratch. Not the "
                "paper's protocol.", 6.0,
            )
            for name in MODERN
        },
        **{
            f"{name}-pretrained": Task(
                modern(name), "accuracy",
                f"As `{name}-modern`, after as many steps of predicting hidden tokens of the same training inputs.",
                12.0, pretrained=True,
            )
            for name in MODERN
        },
    }  # fmt: skip


TASKS = tasks()
