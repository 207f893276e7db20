"""Translations: the files as they are published, batches with the token 0 at both ends, and text that comes back."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mgk import data
from mgk.data import DataError, Translations
from mgk.data.splits import Documents

ENGLISH = [f"a dog number {n} runs" for n in range(46)]
GERMAN = [f"ein Hund Nummer {n} läuft" for n in range(46)]


def multi30k(raw: Path) -> None:
    for name, part in (("train", slice(40)), ("val", slice(40, 43)), ("test_2016_flickr", slice(43, 46))):
        for language, lines in (("en", ENGLISH), ("de", GERMAN)):
            content = "".join(f"{line}\n" for line in lines[part])
            (raw / f"{name}.{language}.xz").write_bytes(lzma.compress(content.encode()))


def decoded(prepared: data.Prepared, part: Documents) -> list[str]:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    return [tokenizer.decode(part.row(i).tolist()) for i in range(len(part))]


def test_multi30k(tmp_path: Path) -> None:
    multi30k(tmp_path)
    data.prepare("multi30k", source=tmp_path, root=tmp_path / "root", bpe=300)
    prepared = data.load("multi30k", root=tmp_path / "root", bpe=300)
    assert prepared.manifest["splits"] == {"train": 40, "dev": 3, "test": 3}
    test = prepared.split("test")
    assert isinstance(test, Translations)
    assert decoded(prepared, test.sources) == ENGLISH[43:]
    assert decoded(prepared, test.targets) == GERMAN[43:]
    assert prepared.manifest["facts"]["vocabulary"] <= 300
    assert test.targets.tokens.min() > 0  # 0 is the end of a sentence


def test_iwslt14(tmp_path: Path) -> None:
    """Lines with tags are left out, every 23rd pair is held out, and the test sets are joined in their order."""
    for language, lines in (("de", GERMAN), ("en", ENGLISH)):
        text = "<url>x</url>\n<title>y</title>\n" + "".join(f" {line} \n" for line in lines)
        (tmp_path / f"train.tags.de-en.{language}").write_text(text)
        for number, name in enumerate(("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")):
            body = f'<?xml?>\n<doc>\n<seg id="1"> {lines[number]} </seg>\n<description>z</description>\n</doc>\n'
            (tmp_path / f"IWSLT14.{name}.de-en.{language}.xml").write_text(body)
    data.prepare("iwslt14", source=tmp_path, root=tmp_path / "root", bpe=300)
    prepared = data.load("iwslt14", root=tmp_path / "root", bpe=300)
    assert prepared.manifest["splits"] == {"train": 44, "dev": 2, "test": 5}
    dev, test = prepared.split("dev"), prepared.split("test")
    assert isinstance(dev, Translations)
    assert isinstance(test, Translations)
    assert decoded(prepared, dev.sources) == [GERMAN[0], GERMAN[23]]
    assert decoded(prepared, test.targets) == ENGLISH[:5]


def test_sides_of_different_length_are_an_error(tmp_path: Path) -> None:
    multi30k(tmp_path)
    (tmp_path / "val.en.xz").write_bytes(lzma.compress(b"one\n"))
    with pytest.raises(DataError, match=r"dev: expected as many sentences in both languages, got \[1, 3\]"):
        data.prepare("multi30k", source=tmp_path, root=tmp_path / "root", bpe=300)


def rows(*each: list[int]) -> Documents:
    offsets = np.cumsum([0, *map(len, each)])
    return Documents(np.array([n for row in each for n in row], np.uint16), offsets)


def test_a_batch_begins_and_ends_a_target_with_zero() -> None:
    split = Translations(rows([5, 6, 7], [8]), rows([1, 2], [3, 4, 5, 6]))
    assert split.lengths.tolist() == [3, 5]
    batch = split.batch(np.array([0, 1]), 5)
    assert batch["source"].tolist() == [[5, 6, 7, 0, 0], [8, 0, 0, 0, 0]]
    assert batch["source_mask"].sum(1).tolist() == [3, 1]
    assert batch["tokens"].tolist() == [[0, 1, 2, 0, 0], [0, 3, 4, 5, 6]]
    assert batch["target"].tolist() == [[1, 2, 0, -100, -100], [3, 4, 5, 6, 0]]
    cut = split.batch(np.array([1]), 3)  # longer than the model: what is left ends like a sentence
    assert (cut["tokens"].tolist(), cut["target"].tolist()) == ([[0, 3, 4]], [[3, 4, 0]])
    kept = split.select(np.array([1]))
    assert torch.equal(kept.batch(np.array([0]), 5)["target"], batch["target"][1:])
    again = Translations.restore(split.arrays(), {})
    assert torch.equal(again.batch(np.array([0, 1]), 5)["source"], batch["source"])
