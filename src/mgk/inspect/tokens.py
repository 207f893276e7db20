"""Convert text to the token ids that a model reads, and ids to readable labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mgk.data.corpora import END, PIECE, UNKNOWN
from mgk.data.listops import SYMBOLS


def byte_tokens(data: bytes) -> list[str]:
    """Return one label per byte of a UTF-8 text: the first byte of a character has the character, the others ""."""
    text = data.decode("utf-8", errors="replace")
    labels: list[str] = []
    for character in text:
        labels += [character] + [""] * (len(character.encode("utf-8")) - 1)
    # Decoding replaces one to three invalid bytes by one character: label such data byte by byte.
    if len(labels) == len(data) and "\ufffd" not in text:
        return labels
    return [chr(byte) if 32 <= byte < 127 or byte == 10 else f"\\x{byte:02x}" for byte in data]


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokens are bytes; the id of a byte is byte + shift."""

    shift: int

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """Return the ids and labels of a text."""
        data = text.encode("utf-8", errors="replace")
        return [byte + self.shift for byte in data], byte_tokens(data)

    def labels(self, ids: Iterable[int]) -> list[str]:
        return byte_tokens(bytes(number - self.shift for number in ids))


@dataclass(frozen=True)
class WordTokenizer:
    """Tokens are the words of a vocabulary; words outside it keep their label and get the id of <unk>."""

    words: Sequence[str]
    """The word of each id."""
    split: Callable[[str], list[str]]

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """Return the ids and labels of a text."""
        numbers = {word: number for number, word in enumerate(self.words)}
        words = self.split(text)
        return [numbers.get(word, numbers.get(UNKNOWN, 0)) for word in words], [f"{word} " for word in words]

    def labels(self, ids: Iterable[int]) -> list[str]:
        return [self.words[number].replace(END, f"{END}\n") + " " for number in ids]


@dataclass(frozen=True)
class SubwordTokenizer:
    """Tokens are those of a tokenizer of the `tokenizers` library."""

    tokenizer: Any

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """Return the ids and labels of a text."""
        found = self.tokenizer.encode(text)
        return found.ids, covered(text, found.offsets)

    def labels(self, ids: Iterable[int]) -> list[str]:
        """Return the label of each id; characters that a cut has split are shown as U+FFFD."""
        ids = list(ids)
        again, labels = self.encode(self.tokenizer.decode(ids, skip_special_tokens=False))
        return labels if again == ids else [self.tokenizer.decode([each], skip_special_tokens=False) for each in ids]


def covered(
    text: str, offsets: Iterable[tuple[int, int]], special: Iterable[str | None] = itertools.repeat(None)
) -> list[str]:
    """Return the part of a text that each token adds, with what stands between it and the token before.

    A token that adds nothing, such as the second byte of a character, gets ""; a special one gets its name.
    """
    labels, at = [], 0
    for (_, end), name in zip(offsets, special, strict=False):
        labels.append(text[at:end] if name is None else f"{name} ")
        at = at if name is not None else max(at, end)
    return labels


def wikitext_words(text: str) -> list[str]:
    """Split at white space; every line ends with <eos>."""
    return [word for line in text.splitlines() for word in [*line.split(), END]]


def article_words(text: str) -> list[str]:
    """Split into words and punctuation marks; every line that is not empty ends with <eos>."""
    return [word for line in text.splitlines() if PIECE.search(line) for word in [*PIECE.findall(line), END]]


def listops_symbols(text: str) -> list[str]:
    """Split into symbols of ListOps, without the parentheses."""
    symbols = text.replace("(", " ").replace(")", " ").split()
    for symbol in symbols:
        if symbol not in SYMBOLS:
            raise ValueError(f"--text: expected symbols of ListOps, {' '.join(SYMBOLS)}, got {symbol!r}")
    return symbols
