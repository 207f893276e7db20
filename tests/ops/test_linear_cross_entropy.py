"""The loss in chunks and its gradients are those of the full logits, with one chunk of logits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from mgk.ops import linear_cross_entropy as module
from tests.nn.common import normal

ROWS, WIDTH, VOCABULARY, IGNORE = 100, 6, 23, -100


def inputs(dtype: torch.dtype = torch.float64, *, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and targets of which every seventh does not count."""
    shapes = (rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    leaves = [normal(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    target = torch.arange(rows) % VOCABULARY
    target[::7] = IGNORE
    return *leaves, target  # type: ignore[return-value]


def results(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss / 3, leaves)


@pytest.fixture(autouse=True)
def _always_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_BYTES", 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_cross_entropy_of_all_logits(compiled: bool, biased: bool) -> None:
    hidden, weight, bias, target = inputs()
    leaves = (hidden, weight, bias) if biased else (hidden, weight)
    offset = bias if biased else None
    call: Any = module.linear_cross_entropy
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted = cross_entropy(linear(hidden, weight, offset).float(), target, ignore_index=IGNORE, reduction="sum")
    found = call(hidden, weight, offset, target, IGNORE)
    assert found.dtype == torch.float32
    # The logits are float32 in both.
    torch.testing.assert_close(results(found, *leaves), results(wanted, *leaves), rtol=1e-5, atol=1e-5)


def test_under_autocast_it_errs_as_little_as_full_logits() -> None:
    """Both compute products in bfloat16; full logits also round the gradient of the weight once."""
    errors = []
    hidden, weight, bias, target = inputs()
    wanted = results(
        cross_entropy(linear(hidden, weight, bias), target, ignore_index=IGNORE, reduction="sum"), hidden, weight, bias
    )
    hidden, weight, bias, target = inputs(torch.float32)
    for chunked in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            if chunked:
                loss = module.linear_cross_entropy(hidden, weight, bias, target, IGNORE)
            else:
                loss = cross_entropy(linear(hidden, weight, bias).float(), target, ignore_index=IGNORE, reduction="sum")
        found = results(loss, hidden, weight, bias)
        assert all(each.dtype == torch.float32 for each in found)
        errors.append([float((each - right).abs().max()) for each, right in zip(found, wanted, strict=True)])
    assert all(own <= 2 * full for full, own in zip(*errors, strict=True)), errors


def test_frozen_weights_get_no_gradient_and_ignored_rows_none_either() -> None:
    hidden, weight, _, target = inputs()
    weight.requires_grad_(False)
    module.linear_cross_entropy(hidden, weight, None, target, IGNORE).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[target == IGNORE].any()
    assert hidden.grad[target != IGNORE].any(1).all()


def test_no_more_than_one_chunk_of_logits_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the size of logits is kept for backward."""
    sizes: list[int] = []
    real = module.replace_by_gradient

    def look(logits: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(logits))
        return real(logits, *rest)

    monkeypatch.setattr(module, "replace_by_gradient", look)
    hidden, weight, bias, target = inputs()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.linear_cross_entropy(hidden, weight, bias, target, IGNORE)
    assert max(sizes) == -(-ROWS // module.CHUNKS)
    assert max(kept) == max(hidden.numel(), weight.numel())


@torch.no_grad()
def test_without_gradients_the_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module.linear_cross_entropy(*inputs(), IGNORE)
    monkeypatch.setattr(module, "FEW_BYTES", 1 << 20)
    torch.testing.assert_close(found, module.linear_cross_entropy(*inputs(), IGNORE))


def test_it_compiles_once_more_when_the_number_of_rows_changes() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    call = torch.compile(module.linear_cross_entropy, fullgraph=True, backend=backend)
    for rows in (100, 99, 64, 120, 71):
        hidden, weight, bias, target = inputs(rows=rows)
        call(hidden, weight, bias, target, IGNORE)
    assert len(graphs) == 2


def test_flops_are_those_of_three_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    hidden, weight, bias, target = inputs()
    with FlopCounterMode(display=False) as counter:
        module.linear_cross_entropy(hidden, weight, bias, target, IGNORE).backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() == 3 * 2 * ROWS * WIDTH * VOCABULARY
