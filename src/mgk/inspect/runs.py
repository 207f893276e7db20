"""Runs of `mgk train`: their names, logged curves and models, and inputs with readable tokens.

N positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mgk.data import Prepared
from mgk.data.listops import SYMBOLS
from mgk.data.splits import Documents, Images, Stream
from mgk.files import read_json
from mgk.inspect.collect import Layer, collect
from mgk.inspect.page import Answer
from mgk.inspect.tokens import (
    ByteTokenizer,
    SubwordTokenizer,
    WordTokenizer,
    article_words,
    listops_symbols,
    wikitext_words,
)
from mgk.ops.arguments import check_count
from mgk.train import Config, load_model
from mgk.train.config import read
from mgk.train.data import load, root_of
from mgk.variants import GAUSSIAN, LABELS

CANDIDATES, TELLING = 100, 512
CLASSES = {"imdb": ("negative", "positive")}


@dataclass(frozen=True)
class Input:
    """Arguments of a model's `forward`, and a label for each position."""

    arguments: tuple[Tensor, ...]
    tokens: Sequence[str]
    unseen: str = ""
    """Text beyond the model's maximum length."""
    truth: int | None = None
    """The class, or the id of the token after the last one, if it is known."""


@dataclass(frozen=True)
class Run:
    """A run folder written by `mgk train`."""

    folder: Path
    config: Config
    which: str = "best"
    data_root: Path | None = None

    @classmethod
    def open(cls, folder: str | Path, *, which: str = "best", data_root: Path | None = None) -> Run:
        """Open a run folder; `which` is the checkpoint, "best" or "last"."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder}: expected the folder of a run (mgk train), found no config.json in it")
        config = read(folder / "config.json")
        if config.kind == "translation":
            raise ValueError(f"{folder}: expected a model that reads one sequence, got a translator, which has two")
        return cls(folder, config, which, data_root)

    @property
    def name(self) -> str:
        """For example "sMGK, 4 heads", with options that are not the default."""
        model = self.config.model
        parts = [LABELS[model.attention], f"{model.heads} head{'s' if model.heads > 1 else ''}"]
        if model.attention in GAUSSIAN:
            parts += ["hard E-step"] * (model.e_step == "hard") + ["soft-E prior"] * (model.prior == "em")
        return ", ".join(parts)

    @cached_property
    def model(self) -> Any:
        """The model with the weights of the checkpoint, on the GPU if there is one."""
        return load_model(self.folder, self.which)[0].to("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def prepared(self) -> Prepared:
        return load(self.config, root_of(self.folder, self.data_root))

    @cached_property
    def tokenizer(self) -> ByteTokenizer | WordTokenizer | SubwordTokenizer:
        if self.config.data.name == "listops":
            return WordTokenizer(("", *SYMBOLS), listops_symbols)
        if self.config.kind != "language":
            return ByteTokenizer(shift=1)  # 0 is padding
        level = self.prepared.manifest["facts"].get("level")
        if level == "bpe":
            from tokenizers import Tokenizer

            return SubwordTokenizer(Tokenizer.from_file(str(self.prepared.tokenizer)))
        if level != "words":
            return ByteTokenizer(shift=0)
        split = article_words if self.config.data.name == "enwiki" else wikitext_words
        return WordTokenizer(self.prepared.words, split)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json, or None if the run has not finished."""
        path = self.folder / "result.json"
        return read_json(path) if path.exists() else None

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the log; a last line that a crash has cut is left out."""
        path = self.folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                if not isinstance(values["event"], str) or not isinstance(values["step"], int):
                    raise ValueError
            except (ValueError, KeyError, TypeError, RecursionError):
                if number == len(lines):
                    break
                raise ValueError(f"{path}, line {number}: expected a JSON object with event and step") from None
            found.append(values)
        return found

    def curve(self, event: str, metric: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a logged metric, without values that are not finite.

        `event` is "train", "valid" or "test".
        """
        points = [
            (float(line["step"]), float(line[metric]))
            for line in self.log
            if line["event"] == event and isinstance(line.get(metric), int | float) and math.isfinite(line[metric])
        ]
        return [step for step, _ in points], [value for _, value in points]

    def encode(self, text: str, length: int | None = None) -> Input:
        """Convert a text to an input of this model, cut to `length` tokens or the model's maximum length."""
        if self.config.kind == "vision":
            raise ValueError("--text: expected a model of text, got one of images; leave it out to see a test image")
        limit = self._limit(length)
        ids, labels = self.tokenizer.encode(text)
        if not ids:
            raise ValueError("--text: expected at least one token, got none")
        while limit < len(labels) and labels[limit] == "":  # do not cut inside a character
            limit -= 1
        if not limit:
            raise ValueError(f"--length: expected enough for the bytes of {labels[0]!r}, got {length}")
        truth = ids[limit] if self.config.kind == "language" and limit < len(ids) else None
        return Input(self._arguments(torch.tensor(ids[:limit])), labels[:limit], "".join(labels[limit:]), truth)

    def example(self, index: int | None = None, length: int | None = None) -> Input:
        """Return an example of the test split, cut to `length` tokens or the model's maximum length.

        Without an index it is the longest of the first `CANDIDATES` examples that has at most `TELLING` tokens, or the
        shortest if all have more: long enough to show a pattern, short enough to read.
        """
        examples: Any = self.prepared.split(self.config.data.test)
        limit = self._limit(length)
        count = _count(examples, limit)
        if index is None:
            index = _telling(examples)
        if not 0 <= index < count:
            raise ValueError(f"--index: expected 0 to {count - 1}, got {index}")
        if isinstance(examples, Images):
            batch = examples.batch(torch.tensor([index]).numpy(), 0)
            model: Any = self.config.model
            side = model.image_size // model.patch_size
            labels = [f"r{row}c{column} " for row in range(side) for column in range(side)]
            labels = ["class "] * (model.pooling == "class") + labels
            return Input((batch["pixels"],), labels, truth=int(examples.labels[index]))
        truth = None
        if isinstance(examples, Stream):
            row = torch.from_numpy(examples.tokens[index * limit : (index + 1) * limit + 1].astype("int64"))
            row, truth = row[:limit], int(row[limit]) if len(row) > limit else None
        else:
            documents = getattr(examples, "documents", examples)
            row = torch.from_numpy(documents.row(index)[:limit])
            truth = int(examples.labels[index]) if documents is examples else None  # a matcher's label is of a pair
        return Input(self._arguments(row), self.tokenizer.labels(row.tolist()), truth=truth)

    def examples(self, length: int | None = None) -> Iterator[Input]:
        """Iterate over the test split."""
        for index in range(_count(self.prepared.split(self.config.data.test), self._limit(length))):
            yield self.example(index, length)

    def layers(self, given: Input) -> list[Layer]:
        """Run the model on an input and return its attention layers."""
        device = next(self.model.parameters()).device
        return collect(self.model, *(argument.to(device) for argument in given.arguments))

    @torch.no_grad()
    def answer(self, given: Input) -> Answer | None:
        """Return what the model predicts for an input; None for a matcher, which gets one document twice."""
        kind = self.config.kind
        if kind == "matcher":
            return None
        device = next(self.model.parameters()).device
        arguments = [argument.to(device) for argument in given.arguments]
        if kind == "language":
            what, logits = "next token", self.model(*arguments, last=1)[0, -1]
        else:
            what, logits = "value" if self.config.data.name == "listops" else "class", self.model(*arguments)[0]
        truth = None if given.truth is None else self._name(given.truth)
        return Answer.of_logits(what, logits, self._name, truth)

    def _name(self, index: int) -> str:
        """Name a class, or the token of an id."""
        if self.config.kind == "language":
            return self.tokenizer.labels([index])[0].removesuffix(" ") or " "
        names = CLASSES.get(self.config.data.name, ())
        return names[index] if index < len(names) else str(index)

    def _limit(self, length: int | None) -> int:
        """Return the maximum number of tokens; 1 for images, where it is not used."""
        most = getattr(self.config.model, "max_length", 1)
        return most if length is None else min(check_count("--length", length), most)

    def _arguments(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Add the batch dimension. A matcher reads two documents: it gets the same one twice."""
        return (ids.expand(1, 2, -1) if self.config.kind == "matcher" else ids[None],)


def is_transformers(folder: Path) -> bool:
    """Whether a folder holds a Transformers model, not a run; both have a config.json."""
    path = folder / "config.json"
    found = read_json(path) if path.exists() else None
    return isinstance(found, dict) and "model_type" in found


def _telling(examples: Any) -> int:
    """Return the index of an example to begin with, see `Run.example`."""
    documents = getattr(examples, "documents", examples)
    if not isinstance(documents, Documents):
        return 0
    lengths = documents.lengths[:CANDIDATES]
    fitting = lengths <= TELLING
    return int(np.where(fitting, lengths, 0).argmax()) if fitting.any() else int(lengths.argmin())


def _count(examples: Any, limit: int) -> int:
    """Count the examples: full windows of a stream (at least one), the documents (not pairs) of a matcher."""
    if isinstance(examples, Stream):
        return max(1, len(examples.tokens) // limit)
    return len(getattr(examples, "documents", examples))
