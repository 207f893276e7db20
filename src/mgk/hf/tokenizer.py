"""Transformers tokenizers for the data sets of `mgk.data`: all tokenisation of `mgk.hf` is here.

The rules and vocabularies are those of `mgk.data`, so a text gets the same token ids as in the prepared data set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.data import Prepared
from mgk.data.bpe import END_OF_TEXT
from mgk.data.corpora import END, PIECE, UNKNOWN
from mgk.data.listops import SYMBOLS

PADDING = "<pad>"


def tokenizer_of(prepared: Prepared) -> PreTrainedTokenizerFast | None:
    """Build the tokenizer of a prepared data set; None for images."""
    facts = prepared.manifest["facts"]
    if "mean" in facts:
        return None
    if prepared.name == "listops":
        tokenizer = Tokenizer(models.WordLevel({PADDING: 0} | _numbered(SYMBOLS, 1), PADDING))
        tokenizer.normalizer = normalizers.Replace(Regex(r"[()]"), " ")  # parentheses are no tokens
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return _wrapped(tokenizer, {"pad_token": PADDING})
    if facts.get("level") == "bpe":
        return _wrapped(Tokenizer.from_file(str(prepared.tokenizer)), {"eos_token": END_OF_TEXT})
    if facts.get("level") == "words":
        tokenizer = Tokenizer(models.WordLevel(_numbered(prepared.words), UNKNOWN))
        tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")  # a line ends with a token of its own
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Split(Regex(f"{END}|{PIECE.pattern}"), "removed", invert=True)
            if prepared.name == "enwiki"
            else pre_tokenizers.WhitespaceSplit()
        )
        return _wrapped(tokenizer, {"unk_token": UNKNOWN})
    return byte_tokenizer(facts.get("shift", 0))


def image_processing(prepared: Prepared) -> dict[str, Any]:
    """Return what `AutoImageProcessor` needs to prepare images as the data set does: resized, scaled, normalised."""
    facts = prepared.manifest["facts"]
    height, width = facts["image"][:2]
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": height, "width": width},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(facts["mean"]),
        "image_std": list(facts["std"]),
    }  # fmt: skip


def byte_tokenizer(shift: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer in which byte b is token b + shift. With a shift of 1, token 0 is padding."""
    vocabulary = {letter: byte + shift for byte, letter in enumerate(_letters())} | ({PADDING: 0} if shift else {})
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, {"pad_token": PADDING} if shift else {})


def _letters() -> list[str]:
    """Return the printable character that stands for each byte in GPT-2's byte-level vocabulary."""
    shown = {byte for first, last in ((33, 126), (161, 172), (174, 255)) for byte in range(first, last + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _numbered(words: Iterable[str], first: int = 0) -> dict[str, int]:
    return {word: number for number, word in enumerate(words, first)}


def _wrapped(tokenizer: Tokenizer, special: dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        padding_side="right" if "pad_token" in special else "left",  # classifiers; generation
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )
