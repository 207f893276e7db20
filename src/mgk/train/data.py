"""The batches that one process of a run reads, in page-locked memory if there is a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mgk.data
from mgk.data import Batch, Batches, Evaluation, stream
from mgk.files import read_json
from mgk.models.config import VisionConfig
from mgk.train.config import Config

KINDS = {"classifier": "sequences", "matcher": "pairs", "language": "stream", "vision": "images",
         "translation": "translations"}  # fmt: skip
"""Kind of the examples for each kind of model."""


class Source:
    """Batches of the splits of a prepared set."""

    def __init__(
        self, config: Config, root: str | Path | None, rank: int = 0, world: int = 1, pin: bool = False
    ) -> None:
        self.config, self.rank, self.world, self.pin = config, rank, world, pin
        self.prepared = load(config, root)
        self.max_length = None if isinstance(config.model, VisionConfig) else config.model.max_length
        for name in ("valid", "test"):  # report a wrong name now, not at the first evaluation
            try:
                self.examples(getattr(config.data, name))
            except ValueError as error:
                raise ValueError(f"data.{name}: {error}") from None
        self.batches = Batches(
            self.prepared.split(config.data.train),
            config.data.batch,
            seed=config.seed,
            max_length=self.max_length,
            bucket=config.data.bucket,
            pad_multiple=config.data.pad_multiple,
            pack=config.data.pack,
            rank=rank,
            world=world,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the data."""
        return {"name": self.prepared.name, "digest": self.prepared.digest, "options": options(self.config)}

    def examples_of(self, step: int) -> list[int]:
        """Numbers of the training examples of a step, over all processes; of a text, the first token of each window."""
        return [int(row) for row in self.batches.rows(step)]

    def training(self, start: int, stop: int) -> Iterator[Batch]:
        return stream(self.batches, start, stop, workers=self.config.workers, pin=self.pin)

    def evaluation(self, split: str, batches: int = 0) -> Iterator[Batch]:
        """Batches of a split, each example once; with `batches`, only that many, evenly spread over the split."""
        return stream(self.examples(split, batches), workers=self.config.workers, pin=self.pin)

    def examples(self, split: str, batches: int = 0) -> Evaluation:
        c = self.config.data
        size = c.valid_batch or c.batch
        return Evaluation(
            self.prepared.split(split),
            size,
            max_length=self.max_length,
            pad_multiple=c.pad_multiple,
            limit=batches * size or None,
            rank=self.rank,
            world=self.world,
        )


def root_of(run: Path, given: str | Path | None) -> Path | None:
    """Return the folder of prepared sets for a run: the given one, else the one it was last trained with if it exists.

    None is `mgk.data.root()`.
    """
    if given is not None:
        return Path(given)
    starts = read_starts(run)
    used = starts[-1].get("data_root") if starts else None  # older runs lack it
    return Path(used) if used and Path(used).is_dir() else None


def read_starts(run: Path, advice: str = "") -> list[dict[str, Any]]:
    """Return what a run has recorded at each of its starts."""
    path = run / "run.json"
    starts = read_json(path, advice).get("starts", []) if path.exists() else []
    types = {"data": dict, "data_root": str}  # of what is used here; the rest is for readers
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and all(isinstance(start.get(name, type_()), type_) for name, type_ in types.items())
        for start in starts
    ):
        raise ValueError(f"{path}: expected the record of the starts of a run, got another{advice}")
    return starts


def load(config: Config, root: str | Path | None) -> mgk.data.Prepared:
    """Load the prepared set of a configuration; raise an error if it does not fit the model."""
    prepared = mgk.data.load(config.data.name, root=None if root is None else Path(root), **options(config))
    facts, kind = prepared.manifest["facts"], prepared.manifest["kind"]
    if kind != KINDS[config.kind]:
        raise ValueError(
            f"data.name: expected a set of {KINDS[config.kind]} for a {config.kind} model, got {config.data.name}, "
            f"a set of {kind}"
        )
    for name in ("vocabulary", "classes"):
        own, needed = getattr(config.model, name, None), facts.get(name)
        if own is not None and needed is not None and own < needed:
            raise ValueError(
                f"model.{name}: expected at least {needed}, for {config.data.name}, got {own}; "
                f"add --model.{name} {needed}"
            )
    return prepared


def options(config: Config) -> dict[str, Any]:
    """Parse the options that the set was prepared with: `lengths=[16,64]` is {"lengths": (16, 64)}."""
    result: dict[str, Any] = {}
    for item in config.data.options:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"data.options: expected NAME=VALUE, got {item!r}")
        try:
            parsed = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            parsed = value
        result[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return result
