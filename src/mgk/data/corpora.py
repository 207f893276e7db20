"""Texts for language models: WikiText and plain articles as words, enwik8 and your own files as bytes or with BPE."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from mgk.data.bpe import Text, bpe_level
from mgk.data.sources import Source
from mgk.data.splits import BLOCK, Array, Stream, blocks
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

    return word_level(
        source, {"train": lambda: lines("train"), "dev": lambda: lines("valid"), "test": lambda: lines("test")}
    )


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

    def articles(start: int = 0, stop: int | None = None) -> Iterator[str]:
        try:
            yield from (row["text"] for row in source.json_lines(path, start, stop))
        except (KeyError, TypeError):
            raise DataError(f"{path}: expected a field text in every line; {source.advice}") from None

    count = sum(1 for _ in articles())
    if not 0 < 2 * held_out < count:
        raise DataError(f"held_out: expected at least 1 and less than half of {count} articles, got {held_out}")
    ends = {
        "train": (0, count - 2 * held_out),
        "dev": (count - 2 * held_out, count - held_out),
        "test": (count - held_out, count),
    }

    if bpe:
        texts = {split: Text(partial(articles, *span), several=span[1] - span[0] > 1) for split, span in ends.items()}
        return bpe_level(source, texts, bpe)

    def lines(start: int, stop: int) -> Lines:
        for article in articles(start, stop):
            yield from filter(None, (PIECE.findall(line) for line in article.splitlines()))

    streams = {split: partial(lines, *span) for split, span in ends.items()}
    return word_level(source, streams, min_count, max_vocabulary)


def word_level(
    source: Source, streams: Mapping[str, Callable[[], Lines]], min_count: int = 1, max_vocabulary: int | None = None
) -> Built:
    """Number the words: <eos>, <unk>, then those of the training text, frequent ones first, for adaptive softmax."""
    if max_vocabulary is not None and max_vocabulary < 3:
        raise DataError(f"max_vocabulary: expected at least 3, got {max_vocabulary}")
    counts: Counter[str] = Counter()
    for line in streams["train"]():
        counts.update(line)
    frequent = (
        (-number, word) for word, number in counts.items() if number >= min_count and word not in (END, UNKNOWN)
    )
    words = [END, UNKNOWN, *(word for _, word in sorted(frequent))][:max_vocabulary]
    facts = {"vocabulary": len(words), "level": "words"}
    number = {word: index for index, word in enumerate(words)}
    dtype = np.uint16 if len(words) <= 1 << 16 else np.int32

    def ids(lines: Lines) -> Iterator[int]:
        """Yield the token ids of lines, each followed by <eos>."""
        return (number.get(word, 1) for line in lines for word in (*line, END))

    return Built({split: Stream(source.spool(ids(lines()), dtype)) for split, lines in streams.items()}, facts, words)


def build_enwik8(source: Source, *, bpe: int = 0) -> Built:
    """Use the bytes as tokens; the last twentieth is the test set, the one before it the dev set.

    With `bpe`, the text is encoded by a tokenizer of this size instead, and each part ends with a whole line.
    """
    with source.open(source.require("enwik8")) as file:
        content = source.spool(iter(partial(file.read, BLOCK), b""), np.uint8)
    if len(content) < 20:
        raise DataError(f"enwik8: expected at least 20 bytes, got {len(content)}; {source.advice}")
    return bytes_or_bpe(source, content, bpe)


def build_text(source: Source, *, title: str = "", bpe: int = 0) -> Built:
    """Use the bytes of your own text as tokens, or with `bpe` a tokenizer of this size that is trained on it.

    The source is a file, or a folder whose *.txt files are joined in the order of their names. The last twentieth is
    the test set, the one before it the dev set. `title` tells several texts apart.
    """
    given = source.given
    paths = [given] if given is not None and given.is_file() else sorted(given.rglob("*.txt")) if given else []
    if given is None or not paths:
        source.missing("*.txt")

    def parts() -> Iterator[bytes]:
        for number, path in enumerate(paths):
            if number:
                yield b"\n"
            with source.open(path) as file:
                yield from iter(partial(file.read, BLOCK), b"")

    content = source.spool(parts(), np.uint8)
    if len(content) < LEAST_TEXT:
        raise DataError(f"text: expected at least {LEAST_TEXT:,} bytes of text in {given}, got {len(content):,}")
    try:
        return bytes_or_bpe(source, content, bpe)
    except UnicodeDecodeError as error:
        raise DataError(f"text: {given}: expected UTF-8 with --bpe, got bytes that are not ({error.reason})") from None


def bytes_or_bpe(source: Source, content: Array, bpe: int) -> Built:
    """Split a text 90/5/5 and encode it, as bytes or, from whole line to whole line, with a trained tokenizer."""
    cut = len(content) // 20
    ends = [len(content) - count * cut for count in (2, 1, 0)]
    if bpe:
        ends = [last_line(content[:end]) for end in ends]
    parts = {
        split: content[start:end]
        for split, start, end in zip(("train", "dev", "test"), (0, *ends[:2]), ends, strict=True)
    }
    if bpe:
        return bpe_level(source, {split: Text(partial(decoded, part)) for split, part in parts.items()}, bpe)
    return Built({split: Stream(part) for split, part in parts.items()}, {"vocabulary": 256, "level": "bytes"})


def last_line(content: Array) -> int:
    """Return where the last whole line of a text ends, which is given as bytes."""
    for start in reversed(range(0, len(content), BLOCK)):
        if len(ends := np.flatnonzero(content[start : start + BLOCK] == ord("\n"))):
            return start + int(ends[-1]) + 1
    return 0


def decoded(content: Array) -> Iterator[str]:
    """Yield a text that is given as bytes, in pieces that end with a line."""
    rest = b""
    for part in blocks(content):
        whole, end, rest = (rest + part.tobytes()).rpartition(b"\n")
        yield (whole + end).decode()
    if rest:
        yield rest.decode()
