"""Several documents in one row attend to each other in no variant, however the caller says where they begin."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from mgk.hf import MGKConfig, MGKForCausalLM, MGKModel
from mgk.nn.documents import Documents
from mgk.nn.output import IGNORE
from tests.hf.common import config, make, stirred
from tests.models.common import KINDS

LENGTHS = (4, 9, 1, 3)  # in two groups of similar lengths, and a third
ROTARY: dict[str, Any] = {"positions": "rotary"}


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 20, (length,), generator=generator) for length in LENGTHS]


def batch(**options: bool) -> dict[str, Any]:
    rows = [{"input_ids": each.tolist()} for each in documents()]
    return dict(DataCollatorWithFlattening(**options)(rows, return_tensors="pt"))  # type: ignore[arg-type]


def alone(model: Any, **options: Any) -> list[Tensor]:
    return [model(input_ids=each[None], **options)[0][0] for each in documents()]


def close(found: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, torch.cat(expected)[None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_documents_alone(kind: str, positions: str) -> None:
    model = make("language", kind, positions=positions)
    given = batch()
    assert not any(value is None for value in given.values())
    with torch.no_grad():
        found = model(**{name: value for name, value in given.items() if name != "labels"}, output_hidden_states=True)
        close(found.logits, alone(model))
    assert all(state.shape == (1, sum(LENGTHS), model.config.width) for state in found.hidden_states)


@pytest.mark.parametrize("kind", ["softmax", "smgk", "mgk-hard", "mlk", "smgk-em", "smgk-positions"])
def test_gradients_are_those_of_the_documents_alone(kind: str) -> None:
    """The loss ignores what would predict the first token of the next document, as the collator's labels say."""
    given, found = batch(), []
    for packed in (True, False):
        model = make("language", kind, **ROTARY).train()
        if packed:
            model(**given).loss.backward()
        else:
            count = sum(length - 1 for length in LENGTHS)
            ahead = [torch.cat((each[1:], torch.tensor([IGNORE])))[None] for each in documents()]
            tokens = torch.nn.utils.rnn.pad_sequence(documents(), batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in documents()], batch_first=True)
            target = torch.nn.utils.rnn.pad_sequence([x[0] for x in ahead], batch_first=True, padding_value=IGNORE)
            model(tokens, attention_mask=mask, shift_labels=target, num_items_in_batch=count).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers()))
    assert any("log_prior" in name for name in found[0]) or kind in ("softmax", "mgk-hard", "mlk")
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "told",
    [
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
    ],
)
def test_every_way_to_say_where_documents_begin(told: dict[str, bool]) -> None:
    model, given = make("language", "smgk", **ROTARY), batch(**told)
    assert len(given) > 2 + told.get("return_position_ids", True)
    del given["labels"]
    close(model(**given).logits, alone(model))


def test_documents_and_padding_in_several_rows() -> None:
    """Rows with one and with two documents, padded on either side; packing is also seen beside a mask of ones."""
    model = make("language", "smgk", **ROTARY)
    tokens = torch.randint(1, 20, (3, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 9, 9], [1, 1, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
    mask = torch.tensor([[1] * 6 + [0] * 2, [0] * 2 + [1] * 6, [1] * 8])
    found = model(tokens, attention_mask=mask, position_ids=positions).logits
    for row, start, stop in ((0, 0, 3), (0, 3, 6), (1, 2, 7), (1, 7, 8), (2, 0, 8)):
        expected = model(tokens[row : row + 1, start:stop]).logits
        torch.testing.assert_close(found[row : row + 1, start:stop], expected, rtol=1e-4, atol=1e-5)
    plain = model(tokens, attention_mask=torch.ones_like(tokens), position_ids=positions[:1] * 0).logits
    torch.testing.assert_close(plain[0, :1], model(tokens[:1, :1]).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "mgk", "linear"])
def test_an_encoder_reads_packed_documents(kind: str) -> None:
    model = stirred(MGKModel(config("classifier", kind)))
    given = batch()
    found = model(input_ids=given["input_ids"], position_ids=given["position_ids"])
    close(found.last_hidden_state, alone(model))
    assert found.pooler_output is None
    embedded = model.get_input_embeddings()(given["input_ids"])
    again = model(inputs_embeds=embedded, position_ids=given["position_ids"]).last_hidden_state
    torch.testing.assert_close(again, found.last_hidden_state, rtol=0, atol=0)


def test_a_compiled_model_keeps_documents_apart() -> None:
    """Also for other documents than those it was compiled with."""
    torch.compiler.reset()
    model = make("language", "smgk", layers=1, **ROTARY)
    compiled = torch.compile(model, backend="eager")
    given = batch()
    tokens, edges = given["input_ids"], ((0, 4, 13, 14, 17), (0, 8, 17))
    for edge in edges:
        positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(edge)])[None]
        found = compiled(tokens, position_ids=positions).logits
        expected = [model(tokens[:, a:b]).logits[0] for a, b in itertools.pairwise(edge)]
        close(found, expected)


def test_an_exported_model_refuses_packed_documents() -> None:
    model, given = make("language", "smgk", impl="reference"), batch()
    del given["labels"]
    plain = {"input_ids": given["input_ids"], "position_ids": torch.arange(17)[None]}
    program = torch.export.export(model, (), plain).module()
    torch.testing.assert_close(program(**plain).logits, model(**plain).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="one text in a row"):
        program(**given)


def test_what_cannot_be_packed_is_an_error() -> None:
    given = batch()
    del given["labels"]
    model = make("language")
    with pytest.raises(ValueError, match="position_ids: expected one text in a row with a cache"):
        model(**given, use_cache=True)
    with pytest.raises(ValueError, match="position_ids: expected one text in a row to classify"):
        make("classifier")(**given)
    holes = torch.ones_like(given["input_ids"])
    holes[0, 6] = 0
    with pytest.raises(ValueError, match="attention_mask: expected no padding inside a packed document"):
        model(**given, attention_mask=holes)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected numbers from 0 to 17"):
        model(given["input_ids"], cu_seq_lens_q=torch.tensor([0, 4, 12]))
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected the same numbers"):
        model(given["input_ids"], cu_seq_lens_q=torch.tensor([0, 17]), cu_seq_lens_k=torch.tensor([0, 8, 17]))
    with pytest.raises(ValueError, match=r"attention_mask: .*got 4 dimensions"):
        model(given["input_ids"], attention_mask=torch.ones(1, 1, 17, 17))


def test_padding_of_groups_at_most_doubles_the_rows() -> None:
    """One long document and many short ones would otherwise need memory for the product of both."""
    lengths = [1000] + [3] * 500 + [40] * 20
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    made = Documents(1, sum(lengths), starts[:-1], starts[1:])
    assert sum(group.mask.numel() for group in made.groups) <= 2 * sum(lengths)
    assert len(Documents(1, sum(lengths), starts[:-1], starts[1:], together=True).groups) == 1


def test_heads_of_other_sizes_are_packed_too() -> None:
    settings: Any = {"num_key_value_heads": 1, "qk_norm": True, "prior_positions": None}
    model = stirred(MGKForCausalLM(MGKConfig(**(config("language").to_dict() | settings | ROTARY))))
    given = batch()
    close(model(given["input_ids"], position_ids=given["position_ids"]).logits, alone(model))
