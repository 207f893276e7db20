"""Attention hooks get what the operator reads, in every kind of call, and change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mgk.nn import AttentionInputs, MixtureAttention, operators
from mgk.nn.embeddings import Rotation
from mgk.nn.packing import Packing
from tests.nn.common import EXACT, KINDS, make, normal
from tests.ops.triton_env import DEVICE

MASK = torch.arange(7) < torch.tensor([[7], [3]])


def hooked(module: MixtureAttention) -> list[AttentionInputs]:
    """Register a hook, and return the list of what it gets."""
    seen: list[AttentionInputs] = []

    def hook(caller: MixtureAttention, inputs: AttentionInputs) -> None:
        assert caller is module
        seen.append(inputs)

    module.register_attention_hook(hook)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_the_inputs_give_the_output(kind: str, training: bool) -> None:
    module, x = make(kind).train(training), normal(2, 7, 12)
    other = copy.deepcopy(module)
    seen = hooked(module)
    options: dict[str, Any] = {"key_padding_mask": ~MASK, "query_padding_mask": ~MASK, "is_causal": True}
    output, _ = module(x, **options)
    torch.testing.assert_close(output, other(x, **options)[0], rtol=0, atol=0)
    (inputs,) = seen
    assert inputs.query.shape == inputs.value.shape == (2, 3, 7, 4)
    assert inputs.is_causal
    assert torch.equal(inputs.key_mask, MASK)  # type: ignore[arg-type]
    heads = operators.attend(inputs).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module.out_proj(heads), output, **EXACT)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize(
    ("kind", "impl"), [("softmax", "auto"), ("smgk", "auto"), ("smgk", "triton"), ("mlk", "triton")]
)
def test_a_packed_batch_is_shown_padded(kind: str, impl: str) -> None:
    """Also where the operator would read packed rows."""
    module, x = make(kind, impl=impl).to(DEVICE, torch.float32), normal(2, 7, 12).to(DEVICE, torch.float32)
    packing = Packing(MASK.to(DEVICE), 12)
    expected, _ = module(packing.pack(x), packing=packing)
    seen = hooked(module)
    output, _ = module(packing.pack(x), packing=packing)
    torch.testing.assert_close(output[:10], expected[:10], rtol=1e-4, atol=1e-4)  # sums of dozens of numbers
    (inputs,) = seen
    assert inputs.query.shape == (2, 3, 7, 4)
    assert inputs.key_mask is packing.mask
    module(x)
    real = packing.mask
    torch.testing.assert_close(inputs.query.transpose(1, 2)[real], seen[1].query.transpose(1, 2)[real])


def test_a_cache_adds_its_keys() -> None:
    module, x = make("smgk"), normal(2, 7, 12)
    seen, cache = hooked(module), module.new_cache(2)
    module(x[:, :5], cache=cache)
    module(x[:, 5:], cache=cache)
    assert [inputs.key.shape[2] for inputs in seen] == [5, 7]
    assert [inputs.query.shape[2] for inputs in seen] == [5, 2]
    module = make("smlk")
    seen = hooked(module)
    module(x, cache=module.new_cache(2))
    assert not seen  # this cache keeps sums, no keys


def test_rotary_positions_are_applied() -> None:
    module, x = make("smgk", rotary_dim=2), normal(2, 7, 12)
    seen, angle = hooked(module), normal(1, 7, 4)
    module(x, rotary=Rotation(torch.ones_like(angle), torch.zeros_like(angle)))
    module(x, rotary=Rotation(angle, torch.zeros_like(angle)))
    torch.testing.assert_close(seen[1].query, seen[0].query * angle, **EXACT)
    assert seen[0].shift is not None
    assert seen[0].shift.shape == (3, 2, 4)


def test_removed_hooks_are_not_called() -> None:
    module, calls = make("smgk"), []
    handle = module.register_attention_hook(lambda *_: calls.append(1))
    module.register_attention_hook(lambda *_: calls.append(2))
    module(normal(2, 7, 12))
    handle.remove()
    module(normal(2, 7, 12))
    assert calls == [1, 2, 2]


def test_compiled_code_calls_no_hook() -> None:
    torch.compiler.reset()
    module, x = make("smgk"), normal(2, 7, 12)
    expected, seen = module(x)[0], hooked(module)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], expected, **EXACT)
    assert not seen
