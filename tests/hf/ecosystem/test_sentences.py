"""Sentence Transformers reads a folder of an encoder or a language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgk.hf import MGKModel
from mgk.hf.tokenizer import byte_tokenizer
from tests.hf.common import config, stirred

sentences = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["classifier", "language"])
def test_sentences_are_embedded(model: str, tmp_path: Path) -> None:
    base = stirred(MGKModel(config(model, vocabulary=257)))
    base.save_pretrained(tmp_path)
    byte_tokenizer(1).save_pretrained(tmp_path)
    made = sentences.SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["a text", "another, longer", "a text"]
    found = made.encode(texts, convert_to_tensor=True)
    assert torch.equal(found[0], found[2])
    batch = byte_tokenizer(1)(texts, padding=True, return_tensors="pt")
    expected = base(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
