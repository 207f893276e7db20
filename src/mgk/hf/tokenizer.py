"""The tokenizer of a prepared data set, as Transformers has them: the same numbers as in the set's own arrays."""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgk.data import Prepared
from mgk.data.corpora import END, PIECE, UNKNOWN
from mgk.data.listops import SYMBOLS

PADDING = "<pad>"


def tokenizer_of(prepared: Prepared) -> PreTrainedTokenizerFast | None:
    """Of a set of texts; None for images."""
    facts = prepared.manifest["facts"]
    if "mean" in facts:
        return None
    if prepared.name == "listops":
        return _words({symbol: number for number, symbol in enumerate(SYMBOLS, 1)} | {PADDING: 0}, pad=True)
    if facts.get("level") == "words":
        words = {word: number for number, word in enumerate(prepared.words)}
        return _words(words, pieces=PIECE.pattern if prepared.name == "enwiki" else None)
    return byte_tokenizer(facts.get("shift", 0))


def byte_tokenizer(shift: int) -> PreTrainedTokenizerFast:
    """A byte b is the token b + shift; below the shift is padding."""
    vocabulary = {letter: byte + shift for byte, letter in enumerate(_letters())} | ({PADDING: 0} if shift else {})
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, {"pad_token": PADDING} if shift else {})


def _letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (that of GPT-2)."""
    shown = {byte for first, last in ((33, 126), (161, 172), (174, 255)) for byte in range(first, last + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def _words(vocabulary: dict[str, int], *, pieces: str | None = None, pad: bool = False) -> PreTrainedTokenizerFast:
    unknown = {} if pad else {"unk_token": UNKNOWN}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, PADDING if pad else UNKNOWN))
    if pad:  # ListOps: brackets are for people
        tokenizer.normalizer = normalizers.Replace(Regex(r"[()]"), " ")
    else:  # a line ends with a token of its own
        tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")
    tokenizer.pre_tokenizer = (
        pre_tokenizers.WhitespaceSplit()
        if pieces is None
        else pre_tokenizers.Split(Regex(f"{END}|{pieces}"), "removed", invert=True)
    )
    return _wrapped(tokenizer, unknown | ({"pad_token": PADDING} if pad else {}))


def _wrapped(tokenizer: Tokenizer, special: dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        padding_side="right" if "pad_token" in special else "left",  # as classifiers are trained; as texts go on
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )
