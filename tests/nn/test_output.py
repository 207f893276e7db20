"""The tied softmax is a distribution over the vocabulary; the adaptive one is PyTorch's; its losses are its logits'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mgk.nn import TiedSoftmax, output
from mgk.ops.api import HAS_TRITON
from tests.nn.common import normal
from tests.ops.triton_env import DEVICE

VOCABULARY, WIDTH, CUTOFFS = 23, 6, (5, 9, 17)
both = pytest.mark.parametrize("cutoffs", [(), CUTOFFS])


def make_output(cutoffs: tuple[int, ...]) -> tuple[TiedSoftmax, Tensor]:
    module = TiedSoftmax(VOCABULARY, WIDTH, cutoffs).double()
    for seed, parameter in enumerate(module.parameters(), 1):
        parameter.data = normal(*parameter.shape, seed=seed)
    return module, normal(VOCABULARY, WIDTH, seed=9).requires_grad_()


def test_adaptive_is_pytorchs() -> None:
    """PyTorch's tails have no bias and a projection, here the identity."""
    module, weight = make_output(CUTOFFS)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(
        WIDTH, VOCABULARY, list(CUTOFFS), div_value=1.0, head_bias=True, dtype=torch.float64
    )
    assert module.bias is not None
    assert module.cluster_weight is not None
    assert module.cluster_bias is not None
    with torch.no_grad():
        module.bias[5:] = 0
        theirs.head.weight.copy_(torch.cat([weight[:5], module.cluster_weight]))
        theirs.head.bias.copy_(torch.cat([module.bias[:5], module.cluster_bias]))
        for tail, part in zip(theirs.tail, (weight[5:9], weight[9:17], weight[17:]), strict=True):
            tail[0].weight.copy_(torch.eye(WIDTH))  # type: ignore[index]
            tail[1].weight.copy_(part)  # type: ignore[index]
    hidden, target = normal(40, WIDTH), torch.arange(40) % VOCABULARY
    logits = module(hidden, weight)
    torch.testing.assert_close(logits, theirs.log_prob(hidden).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.losses(hidden, weight, target).double(), -theirs(hidden, target).output)


@both
def test_losses_are_those_of_the_logits(cutoffs: tuple[int, ...]) -> None:
    """With their gradients, whatever clusters the targets are in: all, one, none."""
    module, weight = make_output(cutoffs)
    for target in (torch.arange(40) % VOCABULARY, torch.full((7,), 20), torch.tensor([0, 4, 3])):
        gradients = []
        for way in range(2):
            hidden = normal(len(target), WIDTH).requires_grad_()
            if way:
                losses = module.losses(hidden, weight, target)
            else:
                losses = -module(hidden, weight).log_softmax(-1).gather(1, target[:, None])[:, 0]
            wanted = (hidden, weight, *module.parameters())
            weights = torch.arange(1, len(target) + 1)
            gradients.append((losses, *torch.autograd.grad((losses * weights).sum(), wanted)))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-4)  # logits are float32


@both
def test_probabilities_sum_to_one(cutoffs: tuple[int, ...]) -> None:
    module, weight = make_output(cutoffs)
    logits = module(normal(2, 3, WIDTH), weight)
    assert logits.shape == (2, 3, VOCABULARY)
    assert logits.dtype == torch.float32
    if cutoffs:
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(2, 3))
    else:
        assert module.bias is not None
        torch.testing.assert_close(logits, (normal(2, 3, WIDTH) @ weight.T + module.bias).float())


@both
def test_ignored_targets_have_no_loss(cutoffs: tuple[int, ...]) -> None:
    module, weight = make_output(cutoffs)
    hidden, target = normal(6, WIDTH).requires_grad_(), torch.tensor([1, output.IGNORE, 20, 7, output.IGNORE, 12])
    losses = module.losses(hidden, weight, target)
    torch.autograd.backward(losses.sum())
    real = target != output.IGNORE
    assert not losses[~real].any()
    assert hidden.grad is not None
    assert not hidden.grad[~real].any()
    torch.testing.assert_close(losses[real], module.losses(hidden[real], weight, target[real]))


@both
def test_losses_in_pieces_equal_losses_at_once(cutoffs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few logits at a time the numbers stay, and no more than that room is kept for backward."""
    module, weight = make_output(cutoffs)
    target = torch.arange(64) % VOCABULARY
    results, largest = [], []
    for room in (1 << 26, 100):
        monkeypatch.setattr(output, "MAX_LOGITS", room)
        hidden, sizes = normal(64, WIDTH).requires_grad_(), [0]

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = module.losses(hidden, weight, target)
        results.append((losses, *torch.autograd.grad(losses.sum(), (hidden, weight, *module.parameters()))))
        largest.append(max(sizes))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert largest[1] <= 64 * WIDTH < largest[0]  # the input is the largest thing kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_have_the_same_losses(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever clusters the targets are in. Under autocast the other way rounds its logits, which are of the order of
    10, to one part in 256, and each number that it adds up; the kernels do the same to gradients alone.
    """
    module, weight = make_output(CUTOFFS)
    module, weight = module.float().to(DEVICE), weight.detach().float().to(DEVICE).requires_grad_()
    for target in (torch.arange(40) % VOCABULARY, torch.full((7,), 20), torch.tensor([0, output.IGNORE, 3])):
        results = []
        for own in (False, True):
            monkeypatch.setattr(output, "is_fused", lambda hidden, own=own: own)
            hidden = normal(len(target), WIDTH).float().to(DEVICE).requires_grad_()
            with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
                losses = module.losses(hidden, weight, target.to(DEVICE))
            assert losses.dtype == torch.float32
            weights = torch.arange(1, len(target) + 1, device=DEVICE) / len(target)
            grads = torch.autograd.grad((losses * weights).sum(), (hidden, weight, *module.parameters()))
            results.append((losses.detach(), *grads))
        rounded = 1e-5 if dtype == torch.float32 else 16 * 2**-8
        torch.testing.assert_close(results[1], results[0], rtol=rounded, atol=10 * rounded)


@pytest.mark.parametrize(
    ("device", "width", "expected"), [("cuda", 256, True), ("cuda", 257, False), ("cpu", 256, False)]
)
def test_when_the_kernel_is_used(device: str, width: int, expected: bool) -> None:
    with torch._subclasses.FakeTensorMode():
        assert output.is_fused(torch.empty(3, width, device=device)) == expected


def test_cutoffs_above_the_vocabulary_are_ignored() -> None:
    assert TiedSoftmax(15, WIDTH, (5, 15, 40)).sizes == [5, 10]
    assert TiedSoftmax(5, 300, (5, 9)).capturable
    assert not TiedSoftmax(6, 300, (5, 9)).capturable  # too wide for the kernels
    assert TiedSoftmax(6, WIDTH, (5, 9)).capturable == HAS_TRITON


@pytest.mark.parametrize("cutoffs", [[50, 20], [0, 20], [20, 20], [2.5], [True, 20], ["a"]])
def test_cutoffs_must_increase(cutoffs: list[int]) -> None:
    with pytest.raises(ValueError, match="cutoffs: expected increasing integers above 0, got"):
        TiedSoftmax(100, WIDTH, cutoffs)
