"""Steps of one shape into a reserved cache: what a CUDA graph holds on a GPU, computed here as it stands."""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mgk.hf import MGKCache
from mgk.hf.static import RoomCache
from mgk.nn import AttentionInputs, MixtureAttention
from mgk.ops import arguments
from tests.hf.common import make
from tests.hf.test_generate import CLOSE, FORMS, GROWING, generate, prompts

ROOM = 12


def static(model: Any, rows: int = 2, room: int = ROOM) -> MGKCache:
    return MGKCache(model.mgk.new_cache(rows), room)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_a_step_gives_what_the_model_gives_at_once(kind: str, form: str) -> None:
    model, tokens = make("language", kind, **FORMS[form]), torch.randint(1, 20, (2, ROOM))
    mask = torch.ones_like(tokens)
    mask[0, :3] = kind == "smgk-positions"  # else padded on the left
    expected = model(tokens, attention_mask=mask).logits
    cache = static(model)
    found = [model(tokens[:, :5], attention_mask=mask[:, :5], past_key_values=cache).logits]
    for layer in cache.layers:  # what memory holds where nothing was written may be anything
        for buffer in layer.inner.buffers:  # type: ignore[union-attr]
            buffer[..., 5:, :] = torch.nan
    for n in range(5, ROOM):
        found.append(model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1)[:, 3:], expected[:, 3:], **CLOSE)
    assert cache.get_seq_length() == ROOM


@torch.no_grad()
def test_all_steps_have_one_shape_and_one_memory() -> None:
    """Else a graph could not hold them: as many keys as the room has places, always at the same address."""
    model, tokens = make("language", "smgk"), torch.randint(1, 20, (2, ROOM))
    cache = static(model)
    model(tokens[:, :4], past_key_values=cache)
    seen: list[tuple[Any, ...]] = []

    def look(module: MixtureAttention, inputs: AttentionInputs) -> None:
        key, value = inputs.key, inputs.value
        seen.append((key.shape, value.shape, key.data_ptr(), value.data_ptr()))

    for module in model.modules():
        if isinstance(module, MixtureAttention):
            module.register_attention_hook(look)
    for n in range(4, ROOM):
        model(tokens[:, n : n + 1], past_key_values=cache)
    layers = model.config.layers
    assert len(seen) == layers * (ROOM - 4)
    assert len(set(seen)) == layers
    assert seen[0][0][2] == ROOM


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a number of the device, which a graph cannot hold."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_a_step_reads_no_number_of_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("language", kind, impl="reference"), torch.randint(1, 20, (2, ROOM))
    cache = static(model)
    model(tokens[:, :4], past_key_values=cache)
    step = cache.step(model.mgk, 1)
    assert step is not None
    monkeypatch.setattr(arguments, "readable", lambda _: False)  # arguments are read on a CPU alone
    with Reads() as reads:
        step._compute()
    assert reads.count == 0
    with Reads() as reads:
        bool(tokens.any())
    assert reads.count == 1


@torch.no_grad()
def test_it_can_go_back_be_chosen_from_overflow_and_begin_anew() -> None:
    model, tokens = make("language", "mgk"), torch.randint(1, 20, (2, ROOM + 3))
    expected, cache = model(tokens).logits, static(model)

    def step(n: int) -> Tensor:
        logits: Tensor = model(tokens[:, n : n + 1], past_key_values=cache).logits
        return logits

    model(tokens[:, :6], past_key_values=cache)
    step(6)
    step(7)
    cache.crop(-2)
    torch.testing.assert_close(step(6), expected[:, 6:7], **CLOSE)
    cache.reorder_cache(torch.LongTensor([1, 1]))  # beams
    swapped = model(tokens[[1, 1], 7:8], past_key_values=cache).logits
    torch.testing.assert_close(swapped, expected[[1, 1], 7:8], **CLOSE)
    cache.reset()
    assert cache.get_seq_length() == 0
    model(tokens[:, : ROOM - 1], past_key_values=cache)
    for n in range(ROOM - 1, ROOM + 3):  # the last ones find no room and make some
        torch.testing.assert_close(step(n), expected[:, n : n + 1], **CLOSE)


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {}])
def test_generate_is_the_same(kind: str, options: dict[str, Any]) -> None:
    model, (tokens, mask) = make("language", kind, **FORMS["modern"]), prompts(kind)
    expected = generate(model, tokens, mask, **options)
    assert torch.equal(generate(model, tokens, mask, cache_implementation="static", **options), expected)


def test_hidden_states_are_there_if_asked_for() -> None:
    """A replayed graph would not call the hooks that collect them."""
    model, (tokens, mask) = make("language"), prompts()
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    one, two = (generate(model, tokens, mask, cache_implementation=kind, **options) for kind in ("static", "dynamic"))
    assert isinstance(one.past_key_values.layers[0].inner, RoomCache)
    for step_one, step_two in zip(one.hidden_states, two.hidden_states, strict=True):
        for x, y in zip(step_one, step_two, strict=True):
            torch.testing.assert_close(x[:, -1], y[:, -1], **CLOSE)
