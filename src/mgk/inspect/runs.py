"""Runs of `mgk train` as things to look at: their names, curves, models, and inputs with readable tokens.

B batch, N positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.data import Prepared
from mgk.data.corpora import PIECE
from mgk.data.listops import SYMBOLS
from mgk.data.splits import Images, Stream
from mgk.inspect.collect import Layer, collect
from mgk.inspect.page import byte_tokens
from mgk.ops.arguments import check_count
from mgk.train import Config, load_model
from mgk.train.config import read
from mgk.train.data import load
from mgk.variants import LABELS


@dataclass(frozen=True)
class Input:
    """What a model is called with, and what its positions are called."""

    arguments: tuple[Tensor, ...]
    tokens: Sequence[str]
    unseen: str = ""


@dataclass(frozen=True)
class Run:
    """A folder of `mgk train`."""

    folder: Path
    config: Config
    which: str = "best"
    data_root: Path | None = None

    @classmethod
    def open(cls, folder: str | Path, *, which: str = "best", data_root: Path | None = None) -> Run:
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder}: expected the folder of a run (mgk train), found no config.json in it")
        return cls(folder, read(folder / "config.json"), which, data_root)

    @property
    def name(self) -> str:
        """E.g. "sMGK, 4 heads", with what is out of the ordinary."""
        model = self.config.model
        parts = [LABELS[model.attention], f"{model.heads} head{'s' if model.heads > 1 else ''}"]
        if model.attention in ("mgk", "smgk"):
            parts += ["hard E-step"] * (model.e_step == "hard") + ["soft-E prior"] * (model.prior == "em")
        return ", ".join(parts)

    @cached_property
    def model(self) -> Any:
        """The checkpoint, on the GPU if there is one."""
        return load_model(self.folder, self.which)[0].to("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def prepared(self) -> Prepared:
        return load(self.config, self.data_root)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def log(self, event: str) -> list[dict[str, Any]]:
        """Lines of the log of one kind: "train", "valid" or "test"."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    def curve(self, event: str, metric: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric, where the log has it as a number that can be drawn."""
        points = [(line["step"], line[metric]) for line in self.log(event) if math.isfinite(line.get(metric, math.nan))]
        return [float(step) for step, _ in points], [float(value) for _, value in points]

    def of_text(self, text: str, length: int | None = None) -> Input:
        """A text as this model reads it, cut to what it can take."""
        if self.config.kind == "vision":
            raise ValueError("--text: expected a model of text, got one of images; leave it out to see a test image")
        limit = self._limit(length)
        if self.config.data.name == "listops":
            words = text.replace("(", " ").replace(")", " ").split()
            unknown = [word for word in words if word not in SYMBOLS]
            if unknown:
                raise ValueError(f"--text: expected symbols of ListOps, {' '.join(SYMBOLS)}, got {unknown[0]!r}")
            numbers, labels = [SYMBOLS.index(word) + 1 for word in words], [word + " " for word in words]
        elif self._reads_words:
            vocabulary = {word: number for number, word in enumerate(self.prepared.words)}
            lines: Iterable[list[str]] = map(str.split, text.splitlines())
            if self.config.data.name == "enwiki":
                lines = filter(None, map(PIECE.findall, text.splitlines()))
            words = [word for line in lines for word in [*line, "<eos>"]]
            unknown_number = vocabulary.get("<unk>", 0)
            numbers, labels = [vocabulary.get(word, unknown_number) for word in words], [word + " " for word in words]
        else:
            data = text.encode("utf-8", errors="replace")
            numbers, labels = [byte + self._shift for byte in data], byte_tokens(data)
        if not numbers:
            raise ValueError("--text: expected at least one token, got none")
        while limit < len(labels) and labels[limit] == "":  # the bytes of one letter stay together
            limit -= 1
        if not limit:
            raise ValueError(f"--length: expected enough for the bytes of {labels[0]!r}, got {length}")
        unseen = "".join(labels[limit:])
        return Input(self._arguments(torch.tensor(numbers[:limit])), labels[:limit], unseen)

    def of_split(self, index: int = 0, split: str = "", length: int | None = None) -> Input:
        """An example of the data, by default of the test split."""
        examples: Any = self.prepared.split(split or self.config.data.test)
        limit = self._limit(length)
        count = _count(examples, limit)
        if not 0 <= index < count:
            raise ValueError(f"--index: expected 0 to {count - 1}, got {index}")
        if isinstance(examples, Images):
            batch = examples.batch(torch.tensor([index]).numpy(), 0)
            model: Any = self.config.model
            side = model.image_size // model.patch_size
            labels = [f"r{row}c{column} " for row in range(side) for column in range(side)]
            return Input((batch["pixels"],), ["class "] * (model.pooling == "class") + labels)
        if isinstance(examples, Stream):
            row = torch.from_numpy(examples.tokens[index * limit : (index + 1) * limit].astype("int64"))
        else:
            documents = getattr(examples, "documents", examples)
            row = torch.from_numpy(documents.row(index)[:limit])
        return Input(self._arguments(row), self._labels(row))

    def examples(self, length: int | None = None) -> Iterator[Input]:
        """Inputs of the test split, one after the other."""
        for index in range(_count(self.prepared.split(self.config.data.test), self._limit(length))):
            yield self.of_split(index, length=length)

    def layers(self, given: Input) -> list[Layer]:
        """What the model's attention does with an input."""
        device = next(self.model.parameters()).device
        return collect(self.model, *(argument.to(device) for argument in given.arguments))

    def _limit(self, length: int | None) -> int:
        """How many tokens to show; an image has no such limit."""
        most = getattr(self.config.model, "max_length", 1)
        return most if length is None else min(check_count("--length", length), most)

    @property
    def _reads_words(self) -> bool:
        return self.config.kind == "language" and self.prepared.manifest["facts"].get("level") == "words"

    @property
    def _shift(self) -> int:
        return 0 if self.config.kind == "language" else 1

    def _arguments(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """A matcher reads two documents: the same one twice shows what one encoder does."""
        return (tokens.expand(1, 2, -1) if self.config.kind == "matcher" else tokens[None],)

    def _labels(self, row: Tensor) -> Sequence[str]:
        if self.config.data.name == "listops":
            return [SYMBOLS[number - 1] + " " for number in row.tolist()]
        if self._reads_words:
            words = self.prepared.words
            return [words[number].replace("<eos>", "<eos>\n") + " " for number in row.tolist()]
        return byte_tokens(bytes(number - self._shift for number in row.tolist()))


def _count(examples: Any, limit: int) -> int:
    """Whole windows of a stream, or the part of one that there is; documents, not the pairs, of a matcher."""
    if isinstance(examples, Stream):
        return max(1, len(examples.tokens) // limit)
    return len(getattr(examples, "documents", examples))
