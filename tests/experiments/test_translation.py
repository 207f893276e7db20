"""The text of translations, without the library that made the tokens, and their BLEU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import mgk.data
from experiments.lm.translation import Decoder, bleu, translations
from mgk.data import Translations
from mgk.models import Translator
from mgk.train import replace, train
from tests.recipes.common import small


def test_text_is_decoded_as_the_tokenizer_does(tmp_path: Path) -> None:
    lines = ["Zwei Männer, größer als 3 €", "a\tb  c", "naïve ¡ 日本"]
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
    mgk.data.prepare("multi30k", source=tmp_path, root=tmp_path / "root", bpe=270)
    prepared = mgk.data.load("multi30k", root=tmp_path / "root", bpe=270)
    split = prepared.split("test")
    assert isinstance(split, Translations)
    decode, library = Decoder(prepared.tokenizer), Tokenizer.from_file(str(prepared.tokenizer))
    for row, line in enumerate(lines):
        tokens = split.targets.row(row).tolist()
        assert decode(tokens) == library.decode(tokens) == line


def test_bleu_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives the references scores 100, and one of six steps almost nothing."""
    config = small("multi30k", tmp_path)
    run = tmp_path / "run"
    train(config, run, data_root=tmp_path)
    prepared = mgk.data.load("multi30k", root=tmp_path, bpe=300)
    split = prepared.split("test")
    assert isinstance(split, Translations)
    known = {tuple(split.sources.row(n).tolist()): split.targets.row(n).tolist() for n in range(len(split))}

    def perfect(self: Translator, source: Any, mask: Any, *, max_length: int) -> torch.Tensor:
        rows = [known[tuple(row[: int(kept.sum())].tolist())] for row, kept in zip(source, mask, strict=True)]
        return torch.tensor([[*row, *[0] * (max_length - len(row))] for row in rows])

    with monkeypatch.context() as patch:
        patch.setattr(Translator, "translate", perfect)
        found, wanted = translations(Translator(config.model), prepared, "test")  # type: ignore[arg-type]
        assert found == wanted
        if pytest.importorskip("sacrebleu"):
            assert bleu(run, tmp_path) == pytest.approx(100)
    assert bleu(run, tmp_path) < 50


def test_what_reads_one_sequence_refuses_a_translator(tmp_path: Path) -> None:
    from mgk.hf.config import MGKConfig
    from mgk.hf.convert import from_run
    from mgk.inspect.runs import Run

    config = small("multi30k", tmp_path)
    run = tmp_path / "run"
    train(replace(config, steps=1, optimiser__warmup=1), run, data_root=tmp_path)
    with pytest.raises(ValueError, match="expected a model that reads one sequence, got a translator"):
        Run.open(run)
    with pytest.raises(ValueError, match=r"expected a run of a classifier or .* got one of translation"):
        from_run(run)
    with pytest.raises(TypeError, match=r"config: expected one of mgk\.models, ClassifierConfig"):
        MGKConfig.from_model(config.model)
