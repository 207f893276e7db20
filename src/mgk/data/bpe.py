"""Texts as tokens of a byte-pair encoding (BPE) that is trained on their training part, as in GPT-2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mgk.data.splits import Array, Stream
from mgk.data.store import Built, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"  # token 0, at the end of each article
LEAST, MOST = 257, 1 << 16  # all bytes and END_OF_TEXT; ids are stored as uint16
LINES = 10_000  # encoded at once


def bpe_level(name: str, texts: dict[str, list[str]], size: int) -> Built:
    """Train a tokenizer on the training articles, and encode the articles of every split.

    Every text can be encoded and decoded without loss: its first tokens are the 256 bytes. Words are split as in
    GPT-2, and a token does not reach across the end of a line.

    Args:
        name: the data set, for error messages.
        texts: the articles of each split; each is followed by END_OF_TEXT if a split has several.
        size: tokens of the vocabulary. A short text may have fewer.
    """
    if not LEAST <= size <= MOST:
        raise DataError(f"bpe: expected {LEAST} to {MOST} tokens, or 0 for none, got {size}")
    tokenizer = train(name, texts["train"], size)
    splits = {split: encode(tokenizer, articles) for split, articles in texts.items()}
    ratios = {
        split: round(sum(len(article.encode()) for article in articles) / max(len(splits[split]), 1), 6)
        for split, articles in texts.items()
    }
    facts = {"vocabulary": tokenizer.get_vocab_size(), "level": "bpe", "bytes_per_token": ratios}
    return Built({split: Stream(tokens) for split, tokens in splits.items()}, facts, tokenizer=tokenizer.to_str())


def train(name: str, articles: list[str], size: int) -> Tokenizer:
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
    tokenizer.train_from_iterator(lines(articles), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, articles: list[str]) -> Array:
    """Return the ids of all articles."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = []
    for article in articles:
        own = list(lines([article]))
        for start in range(0, len(own), LINES):
            found = tokenizer.encode_batch(own[start : start + LINES], add_special_tokens=False)
            parts.append(np.fromiter((number for line in found for number in line.ids), np.uint16))
        if len(articles) > 1:
            parts.append(np.array([end], np.uint16))
    return np.concatenate([np.zeros(0, np.uint16), *parts])


def lines(articles: Iterable[str]) -> Iterator[str]:
    """Yield the lines of articles with their ends."""
    for article in articles:
        *whole, last = article.split("\n")
        yield from (f"{line}\n" for line in whole)
        if last:
            yield last
