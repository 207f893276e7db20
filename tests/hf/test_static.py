"""Decoding steps of one shape with a static cache, which a GPU replays from a CUDA graph; here they run eagerly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mgk.hf import MGKCache
from mgk.hf import static as module
from mgk.hf.static import buffers_of
from mgk.nn import AttentionInputs, MixtureAttention
from mgk.ops import arguments
from tests.hf.common import make
from tests.hf.test_generate import CLOSE, FORMS, GROWING, generate, prompts

CAPACITY = 12


def static(model: Any) -> MGKCache:
    return MGKCache(model.mgk.new_cache(2), CAPACITY)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_steps_equal_one_call_of_the_model(kind: str, form: str) -> None:
    model, tokens = make("language", kind, **FORMS[form]), torch.randint(1, 20, (2, CAPACITY))
    mask = torch.ones_like(tokens)
    mask[0, :3] = kind == "smgk-positions"  # else padded on the left
    expected = model(tokens, attention_mask=mask).logits
    cache = static(model)
    found = [model(tokens[:, :5], attention_mask=mask[:, :5], past_key_values=cache).logits]
    for layer in cache.layers:  # unwritten memory may hold anything
        for buffer in buffers_of(layer.inner):  # type: ignore[union-attr]
            buffer[..., 5:, :] = torch.nan
    for n in range(5, CAPACITY):
        found.append(model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1)[:, 3:], expected[:, 3:], **CLOSE)
    assert cache.get_seq_length() == CAPACITY


@torch.no_grad()
def test_all_steps_have_one_shape_and_one_memory() -> None:
    """A CUDA graph needs this: the number of keys is always the capacity, at the same address."""
    model, tokens = make("language", "smgk"), torch.randint(1, 20, (2, CAPACITY))
    cache = static(model)
    model(tokens[:, :4], past_key_values=cache)
    seen: list[tuple[Any, ...]] = []

    def look(module: MixtureAttention, inputs: AttentionInputs) -> None:
        key, value = inputs.key, inputs.value
        seen.append((key.shape, value.shape, key.data_ptr(), value.data_ptr()))

    for layer in model.modules():
        if isinstance(layer, MixtureAttention):
            layer.register_attention_hook(look)
    for n in range(4, CAPACITY):
        model(tokens[:, n : n + 1], past_key_values=cache)
    layers = model.config.layers
    assert len(seen) == layers * (CAPACITY - 4)
    assert len(set(seen)) == layers
    assert seen[0][0][2] == CAPACITY


@torch.no_grad()
def test_a_captured_step_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA, where a replay computes the step again into the tensor of the capture."""
    model, tokens, captured = make("language", "smgk"), torch.randint(1, 20, (2, CAPACITY)), []

    def capture(work: Any, *_: Any, **__: Any) -> tuple[Any, Tensor]:
        result = torch.full_like(work(), torch.nan)
        captured.append(result)
        return SimpleNamespace(replay=lambda: result.copy_(work())), result

    monkeypatch.setattr(module, "capture", capture)
    cache = static(model)
    model(tokens[:, :4], past_key_values=cache)
    step = cache.step(model.mgk, 1)
    assert step is not None
    step.graph = True  # as on a GPU
    found = [model(tokens[:, n : n + 1], past_key_values=cache).logits for n in range(4, CAPACITY)]
    torch.testing.assert_close(torch.cat(found, 1), model(tokens).logits[:, 4:], **CLOSE)
    assert len(captured) == 1  # the first step runs eagerly, the second is captured


class Reads(TorchDispatchMode):
    """Counts operations that make the host wait for a value on the device, which a CUDA graph cannot hold."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_a_step_reads_no_value_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("language", kind, impl="reference"), torch.randint(1, 20, (2, CAPACITY))
    cache = static(model)
    model(tokens[:, :4], past_key_values=cache)
    step = cache.step(model.mgk, 1)
    assert step is not None
    monkeypatch.setattr(arguments, "readable", lambda _: False)  # arguments are checked on a CPU only
    with Reads() as reads:
        step._compute()
    assert reads.count == 0
    with Reads() as reads:
        bool(tokens.any())
    assert reads.count == 1


@torch.no_grad()
def test_crop_reorder_reset_and_overflow() -> None:
    model, tokens = make("language", "mgk"), torch.randint(1, 20, (2, CAPACITY + 3))
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
    model(tokens[:, : CAPACITY - 1], past_key_values=cache)
    for n in range(CAPACITY - 1, CAPACITY + 3):  # the last ones exceed the capacity, which grows
        torch.testing.assert_close(step(n), expected[:, n : n + 1], **CLOSE)


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {}])
def test_generate_gives_the_same_tokens(kind: str, options: dict[str, Any]) -> None:
    model, (tokens, mask) = make("language", kind, **FORMS["modern"]), prompts(kind)
    expected = generate(model, tokens, mask, **options)
    assert torch.equal(generate(model, tokens, mask, cache_implementation="static", **options), expected)


def test_hidden_states_are_returned() -> None:
    """A replayed graph would not call the hooks that collect them."""
    model, (tokens, mask) = make("language"), prompts()
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    one, two = (generate(model, tokens, mask, cache_implementation=kind, **options) for kind in ("static", "dynamic"))
    assert one.past_key_values.static
    assert not two.past_key_values.static
    for step_one, step_two in zip(one.hidden_states, two.hidden_states, strict=True):
        for x, y in zip(step_one, step_two, strict=True):
            torch.testing.assert_close(x[:, -1], y[:, -1], **CLOSE)
