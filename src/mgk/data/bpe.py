"""Texts as tokens of a byte-pair encoding (BPE) that is trained on their training part, as in GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from mgk.data.sources import Source
from mgk.data.splits import Stream
from mgk.data.store import Built, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"  # token 0, at the end of each article
LEAST, MOST = 257, 1 << 16  # all bytes and END_OF_TEXT; ids are stored as uint16
LINES = 10_000  # encoded at once


@dataclass
class Text:
    """A split to encode."""

    pieces: Callable[[], Iterator[str]]
    """Reads it again from the start: articles, or parts of one text that end with a line."""
    several: bool = False
    """Whether the pieces are articles, each followed by END_OF_TEXT."""
    size: int = 0
    """UTF-8 bytes of the pieces that were encoded."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of all pieces with their ends."""
        return (line for piece in self.pieces() for line in lines(piece))


def bpe_level(source: Source, texts: dict[str, Text], size: int) -> Built:
    """Train a tokenizer on the training text, and encode every split.

    Every text can be encoded and decoded without loss: its first tokens are the 256 bytes. Words are split as in
    GPT-2, and a token does not reach across the end of a line.

    Args:
        source: the data set.
        texts: the splits.
        size: tokens of the vocabulary. A short text may have fewer.
    """
    if not LEAST <= size <= MOST:
        raise DataError(f"bpe: expected {LEAST} to {MOST} tokens, or 0 for none, got {size}")
    tokenizer = train(source.name, texts["train"], size)
    splits = {split: source.spool(encode(tokenizer, text), np.uint16) for split, text in texts.items()}
    ratios = {split: round(text.size / max(len(splits[split]), 1), 6) for split, text in texts.items()}
    facts = {"vocabulary": tokenizer.get_vocab_size(), "level": "bpe", "bytes_per_token": ratios}
    return Built({split: Stream(tokens) for split, tokens in splits.items()}, facts, tokenizer=tokenizer.to_str())


def train(name: str, text: Text, size: int) -> Tokenizer:
    """Train the tokenizer."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError(f"{name}: --bpe needs `tokenizers`; type: pip install 'mgk[data]'") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.lines(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: Text) -> Iterator[int]:
    """Yield the ids of all pieces."""
    end: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    for piece in text.pieces():
        text.size += len(piece.encode())
        own = lines(piece)
        while batch := list(islice(own, LINES)):
            for line in tokenizer.encode_batch(batch, add_special_tokens=False):
                yield from line.ids
        if text.several:
            yield end


def lines(text: str) -> Iterator[str]:
    """Yield the lines of a text with their ends."""
    *whole, last = text.split("\n")
    yield from (f"{line}\n" for line in whole)
    if last:
        yield last
