"""The Transformers model classes compute the same as `mgk.models`, and can be saved, loaded and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mgk.hf import MGKConfig, MGKForCausalLM, MGKForSequenceClassification, MGKModel
from mgk.hf.config import MODELS
from mgk.merge.sums import SUMS
from mgk.models import build
from mgk.nn.output import IGNORE
from tests.hf.common import CLASSES, config, inputs, make, same_weights, stirred
from tests.models.common import MODERN

AUTO = {
    "classifier": transformers.AutoModelForSequenceClassification,
    "matcher": transformers.AutoModelForNextSentencePrediction,
    "language": transformers.AutoModelForCausalLM,
    "vision": transformers.AutoModelForImageClassification,
}
every_model = pytest.mark.parametrize("model", MODELS)


@every_model
def test_outputs_equal_those_of_mgk_models(model: str) -> None:
    wrapped, batch = make(model), inputs(model)
    plain = build(wrapped.config.to_model()).eval()
    plain.load_state_dict(wrapped.mgk.state_dict())
    first = batch["pixel_values"] if model == "vision" else batch["input_ids"]
    mask = (batch["attention_mask"].bool(),) if "attention_mask" in batch else ()
    found = wrapped(**batch)
    torch.testing.assert_close(found.logits, plain(first, *mask), rtol=0, atol=0)
    if model == "language":
        target = torch.cat((first[:, 1:], torch.full((2, 1), IGNORE)), 1)
        expected = plain.loss({"tokens": first, "target": target})["loss"]
    else:
        expected = torch.nn.functional.cross_entropy(found.logits, batch["labels"])
    torch.testing.assert_close(found.loss, expected)


@every_model
@pytest.mark.parametrize("kind", ["softmax", "linear", "mgk-variance", "smgk-positions", "mlk", "smlk-favor"])
def test_saved_in_shards_and_loaded_by_auto_class(model: str, kind: str, tmp_path: Path) -> None:
    made, batch = make(model, kind), inputs(model)
    made.save_pretrained(tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AUTO[model].from_pretrained(tmp_path)
    assert type(loaded) is CLASSES[model]
    before, after = made(**batch), loaded(**batch)
    assert same_weights(made, loaded)
    torch.testing.assert_close(before.logits, after.logits)
    torch.testing.assert_close(before.loss, after.loss)  # an adaptive softmax has a buffer that is not saved


@every_model
def test_embeddings_of_a_saved_model(model: str, tmp_path: Path) -> None:
    """The base model loads the file of any task, and its last hidden state is the input of the head."""
    made = make(model)
    made.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, MGKModel)
    batch = {name: value for name, value in inputs(model).items() if name != "labels"}
    if model == "matcher":
        batch = {name: value[:, 0] for name, value in batch.items()}
    found = base(**batch, output_hidden_states=True)
    hidden, pooled = found.last_hidden_state, found.pooler_output
    assert len(found.hidden_states) == made.config.layers + 1
    if model == "language":
        torch.testing.assert_close(made.mgk.output(hidden, made.mgk.encoder.tokens.weight), made(**batch).logits)
    elif model == "matcher":
        torch.testing.assert_close(pooled, made.mgk.pooled(batch["input_ids"], batch["attention_mask"].bool()))
    else:
        torch.testing.assert_close(made.mgk.classifier(pooled), made(**batch).logits)
    if model == "vision":
        torch.testing.assert_close(pooled, hidden.mean(1))


def test_a_new_model_has_the_initial_values_of_mgk_models() -> None:
    settings = config("language", norm="pre")
    torch.manual_seed(3)
    expected = build(settings.to_model()).state_dict()
    torch.manual_seed(3)
    found = MGKForCausalLM(settings).mgk.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_missing_head_has_initial_values_too(tmp_path: Path) -> None:
    MGKModel(config("classifier")).save_pretrained(tmp_path)
    settings = config("classifier")
    torch.manual_seed(3)
    whole: Any = build(settings.to_model())
    fresh = whole.classifier.state_dict()
    torch.manual_seed(3)
    found = MGKForSequenceClassification.from_pretrained(tmp_path).mgk.classifier.state_dict()
    assert all(torch.equal(found[name], value) for name, value in fresh.items())


@every_model
@pytest.mark.parametrize("kind", ["smgk-em", "smlk"])
def test_gradient_checkpointing_changes_no_gradient(model: str, kind: str) -> None:
    made, batch = make(model, kind).train(), inputs(model)
    prior = {name: buffer.clone() for name, buffer in made.named_buffers()}
    gradients: list[dict[str, Tensor]] = []
    for enable in (False, True):
        with torch.no_grad():
            for name, buffer in made.named_buffers():
                buffer.copy_(prior[name])  # an M-step changed it
        made.zero_grad()
        if enable:
            made.gradient_checkpointing_enable()
        assert made.is_gradient_checkpointing is enable
        made(**batch).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-6)


def test_training_returns_no_logits_and_divides_by_num_items() -> None:
    made, batch = make("language").train(), inputs("language")
    found = made(**batch)
    assert found.logits is None
    targets = batch["labels"][:, 1:].numel()
    torch.testing.assert_close(made(**batch, num_items_in_batch=2 * targets).loss, found.loss / 2)
    ignored = batch["labels"].clone()
    ignored[0] = IGNORE
    torch.testing.assert_close(
        made(input_ids=batch["input_ids"], labels=ignored).loss,
        made(input_ids=batch["input_ids"][1:], labels=batch["labels"][1:]).loss,
    )


@pytest.mark.parametrize(
    ("problem", "labels"),
    [("regression", torch.rand(2, 3)), ("multi_label_classification", torch.ones(2, 3))],
)
def test_other_losses_of_a_classifier(problem: Any, labels: Tensor) -> None:
    made, batch = make("classifier"), inputs("classifier")
    made.config.problem_type = problem
    logits = made(**batch | {"labels": None}).logits
    functions: dict[str, Any] = {
        "regression": torch.nn.functional.mse_loss,
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
    }
    torch.testing.assert_close(made(**batch | {"labels": labels}).loss, functions[problem](logits, labels))


@pytest.mark.parametrize(("classes", "labels"), [(1, torch.rand(2)), (1, torch.rand(2, 1)), (3, torch.rand(2, 3))])
def test_the_loss_follows_the_labels(classes: int, labels: Tensor) -> None:
    """As in Transformers: one class is a regression, float labels are a multi-label problem."""
    made, batch = make("classifier", classes=classes), inputs("classifier")
    logits = made(**batch | {"labels": None}).logits
    functions = torch.nn.functional.mse_loss, torch.nn.functional.binary_cross_entropy_with_logits
    expected = functions[classes > 1](logits, labels.view_as(logits))
    torch.testing.assert_close(made(**batch | {"labels": labels}).loss, expected)


@pytest.mark.parametrize("model", ["classifier", "matcher", "embeddings"])
def test_padding_on_either_side_changes_nothing(model: str) -> None:
    made = stirred(MGKModel(config("classifier"))) if model == "embeddings" else make(model)
    batch = inputs("matcher" if model == "matcher" else "classifier")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    alone = made(input_ids=tokens[-1:, ..., :5])[0]
    behind = made(input_ids=tokens, attention_mask=mask)[0]
    before = made(input_ids=tokens.roll(4, -1), attention_mask=mask.roll(4, -1))[0]
    kept = (slice(0, 5), slice(4, 9)) if model == "embeddings" else (slice(None), slice(None))
    torch.testing.assert_close(behind[-1:, kept[0]], alone)
    torch.testing.assert_close(before[-1:, kept[1]], alone)


def test_embeddings_can_be_resized() -> None:
    made = make("language", cutoffs=())
    tokens = inputs("language")["input_ids"]
    before = made(tokens).logits
    made.resize_token_embeddings(23)
    assert made.config.vocabulary == 23
    after = made(tokens).logits
    assert after.shape[-1] == 23
    torch.testing.assert_close(after[..., :20], before)
    assert made(tokens, labels=tokens).loss.isfinite()
    with pytest.raises(ValueError, match="plain softmax"):
        make("language").resize_token_embeddings(23)
    few = make("language", cutoffs=(22, 40))  # above the vocabulary: the softmax is plain
    few.resize_token_embeddings(23)
    assert few(tokens).logits.shape[-1] == 23


def test_embeddings_of_a_modern_model_can_be_resized(tmp_path: Path) -> None:
    """Its output layer, too; the rows behind the vocabulary become tokens."""
    made, tokens = make("language", **MODERN), inputs("language")["input_ids"]
    before = made(tokens).logits
    assert made.resize_token_embeddings() is made.get_input_embeddings()
    assert made.get_output_embeddings() is made.mgk.lm_head
    assert before.shape[-1] == made.config.vocab_size == 20
    made.resize_token_embeddings(35)
    assert (made.config.vocab_size, made.config.vocabulary_multiple) == (35, 1)
    torch.testing.assert_close(made(tokens).logits[..., :20], before)
    made.save_pretrained(tmp_path)
    loaded = MGKForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, made(tokens).logits)
    base = MGKModel.from_pretrained(tmp_path)
    assert not [name for name, _ in base.named_parameters() if "lm_head" in name or "output" in name]


def test_a_wrong_call_is_an_error() -> None:
    made, tokens = make("language"), inputs("language")["input_ids"]
    with pytest.raises(TypeError, match="temprature: no such argument"):
        made(tokens, temprature=1)
    with pytest.raises(ValueError, match="output_attentions"):
        made(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="labels: expected None with a cache"):
        made(tokens, labels=tokens, use_cache=True)
    made(tokens, inputs_embeds=None)  # as PEFT adapters do
    with pytest.raises(ValueError, match=r"^attention_mask: expected shape \(2, 9\), got \(2, 5\)"):
        made(tokens, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"^tokens: expected numbers from 0 to 19, got 1 to 20"):
        made(torch.tensor([[1, 20]]))
    learned = make("language", positions="learned", max_length=10)
    with pytest.raises(ValueError, match=r"^positions: expected numbers from 0 to 9, got 0 to 10"):
        learned.generate(tokens, max_new_tokens=5, pad_token_id=0, use_cache=False)
    with pytest.raises(ValueError, match=r"^input_ids: expected token ids"):
        MGKModel(config("classifier"))()
    classifier, batch = make("classifier"), inputs("classifier")
    for labels, told in (
        (torch.tensor([0, 5]), "0 to 2"), (torch.tensor([[0, 1]]), r"integers \(B,\)"), (torch.rand(2, 2), r"\(B,C\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^labels: expected {told}"):
            classifier(**batch | {"labels": labels})
    with pytest.raises(ValueError, match=r"config\.kind: expected language for MGKForCausalLM, got vision"):
        MGKForCausalLM(MGKConfig(kind="vision"))


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    make("classifier").save_pretrained(tmp_path)
    (tmp_path / SUMS).unlink()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match="damaged weights"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_loading_runs_no_code(tmp_path: Path) -> None:
    """A pickle is not opened, and code named in the configuration is not run."""
    make("classifier").save_pretrained(tmp_path)
    (tmp_path / SUMS).unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        MGKForSequenceClassification.from_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    told = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    MGKForSequenceClassification.from_pretrained(tmp_path)


def test_a_wrong_shape_is_an_error(tmp_path: Path) -> None:
    make("classifier").save_pretrained(tmp_path)
    (tmp_path / SUMS).unlink()
    told = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(RuntimeError, match="mismatch"):
        MGKForSequenceClassification.from_pretrained(tmp_path)
