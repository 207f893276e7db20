"""Texts for language models: WikiText and plain articles as words, enwik8 and your own files as bytes or with BPE."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from mgk.data.bpe import bpe_level
from mgk.data.sources import Source
from mgk.data.splits import Array, Stream
from mgk.data.store import Built, DataError

END, UNKNOWN = "<eos>", "<unk>"
LEAST_TEXT = 10_000  # bytes of your own text: its dev and test splits are a twentieth each
PIECE = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")  # a word, with its apostrophes, or one symbol

Lines = Iterator[list[str]]


def build_wikitext(source: Source) -> Built:
    """Split words at spaces, end every line with <eos>, and take the vocabulary from the training text."""

    def lines(file: str) -> Lines:
        if source.hub:
            rows = source.hub_rows(
                "Salesforce/wikitext", f"{source.name}-v1", split=file.replace("valid", "validation")
            )
            yield from (row["text"].split() for row in rows)
        else:
            with source.text(source.require(f"wiki.{file}.tokens")) as text:
                yield from (line.split() for line in text)

    return word_level(lambda: lines("train"), lambda: lines("valid"), lambda: lines("test"))


def build_articles(
    source: Source, *, held_out: int = 60, min_count: int = 3, max_vocabulary: int = 267_735, bpe: int = 0
) -> Built:
    """Read JSON lines with a field `text`. The last `held_out` articles are the test set, the ones before the dev set.

    Words and symbols are separate tokens, case is kept, and a line that is not empty ends with <eos>. Words that occur
    fewer than `min_count` times in the training part are <unk>, as in WikiText. With `bpe`, instead of words, the text
    is encoded by a tokenizer of this size.
    """
    named = source.given is not None and source.given.is_file()  # a folder may hold JSON lines of other sets
    path = source.find("*.jsonl" if named else "articles.jsonl", "enwiki*.jsonl") or source.missing("articles.jsonl")
    try:
        articles = [row["text"] for row in source.json_lines(path)]
    except (KeyError, TypeError):
        raise DataError(f"{path}: expected a field text in every line; {source.advice}") from None
    if not 0 < 2 * held_out < len(articles):
        raise DataError(f"held_out: expected at least 1 and less than half of {len(articles)} articles, got {held_out}")
    if bpe:
        parts = {"train": articles[: -2 * held_out], "dev": articles[-2 * held_out : -held_out]}
        return bpe_level(source.name, parts | {"test": articles[-held_out:]}, bpe)

    def lines(start: int | None, stop: int | None) -> Lines:
        for article in articles[start:stop]:
            yield from filter(None, (PIECE.findall(line) for line in article.splitlines()))

    return word_level(
        lambda: lines(None, -2 * held_out),
        lambda: lines(-2 * held_out, -held_out),
        lambda: lines(-held_out, None),
        min_count,
        max_vocabulary,
    )


def word_level(
    train: Callable[[], Lines],
    dev: Callable[[], Lines],
    test: Callable[[], Lines],
    min_count: int = 1,
    max_vocabulary: int | None = None,
) -> Built:
    """Number the words: <eos>, <unk>, then those of the training text, frequent ones first, for adaptive softmax."""
    if max_vocabulary is not None and max_vocabulary < 3:
        raise DataError(f"max_vocabulary: expected at least 3, got {max_vocabulary}")
    counts: Counter[str] = Counter()
    for line in train():
        counts.update(line)
    frequent = (
        (-number, word) for word, number in counts.items() if number >= min_count and word not in (END, UNKNOWN)
    )
    words = [END, UNKNOWN, *(word for _, word in sorted(frequent))][:max_vocabulary]
    streams = {"train": train, "dev": dev, "test": test}
    facts = {"vocabulary": len(words), "level": "words"}
    return Built({split: Stream(encode(lines(), words)) for split, lines in streams.items()}, facts, words)


def encode(lines: Lines, words: list[str]) -> Array:
    """Return the token ids of all lines, each followed by <eos>."""
    number = {word: index for index, word in enumerate(words)}
    dtype = np.uint16 if len(words) <= 1 << 16 else np.int32
    unknown = number[UNKNOWN]
    return np.fromiter((number.get(word, unknown) for line in lines for word in (*line, END)), dtype)


def build_enwik8(source: Source, *, bpe: int = 0) -> Built:
    """Use the bytes as tokens; the last twentieth is the test set, the one before it the dev set.

    With `bpe`, the text is encoded by a tokenizer of this size instead, and each part ends with a whole line.
    """
    with source.open(source.require("enwik8")) as file:
        content = file.read()
    if len(content) < 20:
        raise DataError(f"enwik8: expected at least 20 bytes, got {len(content)}; {source.advice}")
    return bytes_or_bpe(source.name, content, bpe)


def build_text(source: Source, *, title: str = "", bpe: int = 0) -> Built:
    """Use the bytes of your own text as tokens, or with `bpe` a tokenizer of this size that is trained on it.

    The source is a file, or a folder whose *.txt files are joined in the order of their names. The last twentieth is
    the test set, the one before it the dev set. `title` tells several texts apart.
    """
    given = source.given
    paths = [given] if given is not None and given.is_file() else sorted(given.rglob("*.txt")) if given else []
    if given is None or not paths:
        source.missing("*.txt")
    parts = []
    for path in paths:
        with source.open(path) as file:
            parts.append(file.read())
    content = b"\n".join(parts)
    if len(content) < LEAST_TEXT:
        raise DataError(f"text: expected at least {LEAST_TEXT:,} bytes of text in {given}, got {len(content):,}")
    if bpe:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"text: {given}: expected UTF-8, got byte {error.start} of another kind") from None
    return bytes_or_bpe(source.name, content, bpe)


def bytes_or_bpe(name: str, content: bytes, bpe: int) -> Built:
    """Split a text 90/5/5 and encode it, as bytes or, from whole line to whole line, with a trained tokenizer."""
    cut = len(content) // 20
    if not bpe:
        tokens = np.frombuffer(content, np.uint8)
        splits = {"train": tokens[: -2 * cut], "dev": tokens[-2 * cut : -cut], "test": tokens[-cut:]}
        return Built({split: Stream(part) for split, part in splits.items()}, {"vocabulary": 256, "level": "bytes"})
    ends = [content.rfind(b"\n", 0, len(content) - count * cut) + 1 for count in (2, 1, 0)]
    starts = [0, *ends[:2]]
    parts = {
        split: [content[start:end].decode()]
        for split, start, end in zip(("train", "dev", "test"), starts, ends, strict=True)
    }
    return bpe_level(name, parts, bpe)
