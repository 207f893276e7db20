"""What Transformers expects of every model: those of its common tests that apply to these models.

The Transformers package does not contain its tests; docs/huggingface.md has the results of running them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mgk.hf import MGKModel
from mgk.hf.config import MODELS
from mgk.nn.output import IGNORE
from tests.hf.common import CLASSES, config, inputs, make
from tests.models.common import KINDS

every_model = pytest.mark.parametrize("model", MODELS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def without_labels(model: str, size: int = 2) -> dict[str, Any]:
    return {name: value for name, value in inputs(model, size).items() if name != "labels"}


@every_kind
def test_a_row_does_not_depend_on_the_batch(kind: str) -> None:
    for model in ("classifier", "language"):
        made, batch = make(model, kind), without_labels(model, 3)
        together = made(**batch).logits
        assert torch.equal(together, made(**batch).logits)  # evaluation is deterministic
        for row in range(3):
            alone = made(**{name: value[row : row + 1] for name, value in batch.items()}).logits
            torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-5, atol=1e-5)


@every_model
def test_tuples_equal_the_named_outputs(model: str) -> None:
    made, batch = make(model), inputs(model)
    named = made(**batch, output_hidden_states=True)
    unnamed = made(**batch, output_hidden_states=True, return_dict=False)
    for one, two in zip(named.to_tuple(), unnamed, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@every_model
def test_hidden_states_have_gradients(model: str) -> None:
    made, batch = make(model), inputs(model)
    found = made(**batch, output_hidden_states=True)
    places = {"vision": (2, 16), "matcher": (4, 9)}.get(model, (2, 9))  # a matcher reads both documents of both pairs
    assert [tuple(x.shape) for x in found.hidden_states] == [(*places, made.config.width)] * (made.config.layers + 1)
    for hidden in found.hidden_states:
        hidden.retain_grad()
    found.loss.backward()
    assert all(hidden.grad is not None and hidden.grad.any() for hidden in found.hidden_states)


@every_model
def test_loaded_in_half_precision(model: str, tmp_path: Path) -> None:
    made, batch = make(model), without_labels(model)
    made.save_pretrained(tmp_path)
    half = CLASSES[model].from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    if model == "vision":
        batch = {name: value.bfloat16() for name, value in batch.items()}
    expected = made(**batch).logits if model != "vision" else made(pixel_values=batch["pixel_values"].float()).logits
    # 8 bits of each weight, through two layers: a few hundredths of the largest logit.
    assert (half(**batch).logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_another_number_of_classes_keeps_all_other_weights(tmp_path: Path) -> None:
    made = make("classifier")
    made.save_pretrained(tmp_path)
    loaded = CLASSES["classifier"].from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded(**without_labels("classifier")).logits.shape == (2, 5)
    differing = {
        name
        for name, p in loaded.named_parameters()
        if p.shape != (q := made.get_parameter(name)).shape or (p != q).any()
    }
    assert differing
    assert all(loaded.get_parameter(name).shape[0] == 5 for name in differing)


def test_the_softmax_is_tied_to_the_embedding_in_memory_and_in_the_file(tmp_path: Path) -> None:
    made, tokens = make("language", cutoffs=()), without_labels("language")["input_ids"]
    made.save_pretrained(tmp_path)
    assert [tuple(x.shape) for x in load_file(tmp_path / "model.safetensors").values()].count((20, 12)) == 1
    loaded = CLASSES["language"].from_pretrained(tmp_path)
    table = nn.Embedding(20, 12)
    loaded.set_input_embeddings(table)
    assert loaded.get_input_embeddings() is table
    hidden = loaded.mgk.hidden(tokens)
    torch.testing.assert_close(loaded(tokens).logits, hidden @ table.weight.mT + loaded.mgk.output.bias)


def test_shift_labels_replace_labels() -> None:
    """`shift_labels` are the targets themselves, and take precedence over `labels`."""
    made, tokens = make("language"), without_labels("language")["input_ids"]
    whole = made(tokens, labels=tokens).loss
    shifted = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    torch.testing.assert_close(made(tokens, shift_labels=shifted).loss, whole)
    torch.testing.assert_close(made(tokens, labels=tokens.roll(3), shift_labels=shifted).loss, whole)
    assert not torch.equal(made(tokens, shift_labels=shifted.roll(1)).loss, whole)


@every_model
def test_frozen_embeddings_and_gradients_of_inputs(model: str) -> None:
    """As with adapters: frozen weights, gradients of the embedding's output, gradient checkpointing."""
    made, batch = make(model).train(), inputs(model)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    adapter = made.mgk.get_submodule("stack" if model == "vision" else "encoder.stack").layers[0].up
    adapter.weight.requires_grad_(True)
    gradients = []
    for recompute in (False, True):
        if recompute:
            made.gradient_checkpointing_enable()
            made.enable_input_require_grads()
        made.zero_grad()
        made(**batch).loss.backward()
        gradients.append(adapter.weight.grad.clone())
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["classifier", "language", "vision"])
def test_models_export(model: str) -> None:
    """To one graph of PyTorch operators, at the shapes of the example; see examples/export_model.py for the limits."""
    made, batch = make(model, "mgk", impl="reference"), without_labels(model)
    if model == "classifier":
        del batch["attention_mask"]
    program = torch.export.export(made, (), dict(batch))
    torch.testing.assert_close(program.module()(**batch).logits, made(**batch).logits, rtol=1e-4, atol=1e-5)


def test_the_base_model_has_no_head() -> None:
    names = {name for name, _ in MGKModel(config("language")).named_parameters()}
    assert names
    assert not any("output" in name for name in names)
