"""A sample of a language model's text, to see what a training has reached. `mgk.hf` generates text with all options.

N positions, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgk.data import Prepared
from mgk.data.corpora import END

TEMPERATURE, TOP_P = 0.8, 0.95
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""Replace control characters but tab and newline by their code, such as \x1b: they could command a terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def sample_text(model: Any, prepared: Prepared, *, tokens: int = 200, seed: int = 0) -> str | None:
    """Return a text that a language model continues from the start of a line; None if its tokens cannot be read.

    The generators of PyTorch are left alone, so a training that takes samples is the same as one that does not.

    Args:
        model: a `LanguageModel`, which is in evaluation mode afterwards.
        prepared: the data set it is trained on, with the meaning of its tokens.
        tokens: number of tokens; the model's maximum length at most.
        seed: seed of the sampling.
    """
    known = reader(prepared)
    if known is None:
        return None
    first, count, read = known
    model.eval()
    device = next(model.parameters()).device
    limit = min(tokens + 1, model.config.max_length)
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(1, limit)
    found = [first]
    with torch.no_grad():
        while len(found) < limit:
            logits = model(torch.tensor([found[-1:]], device=device), cache=cache, last=1)[0, -1, :count]
            found.append(int(torch.multinomial(nucleus(logits.float().cpu()), 1, generator=generator)))
    return read(found[1:])


def nucleus(logits: Tensor) -> Tensor:
    """Return the probabilities (V,) of the most probable tokens that together have TOP_P; those of others are 0."""
    weights, order = (logits / TEMPERATURE).softmax(-1).sort(descending=True)
    weights[weights.cumsum(-1) - weights > TOP_P] = 0.0
    return torch.zeros_like(weights).scatter(0, order, weights)


def reader(prepared: Prepared) -> tuple[int, int, Callable[[list[int]], str]] | None:
    """Return the token that starts a line, the number of tokens, and a function that converts them to text.

    A model may have more tokens than its data. None without the library `tokenizers`, for data that needs it.
    """
    level = prepared.manifest["facts"].get("level")
    if level == "bytes":
        return ord("\n"), 256, lambda ids: bytes(ids).decode(errors="replace")
    if level == "words":
        words = prepared.words
        return (
            words.index(END),
            len(words),
            lambda ids: " ".join(words[number] for number in ids).replace(f" {END}", "\n"),
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    return tokenizer.encode("\n").ids[0], tokenizer.get_vocab_size(), lambda ids: tokenizer.decode(ids)
