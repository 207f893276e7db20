"""An M-step in forward does not change what backward reads, and a prior per position stays with its position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgk.nn import AttentionInputs, MixtureAttention
from mgk.nn.packing import Packing
from tests.nn.common import EXACT, make, normal
from tests.ops.triton_env import DEVICE


@pytest.mark.parametrize("kind", ["smgk-means", "mgk-em", "smgk-positions"])
def test_the_inputs_of_a_call_outlive_its_m_step(kind: str) -> None:
    """What a hook (or an operator, for backward) keeps is what the call computed with, not what the M-step wrote."""
    module, x = make(kind).train(), normal(2, 6, 12)
    seen: list[AttentionInputs] = []
    copies: list[dict[str, Tensor]] = []

    def keep(_: MixtureAttention, inputs: AttentionInputs) -> None:
        seen.append(inputs)
        named = {name: getattr(inputs, name) for name in ("shift", "log_prior")}
        copies.append({name: value.clone() for name, value in named.items() if value is not None})

    module.register_attention_hook(keep)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module(x)
    assert any(not torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())  # there was one
    for name, value in copies[0].items():
        torch.testing.assert_close(getattr(seen[0], name), value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["smgk-means", "mgk-em", "smgk-positions"])
def test_gradients_are_those_before_the_m_step(kind: str) -> None:
    x, grad = normal(2, 6, 12), normal(2, 6, 12, seed=1)
    found = []
    for makes_m_step in (True, False):
        module = make(kind).train()
        module.m_step_enabled = makes_m_step
        given = x.clone().requires_grad_()
        module(given)[0].backward(grad)
        assert given.grad is not None
        found.append([given.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numbers that Triton's interpreter drops
def test_packed_rows_keep_the_prior_of_their_position() -> None:
    """Kernels count the tokens of a sequence, and a prior belongs to places of the padded batch, which may have holes.

    Float32 against float64, sums of dozens of numbers.
    """
    mask = normal(4, 7, seed=5) > 0
    given = normal(int(mask.sum()), 12)
    found = []
    for impl, device, dtype in (("triton", DEVICE, torch.float32), ("blockwise", "cpu", torch.float64)):
        module = make("smgk-positions", impl=impl).to(device, dtype)
        with torch.no_grad():
            assert module.log_prior is not None
            module.log_prior.copy_(2 * normal(*module.log_prior.shape, seed=3))
            output, _ = module(given.to(device, dtype), packing=Packing(mask.to(device), len(given)))
        found.append(output.double().cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
