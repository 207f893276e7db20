"""A trained tokenizer loses nothing, is trained on the training part alone, and goes with its data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgk import data
from mgk.data import DataError, Stream
from mgk.data.bpe import END_OF_TEXT
from tests.recipes.common import TEXT

UNUSUAL = "é 🙂\t  two spaces \n\n\nx\u2028y\x0bz \n\nüü\n"  # ends of lines that are not "\n" split nothing


def prepare(name: str, raw: Path, root: Path, **options: Any) -> data.Prepared:
    data.prepare(name, source=raw, root=root, **options)
    return data.load(name, root=root, verify=True, **options)


def tokens(prepared: data.Prepared, split: str) -> list[int]:
    part = prepared.split(split)
    assert isinstance(part, Stream)
    assert part.tokens.dtype == np.uint16
    return part.tokens.tolist()  # type: ignore[no-any-return]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/enwik8").write_bytes(((TEXT + UNUSUAL) * 2).encode())
    return tmp_path / "raw"


def test_the_text_comes_back_and_parts_end_with_lines(raw: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    prepared = prepare("enwik8", raw, tmp_path, bpe=400)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    parts = {split: tokenizer.decode(tokens(prepared, split)) for split in ("train", "dev", "test")}
    assert "".join(parts.values()) == (TEXT + UNUSUAL) * 2
    assert all(part.endswith("\n") for part in parts.values())
    shares = [len(part.encode()) / len(((TEXT + UNUSUAL) * 2).encode()) for part in parts.values()]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
    facts = prepared.manifest["facts"]
    assert facts["vocabulary"] == tokenizer.get_vocab_size() == 400
    for split, part in parts.items():
        assert tokenizer.encode(part).ids == tokens(prepared, split)  # a whole text, as lines one by one
        assert facts["bytes_per_token"][split] == pytest.approx(len(part.encode()) / len(tokens(prepared, split)))
    again = prepare("enwik8", raw, tmp_path / "again", bpe=400)
    assert again.digest == prepared.digest


def test_articles_end_with_a_token_and_only_training_text_is_learned(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    articles = ["abab abab\nabab", "abab", "zzzz zzzz zzzz zzzz", "é🙂"]
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in articles))
    prepared = prepare("enwiki", tmp_path, tmp_path / "root", held_out=1, bpe=300)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer))
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end == 0
    train = tokens(prepared, "train")
    assert tokenizer.decode(train, skip_special_tokens=False) == "".join(
        f"{text}{END_OF_TEXT}" for text in articles[:2]
    )
    assert "abab" in tokenizer.get_vocab()
    assert len(tokens(prepared, "dev")) > 16  # every z, as no training text has one
    assert prepared.manifest["facts"]["vocabulary"] < 300  # there is no more to learn
    assert tokenizer.decode(tokens(prepared, "test")) == "é🙂"


@pytest.mark.parametrize("size", [256, 65_537])
def test_sizes_that_cannot_be_are_refused(raw: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(DataError, match=f"bpe: expected 257 to 65536 tokens, or 0 for none, got {size}"):
        prepare("enwik8", raw, tmp_path, bpe=size)


def test_without_the_library_there_is_advice(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"enwik8: --bpe needs `tokenizers`; type: pip install 'mgk\[data\]'"):
        prepare("enwik8", raw, tmp_path, bpe=300)
