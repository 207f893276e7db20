"""What Transformers' ecosystem expects of a model class, beside its results."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_layers import GradientCheckpointingLayer

from mgk.hf import MGKForMaskedLM, MGKModel, merge_heads
from mgk.hf.tokenizer import byte_tokenizer
from mgk.merge.attention import warn_dense_weights
from tests.hf.common import CLASSES, FOREIGN, config, foreign, inputs, make, stirred
from tests.models.common import MODERN


def test_an_image_model_can_be_called_from_several_threads() -> None:
    """No call leaves a trace in the modules that all calls share."""
    model = stirred(MGKModel(config("vision")))
    images = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def run(number: int) -> list[torch.Tensor]:
        found = model(pixel_values=images[number : number + 1], output_hidden_states=True)
        return [found.last_hidden_state, found.pooler_output, *found.hidden_states]

    expected = [run(number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        for one, two in zip(pool.map(run, range(24)), expected, strict=True):
            assert len(one) == len(two)
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", FOREIGN)
def test_attention_weights_of_merged_models(name: str) -> None:
    """They sum to one for every query that sees a key, and reproduce the layer's output through its values."""
    model, batch = foreign(name)
    small, _ = merge_heads(model, [batch])
    warn_dense_weights.cache_clear()
    with pytest.warns(UserWarning, match="stores the weights of all pairs"):
        found = small(**batch, output_attentions=True).attentions
    heads, length = small.config.mixture_heads, found[0].shape[-1]
    assert [tuple(each.shape) for each in found] == [(3, heads, length, length)] * small.config.num_hidden_layers
    total = found[0].sum(-1)
    assert bool(((total - 1).abs() < 1e-9).logical_or(total == 0).all())
    assert (total == 0).any() == ("attention_mask" in batch and name not in ("bert",))


@pytest.mark.parametrize("options", [{}, {"norm": "pre", "norm_type": "rms"}, MODERN])
def test_the_last_hidden_state_is_what_the_head_reads(options: dict[str, Any]) -> None:
    model, tokens = make("language", **({"cutoffs": ()} | options)), inputs("language")["input_ids"]
    found = model(tokens, output_hidden_states=True)
    head = model.get_output_embeddings()
    torch.testing.assert_close(head(found.hidden_states[-1])[..., :20].float(), found.logits)
    torch.testing.assert_close(model.lm_head.weight, model.mgk.output_weight, rtol=0, atol=0)
    base = model.base_model(tokens, output_hidden_states=True)
    torch.testing.assert_close(base.last_hidden_state, found.hidden_states[-1], rtol=0, atol=0)
    assert len(base.hidden_states) == len(found.hidden_states)


@pytest.mark.parametrize("model", CLASSES)
def test_the_base_model_shares_all_modules(model: str, tmp_path: Path) -> None:
    made = make(model)
    base = made.base_model
    assert isinstance(base, MGKModel)
    assert base is made.model is made.base_model
    assert base.base_model is base
    assert not hasattr(base, "model")
    assert base.get_input_embeddings() is made.get_input_embeddings()
    assert not any(name.startswith("model.") for name in made.state_dict())
    base.save_pretrained(tmp_path)
    assert not any(".classifier." in name or ".output." in name for name in load_file(tmp_path / "model.safetensors"))
    loaded, report = CLASSES[model].from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded.get_input_embeddings().weight, made.get_input_embeddings().weight)
    again = copy.deepcopy(made)
    assert again.base_model.mgk is again.mgk is not made.mgk


@pytest.mark.parametrize("kind", ["smgk", "smgk-em"])
def test_layers_are_checkpointed_by_transformers_flag(kind: str) -> None:
    """Layer by layer, with the same gradients and the same M-steps, and each layer runs twice."""
    found = []
    for enabled in (False, True):
        made = make("language", kind, dropout=0.5).train()
        layers = [module for module in made.modules() if isinstance(module, GradientCheckpointingLayer)]
        assert len(layers) == made.config.layers
        if enabled:
            made.gradient_checkpointing_enable()
            assert made.is_gradient_checkpointing
        torch.manual_seed(1)
        with patch.object(layers[0], "forward", wraps=layers[0].forward) as counted:
            made(**inputs("language")).loss.backward()
        assert counted.call_count == 1 + enabled
        found.append([p.grad for p in made.parameters()] + list(made.buffers()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    made.gradient_checkpointing_disable()
    assert not made.is_gradient_checkpointing
    assert make("language", recompute=True).is_gradient_checkpointing


def test_logits_in_training_and_the_default_cache() -> None:
    made, batch = make("language"), inputs("language")
    made.train()
    assert made(**batch).logits is None
    assert made(**batch, logits_in_training=True).logits.shape == (2, 9, 20)
    made.config.logits_in_training = True
    assert made(**batch).logits.shape == (2, 9, 20)
    made.eval()
    assert made(batch["input_ids"]).past_key_values is None  # a gradient may be wanted
    with torch.no_grad():
        assert made(batch["input_ids"]).past_key_values.get_seq_length() == 9
        assert made(batch["input_ids"], use_cache=False).past_key_values is None
        made.config.use_cache = False
        assert made(batch["input_ids"]).past_key_values is None


@pytest.mark.parametrize("model", ["classifier", "language"])
def test_embeddings_replace_tokens(model: str) -> None:
    """Also in generation and with sinusoidal positions, which scale the embeddings."""
    made, batch = make(model, positions="sinusoidal"), inputs(model)
    embedded = made.get_input_embeddings()(batch.pop("input_ids"))
    expected = made(**inputs(model)).logits
    torch.testing.assert_close(made(inputs_embeds=embedded, **batch).logits, expected, rtol=0, atol=0)
    if model == "language":
        tokens = made.generate(inputs("language")["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
        again = made.generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(again, tokens[:, 9:])


def test_options_of_generate() -> None:
    made, tokens = make("language"), inputs("language")["input_ids"]
    tokenizer = byte_tokenizer(0)
    found = made.generate(
        tokens, max_new_tokens=3, pad_token_id=0, tokenizer=tokenizer, stop_strings=["zzz"],
        cache_position=torch.arange(9),
    )  # fmt: skip
    assert found.shape == (2, 12)


@pytest.mark.parametrize("source", ["classifier", "language"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM"])
def test_heads_on_the_folder_of_another_task(source: str, head: str, tmp_path: Path) -> None:
    if head == "MaskedLM" and source == "language":
        return  # a causal model
    settings: dict[str, Any] = {"cutoffs": ()} if source == "language" else {}
    make(source, **settings).save_pretrained(tmp_path)
    auto = getattr(transformers, f"AutoModelFor{head}")
    made, report = auto.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert not report["unexpected_keys"]
    tokens = inputs(source)["input_ids"]
    labels: dict[str, Any] = {"labels": torch.arange(2)}
    if head == "QuestionAnswering":
        labels = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 99])}
    elif head in ("TokenClassification", "MaskedLM"):
        labels = {"labels": tokens % 3}
    found = made(tokens, attention_mask=(tokens > 0).long(), **labels)
    found.loss.backward()
    assert found[1].shape == {"SequenceClassification": (2, 3), "TokenClassification": (2, 9, 3)}.get(
        head, found[1].shape
    )
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
    made.eval().save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(tokens)[0], made(tokens)[0])
    assert transformers.AutoModel.from_pretrained(tmp_path / "again").get_input_embeddings() is not None


def test_a_sequence_is_classified_by_its_last_real_token(tmp_path: Path) -> None:
    make("language", cutoffs=()).save_pretrained(tmp_path)
    made = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4, pad_token_id=0)
    tokens = torch.tensor([[5, 6, 7, 0, 0], [0, 0, 5, 6, 7], [1, 2, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = made(tokens, attention_mask=mask).logits
    alone = made(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(found[:2], alone.expand(2, -1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[2], alone[0])
    torch.testing.assert_close(made(tokens[:1]).logits, alone, rtol=1e-4, atol=1e-5)


def test_masked_words_have_an_output_layer() -> None:
    made = stirred(MGKForMaskedLM(config("classifier")))
    found = made(**inputs("classifier") | {"labels": inputs("classifier")["input_ids"]}, output_hidden_states=True)
    head = made.get_output_embeddings()
    assert head.weight is made.get_input_embeddings().weight
    torch.testing.assert_close(head(found.hidden_states[-1]), found.logits)
    assert found.loss.isfinite()


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "linear", "mlk", "smlk"])
def test_an_exported_model_takes_any_batch_and_length(kind: str) -> None:
    """Also lengths of several chunks of the linear family, where the example has one."""
    made = make("language", kind, cutoffs=(), layers=1, max_length=140)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=140)}
    with torch.no_grad():
        program = torch.export.export(
            made, (), {"input_ids": torch.ones(2, 9).long()}, dynamic_shapes={"input_ids": shape}
        ).module()
        for size in ((1, 5), (3, 131)):
            tokens = torch.randint(0, 20, size)
            torch.testing.assert_close(program(input_ids=tokens).logits, made(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk", "smlk"])
def test_an_onnx_exporter_sees_no_operator_of_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no kernels for them, so "auto" takes PyTorch's operators without a warning; another name is used."""
    made, tokens = make("language", kind, cutoffs=(), layers=1), torch.ones(2, 9).long()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with torch.no_grad():
        program = torch.export.export(made, (), {"input_ids": tokens})
        assert not any(str(node.target).startswith("mgk") for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(input_ids=tokens).logits, made(tokens).logits, rtol=1e-4, atol=1e-5)
        if kind == "smgk":
            named = torch.export.export(make("language", kind, layers=1, impl="blockwise"), (), {"input_ids": tokens})
            assert any(str(node.target).startswith("mgk") for node in named.graph.nodes)


@pytest.mark.parametrize("kind", ["linear", "mlk", "smlk"])
def test_the_linear_family_refuses_assisted_decoding_at_once(kind: str) -> None:
    made, tokens = make("language", kind), inputs("language")["input_ids"][:1]
    with pytest.raises(ValueError, match="cannot remove the tokens"):
        made.generate(tokens, max_new_tokens=2, prompt_lookup_num_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="cannot remove the tokens"):
        make("language").generate(tokens, max_new_tokens=2, assistant_model=made, pad_token_id=0)


def test_a_folder_loads_without_importing_mgk(tmp_path: Path) -> None:
    """With `trust_remote_code=True`, in a process that has not imported `mgk.hf`; without it, it asks for that."""
    make("language", cutoffs=()).save_pretrained(tmp_path / "model")
    code = (
        "import sys, transformers\n"
        "load = transformers.AutoModelForCausalLM.from_pretrained\n"
        "try:\n    load(sys.argv[1])\nexcept ValueError as error:\n    assert 'trust_remote_code' in str(error)\n"
        "else:\n    raise SystemExit('loaded code that nobody allowed')\n"
        "print(type(load(sys.argv[1], trust_remote_code=True)).__module__)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith("mgk.hf.models")
