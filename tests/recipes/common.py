"""Every recipe made small, with small data in the format of the real one.

Texts are the project's licence, real English; images are noise around one pattern and brightness per class.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mgk.data
from mgk.recipes import recipe
from mgk.train import Config, replace

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "LICENSE").read_text()  # English that nobody edits
SMALL: dict[str, Any] = {
    "model__layers": 1,
    "model__dropout": 0.0,  # golden curves hold on machines whose random bits differ
    "model__attention_dropout": 0.0,
    "optimiser__lr": 5e-3,
    "optimiser__warmup": 10,
    "steps": 60,
    "eval_every": 20,
    "log_every": 10,
    "data__batch": 16,
    "data__valid_batch": 50,
    "workers": 0,
    "device": "cpu",
}
SEQUENCES = {"model__width": 32, "model__hidden": 32, "model__heads": 2, "model__head_dim": 16}
LANGUAGE = {**SEQUENCES, "model__max_length": 32, "data__batch": 4, "optimiser__lr": 5e-3}
GOOD, BAD = ("a fine film", "great fun", "we loved it"), ("a dull mess", "awful waste", "we left early")


def reviews(folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    rows = []
    for split, count in (("train", 220), ("test", 60)):
        for number in range(count):
            label = number % 2
            words = random.choice((BAD, GOOD)[label], 3)
            rows.append({"split": split, "label": label, "text": f"Number {number}: " + ", ".join(words)})
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"held_out": 40}


def papers(folder: Path) -> dict[str, Any]:
    """Pairs of one topic, or of two."""
    random = np.random.default_rng(0)
    topics = ("parsing trees", "speech sounds")
    for name, count in (("train", 200), ("eval", 50), ("test", 50)):
        lines = []
        for number in range(count):
            first = int(random.integers(2))
            label = number % 2
            second = first if label else 1 - first
            lines.append(f"{float(label)}\t1\t2\tb'{topics[first]} {number}'\tb'{topics[second]} {number % 7}'\n")
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(lines))
    return {}


def patterns(count: int, size: int, channels: int, seed: int) -> tuple[Any, Any]:
    labels = np.arange(count) % 10
    shapes = np.random.default_rng(7).integers(0, 40, (10, size, size, channels))
    shapes += 20 * np.arange(10)[:, None, None, None]
    noise = np.random.default_rng(seed).integers(0, 36, (count, size, size, channels))
    return (shapes[labels] + noise).astype(np.uint8), labels.astype(np.uint8)


def clothes(folder: Path) -> dict[str, Any]:
    for part, count in (("train", 250), ("t10k", 50)):
        pixels, labels = patterns(count, 28, 1, count)
        head = struct.pack(">I", 0x803) + struct.pack(">III", count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes()))
        head = struct.pack(">I", 0x801) + struct.pack(">I", count)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(head + labels.tobytes()))
    return {"held_out": 50}


def photographs(folder: Path) -> dict[str, Any]:
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    for name, count in (("data_batch_1", 250), ("test_batch", 50)):
        pixels, labels = patterns(count, 32, 3, count)
        rows = np.concatenate([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(count, -1)], 1)
        (batches / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    return {"held_out": 50}


def words(folder: Path) -> dict[str, Any]:
    """With <unk> for what comes once, as in WikiText."""
    counts = Counter(TEXT.split())
    lines = [" ".join(w if counts[w] > 1 else "<unk>" for w in line.split()) + "\n" for line in TEXT.splitlines()]
    cut = len(lines) // 8
    for name, part in (("train", lines[2 * cut :]), ("valid", lines[cut : 2 * cut]), ("test", lines[:cut])):
        (folder / f"wiki.{name}.tokens").write_text("".join(part))
    return {}


def articles(folder: Path) -> dict[str, Any]:
    parts = [part for part in TEXT.split("\n\n") if part.strip()]
    (folder / "articles.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return {"held_out": 5, "min_count": 2}


def letters(folder: Path) -> dict[str, Any]:
    (folder / "enwik8").write_bytes(TEXT.encode())
    return {}


def with_tokenizer(make: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """The same text, with a tokenizer of 300 tokens trained on it."""

    def prepared(folder: Path) -> dict[str, Any]:
        return {name: value for name, value in make(folder).items() if name == "held_out"} | {"bpe": 300}

    return prepared


def captions(folder: Path) -> dict[str, Any]:
    """A language that writes every word backwards."""
    words = sorted(set(TEXT.split()))
    random = np.random.default_rng(0)
    for name, count in (("train", 250), ("val", 50), ("test_2016_flickr", 50)):
        lines = [random.choice(words[::20], 4).tolist() for _ in range(count)]
        (folder / f"{name}.en").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.de").write_text("".join(" ".join(word[::-1] for word in line) + "\n" for line in lines))
    return {"bpe": 300}


def nothing(folder: Path) -> dict[str, Any]:
    return {"sizes": (300, 50, 50), "lengths": (3, 12), "depth": 2, "arguments": 3}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "lra-listops": (nothing, {**SEQUENCES, "model__max_length": 16, "data__pad_multiple": 16}),
    "lra-text": (reviews, {**SEQUENCES, "model__max_length": 48, "data__pad_multiple": 16}),
    "lra-retrieval": (papers, {**SEQUENCES, "model__max_length": 20, "data__pad_multiple": 20}),
    "lra-image": (photographs, {**SEQUENCES, "data__batch": 8, "steps": 24, "eval_every": 24}),
    "wikitext103": (words, {**LANGUAGE, "model__vocabulary": 400, "model__cutoffs": (50, 100)}),
    "wikitext2": (words, {**LANGUAGE, "model__vocabulary": 400, "model__cutoffs": ()}),
    "enwiki": (articles, {**LANGUAGE, "model__vocabulary": 800, "model__cutoffs": (200,)}),
    "enwik8": (letters, {**LANGUAGE, "eval_batches": 2}),
    "lm": (letters, {**LANGUAGE, "eval_batches": 2}),
    "lm-small": (with_tokenizer(articles), {**LANGUAGE, "model__vocabulary": 300}),
    "lm-medium": (with_tokenizer(articles), {**LANGUAGE, "model__vocabulary": 300, "model__attention": "softmax"}),
    "lm-nano-cpu": (with_tokenizer(letters), {**LANGUAGE, "model__vocabulary": 300, "model__attention": "mlk"}),
    "multi30k": (captions, {**SEQUENCES, "model__vocabulary": 300, "model__decoder_layers": 1}),
    "fashion-mnist": (clothes, {**SEQUENCES, "model__patch_size": 7}),
    "cifar10": (photographs, {**SEQUENCES, "model__patch_size": 8}),
}


def small(name: str, folder: Path) -> Config:
    """The recipe, cut down, with its data prepared under `folder`."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    make, changes = CASES[name]
    options = make(raw)
    config = recipe(name)
    mgk.data.prepare(config.data.name, source=raw if any(raw.iterdir()) else None, root=folder, **options)
    text = tuple(f"{key}={list(v) if isinstance(v, tuple) else v}" for key, v in options.items())
    return replace(config, **(SMALL | changes | {"data__options": text}))
