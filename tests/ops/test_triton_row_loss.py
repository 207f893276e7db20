"""The loss of rows of logits, and its gradient in their place, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.triton_env import DEVICE

# isort: split
from mgk.ops.triton import row_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [5, 64, 203])
def test_losses_and_gradients(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several blocks too, of which one has nothing but -inf. bfloat16 rounds the gradient alone, once."""
    monkeypatch.setattr(row_loss, "BLOCK", 64)
    logits = 3 * torch.randn(9, tokens, generator=torch.Generator().manual_seed(1))
    logits[:, : tokens // 2] -= 40
    logits[0, : 64 * ((tokens - 1) // 64)] = -torch.inf
    target = torch.arange(9) % tokens
    target[0], target[[2, 5]] = tokens - 1, -100
    given = logits.to(dtype).to(DEVICE)
    wanted = given.double().cpu().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wanted, target, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), wanted)
    found = row_loss.losses_and_gradients(given, target.to(DEVICE), -100)
    torch.testing.assert_close(found.cpu().double(), losses.detach(), rtol=1e-5, atol=1e-5)
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(given.cpu().double(), gradient, rtol=1e-5 + rounding, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_finite_loss(bad: float) -> None:
    logits = torch.zeros(2, 7, device=DEVICE)
    logits[1, 3] = bad
    losses = row_loss.losses_and_gradients(logits, torch.tensor([0, 1], device=DEVICE), -100)
    assert losses.isfinite().tolist() == [True, False]
    assert logits[0].isfinite().all()
    assert not logits[1].isfinite().all()
