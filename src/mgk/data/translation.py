"""Sentences and their translations: Multi30k (English to German) and IWSLT14 (German to English), with one tokenizer.

Both languages share a byte-pair encoding that is trained on the training sentences of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mgk.data.bpe import END_OF_TEXT, LEAST, MOST, Text, train
from mgk.data.sources import Source
from mgk.data.splits import Documents, Translations
from mgk.data.store import Built, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEGMENT = re.compile(r"<seg id=\"\d+\">\s*(.*?)\s*</seg>")
IWSLT_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")  # joined, as is usual
EVERY = 23  # every 23rd training pair of IWSLT14 is in the dev set, as is usual

Sentences = list[str]
Sides = tuple[Sentences, Sentences]


def build_multi30k(source: Source, *, bpe: int = 10_000) -> Built:
    """Read {train,val,test_2016_flickr}.{en,de}, one sentence per line."""
    files = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
    return translations(
        source,
        {split: (plain(source, f"{file}.en"), plain(source, f"{file}.de")) for split, file in files.items()},
        bpe,
    )


def build_iwslt14(source: Source, *, bpe: int = 10_000) -> Built:
    """Read the files of the archive de-en: train.tags.de-en.{de,en} and IWSLT14.*.de-en.{de,en}.xml.

    Lines of train.tags that begin with a tag are not sentences. Every 23rd training pair is in the dev set. The test
    set is dev2010, dev2012 and tst2010 to tst2012, all of them together.
    """
    german, english = (
        [line for line in plain(source, f"train.tags.de-en.{language}") if not line.startswith("<")]
        for language in ("de", "en")
    )
    check_aligned("train.tags.de-en", (german, english), source)
    held_out = (german[::EVERY], english[::EVERY])
    kept: Sides = tuple([s for n, s in enumerate(side) if n % EVERY] for side in (german, english))  # type: ignore[assignment]
    test: Sides = tuple(  # type: ignore[assignment]
        [line for name in IWSLT_TESTS for line in segments(source, f"IWSLT14.{name}.de-en.{language}.xml")]
        for language in ("de", "en")
    )
    return translations(source, {"train": kept, "dev": held_out, "test": test}, bpe)


def translations(source: Source, splits: dict[str, Sides], size: int) -> Built:
    """Train a tokenizer on both sides of the training split, and encode all sentences."""
    if not LEAST <= size <= MOST:
        raise DataError(f"bpe: expected {LEAST} to {MOST} tokens, got {size}")
    for split, sides in splits.items():
        check_aligned(split, sides, source)
    tokenizer = train(source.name, Text(lambda: (line for side in splits["train"] for line in side)), size)
    if tokenizer.token_to_id(END_OF_TEXT) != 0:
        raise DataError(f"{source.name}: expected {END_OF_TEXT} as token 0 of the tokenizer")
    built = {split: Translations(*(documents(tokenizer, side) for side in sides)) for split, sides in splits.items()}
    facts = {"vocabulary": tokenizer.get_vocab_size(), "level": "bpe"}
    return Built(dict(built), facts, tokenizer=tokenizer.to_str())


def documents(tokenizer: Tokenizer, sentences: Sentences) -> Documents:
    """Encode sentences."""
    rows = [each.ids for each in tokenizer.encode_batch(sentences, add_special_tokens=False)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return Documents(np.fromiter((number for row in rows for number in row), np.uint16), offsets)


def plain(source: Source, file: str) -> Sentences:
    """Return the lines of a file, without spaces around them."""
    with source.text(source.require(file)) as lines:
        return [line.strip() for line in lines]


def segments(source: Source, file: str) -> Iterator[str]:
    """Yield the sentences of an XML file of IWSLT."""
    path: Path = source.require(file)
    with source.text(path) as lines:
        yield from (match[1] for match in map(SEGMENT.search, lines) if match)


def check_aligned(name: str, sides: Iterable[Sentences], source: Source) -> None:
    """Raise an error if a side has more sentences than the other, or none."""
    counts = [len(side) for side in sides]
    if counts[0] != counts[1] or not counts[0]:
        raise DataError(
            f"{source.name}: {name}: expected as many sentences in both languages, got {counts}; {source.advice}"
        )
