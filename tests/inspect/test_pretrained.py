"""Transformers models on the page: their own attention weights, their tokens and their predictions. No network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from mgk.cli import inspect as commands
from mgk.data.bpe import Text, train
from mgk.hf import MGKForCausalLM
from mgk.hf.tokenizer import byte_tokenizer
from mgk.inspect import Factors
from mgk.inspect.pretrained import pretrained_model
from mgk.inspect.tokens import SubwordTokenizer, covered
from tests.hf.common import config
from tests.inspect.common import embedded

SMALL: dict[str, Any] = {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40}
TEXT = "héllo 😀"


def save(model: Any, folder: Path, tokenizer: Any = None) -> str:
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer(0)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return save(GPT2LMHeadModel(GPT2Config(**SMALL, initializer_range=0.5)), tmp_path_factory.mktemp("gpt2"))


def words() -> PreTrainedTokenizerFast:
    """Words, between [CLS] and [SEP] as in BERT."""
    vocabulary = {name: i for i, name in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")


def test_a_language_model_shows_its_own_weights(gpt2: str) -> None:
    found = pretrained_model(gpt2, TEXT)
    ids = torch.tensor([list(TEXT.encode())])
    model = GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager").eval()
    output = model(ids, output_attentions=True)
    for layer, expected in zip(found.layers, output.attentions, strict=True):
        for head, weights in zip(layer, expected[0], strict=True):
            torch.testing.assert_close(head.rows().weights, weights)
    assert list(found.tokens) == ["h", "é", "", "l", "l", "o", " ", "😀", "", "", ""]
    assert found.answer is not None
    best = output.logits[0, -1].softmax(-1).max().detach()
    assert found.answer.options[0][1] == pytest.approx(float(best))
    assert found.answer.truth is None
    assert "GPT2LMHeadModel" in found.note


def test_a_cut_text_shows_the_rest_and_the_true_next_token(gpt2: str) -> None:
    found = pretrained_model(gpt2, "abcdef", length=4)
    assert list(found.tokens) == list("abcd")
    assert found.unseen == "ef"
    assert found.answer is not None
    assert found.answer.truth == "e"
    long = pretrained_model(gpt2, "x" * 100)
    assert len(long.tokens) == 40  # as many as the model has positions


def test_a_classifier_names_its_class_and_special_tokens(tmp_path: Path) -> None:
    settings = BertConfig(
        vocab_size=7,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label={0: "bad", 1: "good"},
    )
    found = pretrained_model(save(BertForSequenceClassification(settings), tmp_path, words()), "a  b zz")
    assert list(found.tokens) == ["[CLS] ", "a", "  b", " zz", "[SEP] "]
    assert found.answer is not None
    assert {name for name, _ in found.answer.options} == {"bad", "good"}
    assert sum(p for _, p in found.answer.options) == pytest.approx(1)


def test_an_encoder_decoder_shows_its_encoder(tmp_path: Path) -> None:
    settings = T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    found = pretrained_model(save(T5ForConditionalGeneration(settings), tmp_path), "abc")
    weights = found.layers[0][0].rows().weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    assert (weights > 0).all()  # not causal
    assert found.answer is None


def test_a_model_of_mgk_shows_its_components(tmp_path: Path) -> None:
    """Its queries and keys are stored, so every component can be seen."""
    torch.manual_seed(0)
    found = pretrained_model(save(MGKForCausalLM(config("language", vocabulary=256)), tmp_path), "abcdef")
    head = found.layers[0][0]
    assert isinstance(head, Factors)
    assert head.num_components == 2
    assert found.answer is not None


def test_the_command(gpt2: str, tmp_path: Path) -> None:
    """A folder of Transformers is recognised without --hf too."""
    for runs, names in (((), (gpt2,)), ((Path(gpt2),), ())):
        commands.explore(runs, hf=names, text="<b>abc</b>", out=tmp_path / "page.html")
        data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert data["title"] == "Inside attention"
        assert "".join(data["models"][0]["tokens"]) == "<b>abc</b>"
        assert data["models"][0]["answer"]["what"] == "next token"


def test_folders_of_the_same_name_are_told_apart(gpt2: str, tmp_path: Path) -> None:
    shutil.copytree(gpt2, tmp_path / Path(gpt2).name)
    names = (gpt2, str(tmp_path / Path(gpt2).name))
    commands.explore((), hf=names, text="abc", out=tmp_path / "page.html")
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert tuple(model["name"] for model in data["models"]) == names


def test_damaged_weights_are_not_shown(tmp_path: Path) -> None:
    """The checksums beside weights are compared before these are read."""
    save(MGKForCausalLM(config("language", vocabulary=256)), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(OSError, match=r"model.safetensors: damaged or changed"):
        commands.explore((tmp_path,), text="a")


def test_errors_say_what_to_do(gpt2: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--text: expected the input of the Transformers model"):
        commands.explore((), hf=(gpt2,))
    with pytest.raises(ValueError, match="--hf: expected the folder or the hub name of a Transformers model of text"):
        pretrained_model(str(tmp_path), "a")
    with pytest.raises(ValueError, match="--length: expected at most 40 for this Transformers model, got 41"):
        pretrained_model(gpt2, "a", length=41)
    with pytest.raises(ValueError, match="--text: expected at least one token, got none"):
        pretrained_model(gpt2, "")
    mamba = MambaModel(MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match=r"--hf: expected a model that returns its attention .* returned none"):
        pretrained_model(save(mamba, tmp_path / "mamba"), "a")


def test_every_character_belongs_to_one_token() -> None:
    assert covered("a  b", [(0, 1), (3, 4)]) == ["a", "  b"]
    assert covered("😀", [(0, 1), (0, 1)]) == ["😀", ""]
    assert covered("ab", [(0, 0), (0, 2), (0, 0)], ["<s>", None, "</s>"]) == ["<s> ", "ab", "</s> "]


def test_subwords_of_a_run_have_readable_labels() -> None:
    """Of a text and of ids; ids that start inside a character are decoded one by one."""
    tokenizer = SubwordTokenizer(train("test", Text(lambda: iter(["the cat and the dog 😀 " * 50])), 300))
    ids, labels = tokenizer.encode("the cat 😀")
    assert "".join(labels) == "the cat 😀"
    assert labels[0] == "the"
    assert tokenizer.labels(ids) == labels
    split, _ = tokenizer.encode("é")
    assert tokenizer.labels(split[1:]) == ["\ufffd"]
