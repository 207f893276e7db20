"""`mgk convert --from`: models of every kind are loaded by their class, halved, measured, tuned and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from mgk.cli.hf import convert, generate
from mgk.hf.batches import hide, images_of_folder, texts_of_file
from mgk.hf.tokenizer import byte_tokenizer
from mgk.merge import Imitation, finetune, mean_loss, merge_heads
from mgk.merge.foreign import auto_name
from mgk.train import train
from mgk.train.config import replace
from tests.hf.common import DEEP, foreign, stirred
from tests.recipes.common import TEXT, small

SHORT: dict[str, Any] = {"length": 12, "windows": 4, "batch": 8, "finetune": 2}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT[:3000])
    return path


def encoder(folder: Path, kind: str) -> Path:
    """Write a BERT model and a tokenizer of words with [CLS], [SEP] and [MASK]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT[:3000].split()))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    settings = BertConfig(**DEEP, vocab_size=len(words), num_attention_heads=4, max_position_embeddings=20)
    stirred(getattr(transformers, kind)(settings)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("BertForMaskedLM", "cross-entropy of masked tokens"),
        ("BertForSequenceClassification", "distance to the outputs of the original model"),
        ("BertForTokenClassification", "distance to the outputs of the original model"),
        ("BertForQuestionAnswering", "distance to the outputs of the original model"),
        ("BertModel", "distance to the outputs of the original model"),
    ],
)
def test_an_encoder_is_halved_on_a_text(kind: str, objective: str, tmp_path: Path, text: Path) -> None:
    folder = encoder(tmp_path / "model", kind)
    convert((tmp_path / "half",), from_=str(folder), heads_to_mixtures=True, text=text, **SHORT)
    report = json.loads((tmp_path / "half/merge.json").read_text())
    assert (report["objective"], report["heads"]) == (objective, [4, 2])
    assert set(report["loss"]) == {"before", "merged", "tuned"}
    if "distance" in objective:  # of the original to itself
        assert report["loss"]["before"] == 0 < report["loss"]["merged"]
    loaded = getattr(transformers, auto_name(kind)).from_pretrained(tmp_path / "half")
    assert type(loaded).__name__ == f"Mixture{kind}"
    assert AutoTokenizer.from_pretrained(tmp_path / "half").mask_token == "[MASK]"


def test_a_model_of_images_is_halved_on_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images/more").mkdir(parents=True)
    for i in range(6):
        pixels = torch.randint(256, (10, 12, 3), generator=torch.Generator().manual_seed(i)).byte()
        image.fromarray(pixels.numpy()).save(tmp_path / "images" / ("more" if i % 2 else ".") / f"{i}.png")
    folder = tmp_path / "vit"
    torch.manual_seed(0)
    config = ViTConfig(**DEEP, num_attention_heads=4, image_size=8, patch_size=2)
    stirred(ViTForImageClassification(config)).save_pretrained(folder)
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"--images: expected a folder of images .* as .*vit reads images, got none"):
        convert((tmp_path / "none",), from_=str(folder), heads_to_mixtures=True)
    with pytest.raises(ValueError, match=r"--images: expected at least 2 windows of text or images, got 0 in .*vit"):
        convert((tmp_path / "none",), from_=str(folder), heads_to_mixtures=True, images=folder)
    convert((tmp_path / "half",), from_=str(folder), heads_to_mixtures=True, images=tmp_path / "images", finetune=1)
    assert json.loads((tmp_path / "half/merge.json").read_text())["heads"] == [4, 2]
    half = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "half")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "half")
    batch = next(images_of_folder(processor, tmp_path / "images", 4, 2).valid())
    assert half(**batch).logits.shape == (1, 2)


def test_a_masked_text_hides_the_same_words_in_every_call() -> None:
    rows = torch.arange(5, 45).view(4, 10)
    special = torch.zeros(4, 10, dtype=torch.bool)
    special[:, 0] = True
    columns = hide(rows, special, 3)
    hidden = columns["input_ids"] == 3
    assert torch.equal(hide(rows, special, 3)["input_ids"], columns["input_ids"])
    assert hidden.any(1).all()
    assert not hidden[:, 0].any()
    assert torch.equal(torch.where(hidden, rows, -100), columns["labels"])
    with pytest.raises(ValueError, match="whose tokenizer has a mask token, got none"):
        hide(rows, special, None)


def test_the_last_tenth_of_a_text_is_not_trained_on(text: Path) -> None:
    model, _ = foreign("gpt2")
    texts = texts_of_file(model, byte_tokenizer(0), text, 4, 20, 8)

    def rows(batches: Any) -> set[tuple[int, ...]]:
        return {tuple(row.tolist()) for batch in batches for row in batch["input_ids"]}

    assert len(rows(texts.calibration())) == 4
    assert rows(texts.calibration()) < rows(texts.training())
    assert (len(rows(texts.training())), len(rows(texts.valid()))) == (135, 15)
    assert rows(texts.training()).isdisjoint(rows(texts.valid()))


def test_a_model_that_imitates_comes_nearer_and_leaves_the_original() -> None:
    model, batch = foreign("bert")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small = Imitation(merge_heads(model, [batch])[0], model)
    assert mean_loss(Imitation(model, model), [batch]) == 0
    for module in small.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    far = mean_loss(small, [batch])
    finetune(small, [batch], steps=10, lr=1e-3)
    assert mean_loss(small, [batch]) < far
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(name.startswith("_original") for name in small.state_dict())


def test_the_distance_is_the_divergence_of_the_distributions() -> None:
    from mgk.merge.tuning import distance

    found, wanted = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    p, q = wanted.softmax(-1), found.softmax(-1)
    torch.testing.assert_close(distance(found, wanted, "logits"), (p * (p / q).log()).sum(-1).mean())
    torch.testing.assert_close(distance(found, wanted, "last_hidden_state"), _relative(found, wanted))
    torch.testing.assert_close(distance(found[:, :1], wanted[:, :1], "logits"), _relative(found[:, :1], wanted[:, :1]))


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean() / wanted.square().mean()


def test_the_card_of_a_conversion_has_its_figures(tmp_path: Path, text: Path) -> None:
    folder = encoder(tmp_path / "bert-*x*", "BertForMaskedLM")  # a name that is no markup
    convert((tmp_path / "half",), from_=str(folder), heads_to_mixtures=True, text=text, **SHORT)
    report, card = json.loads((tmp_path / "half/merge.json").read_text()), (tmp_path / "half/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: fill-mask\ntags:\n- mgk\n")
    assert "# bert-\\*x\\*, 2 heads" in card
    rows = " ".join(card.split())  # columns are aligned with spaces
    for name in ("parameters", "cache"):
        before, after = report[name]
        assert f"| {before:,} | {after:,} |" in rows
    loss = {name: f"{value:.4f}" for name, value in report["loss"].items()}
    assert f"| loss, not tuned | {loss['before']} | {loss['merged']} |" in rows
    assert f"| loss, after 2 steps of tuning | {loss['before']} | {loss['tuned']} |" in rows
    assert "cross-entropy of masked tokens" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card
    assert str(tmp_path) not in card


def test_a_run_is_halved_on_its_own_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "half"
    settings = replace(small("enwik8", tmp_path), steps=4, eval_every=2, log_every=2, optimiser__warmup=1)
    train(replace(settings, model__attention="softmax"), run, data_root=tmp_path)
    convert((out,), from_=str(run), heads_to_mixtures=True, finetune=2, windows=4, data_root=tmp_path)
    shown = capsys.readouterr().out
    report = json.loads((out / "merge.json").read_text())
    assert report["heads"] == [2, 1]
    assert f"merged {report['loss']['merged']:.4f}" in shown
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.attention, model.config.heads) == ("mgk", 1)
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"] == [97]
    assert "## Conversion of the heads" in (out / "README.md").read_text()
    convert((tmp_path / "pool",), from_=str(run), pool=True, windows=4, data_root=tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "pool").config
    assert (config.attention, config.heads, config.num_kv_heads) == ("softmax", 2, 1)


def test_a_language_model_is_halved_on_a_text(tmp_path: Path, text: Path) -> None:
    torch.manual_seed(0)
    settings = foreign("gpt2")[0].config
    settings.vocab_size = 257
    GPT2LMHeadModel(settings).save_pretrained(tmp_path / "gpt")
    byte_tokenizer(1).save_pretrained(tmp_path / "gpt")
    options: dict[str, Any] = {"from_": str(tmp_path / "gpt"), "length": 16, "windows": 4}
    with pytest.raises(ValueError, match="--text: expected a file"):
        convert((tmp_path / "none",), heads_to_mixtures=True, **options)
    with pytest.raises(ValueError, match="one of --heads-to-mixtures, --drop and --pool with it, got 2"):
        convert((tmp_path / "none",), drop=True, pool=True, **options)
    for name, value, expected in (
        ("length", 64, "at most 32, the positions of the model"), ("length", 0, "at least 1"),
        ("batch", 0, "at least 1"), ("windows", 0, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--{name}: expected {expected}, got {value}"):
            convert((tmp_path / "none",), drop=True, text=text, **options | {name: value})
    convert((tmp_path / "half",), heads_to_mixtures=True, text=text, **options)
    convert((tmp_path / "drop",), drop=True, text=text, **options)
    for name, components in (("half", 2), ("drop", 1)):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.mixture_components == components
    with pytest.raises(ValueError, match=r"--tokens: expected at most 29 after this prompt .*, got 30"):
        generate(tmp_path / "half", prompt="Lic", tokens=30, device="cpu")


def test_a_model_of_another_family_is_an_error(tmp_path: Path, text: Path) -> None:
    transformers.BloomConfig(architectures=["BloomForCausalLM"]).save_pretrained(tmp_path / "bloom")
    with pytest.raises(ValueError, match=r"--from: expected a model of one of GPT2, .* got BloomForCausalLM"):
        convert((tmp_path / "none",), from_=str(tmp_path / "bloom"), heads_to_mixtures=True, text=text)
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"--from: .* got none in its config.json"):
        convert((tmp_path / "none",), from_=str(tmp_path / "bert"), heads_to_mixtures=True, text=text)
