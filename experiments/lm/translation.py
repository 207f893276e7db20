"""BLEU of a trained translator, by sacrebleu's defaults on the detokenised test set, with greedy decoding.

It needs neither tokenizers nor a network, which a GPU machine may lack: the byte-level tokens are decoded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

import mgk.data
from mgk.data import Prepared, Translations
from mgk.models import Translator
from mgk.train.data import options
from mgk.train.evaluate import load_model

BATCH = 256


def bleu(run: Path, data_root: Path | None) -> float:
    """Return the BLEU of a finished run on its test set.

    Raises ImportError without sacrebleu.
    """
    import sacrebleu  # type: ignore[import-not-found]

    model, config = load_model(run)
    prepared = mgk.data.load(config.data.name, root=data_root, **options(config))
    found, wanted = translations(model, prepared, config.data.test)
    return float(sacrebleu.corpus_bleu(found, [wanted]).score)


@torch.no_grad()
def translations(model: Translator, prepared: Prepared, split: str) -> tuple[list[str], list[str]]:
    """Return the translations of all sentences of a split, and the references."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.eval().to(device)
    examples = prepared.split(split)
    if not isinstance(examples, Translations):
        raise TypeError(f"data.name: expected a set of translations, got {prepared.name}")
    decode = Decoder(prepared.tokenizer)
    order = np.argsort(examples.sources.lengths, kind="stable")
    found = [""] * len(order)
    longest = model.config.max_length
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        length = min(longest, int(examples.sources.lengths[rows].max()))
        source, mask = (part.to(device) for part in examples.sources.padded(rows, length))
        for row, tokens in zip(rows, model.translate(source, mask, max_length=longest).tolist(), strict=True):
            found[row] = decode(tokens[: tokens.index(0)] if 0 in tokens else tokens)
    return found, [decode(examples.targets.row(row)) for row in range(len(examples))]


class Decoder:
    """Text of the tokens of a byte-level BPE."""

    def __init__(self, tokenizer: Path) -> None:
        vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
        # GPT-2 writes the 188 printable bytes of Latin-1 as themselves, and the others as characters from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = (byte for byte in range(256) if byte not in set(printable))
        byte = {chr(each): each for each in printable} | {chr(256 + n): each for n, each in enumerate(others)}
        self.parts = {
            number: bytes(byte[character] for character in token)
            for token, number in vocabulary.items()
            if all(character in byte for character in token)
        }

    def __call__(self, tokens: Iterable[int]) -> str:
        return b"".join(self.parts.get(int(token), b"") for token in tokens).decode(errors="replace")
