"""Self-attention as one operator is what its parts are, values and all gradients; and the parts where it does not fit.

B batch, N positions, E width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mgk.inspect.collect import collect
from mgk.nn import MixtureAttention
from mgk.nn.packing import Packing
from tests.ops.triton_env import DEVICE, overflow_checked

# isort: split
from mgk.nn.embeddings import Rotation
from mgk.ops.triton import layer

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

BATCH, LENGTH, EMBED = 2, 19, 24
REAL = torch.arange(LENGTH, device=DEVICE) < torch.tensor([[19], [11]], device=DEVICE)


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Iterator[None]:
    """The tests of the kernels look at integers."""
    with overflow_checked(False):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make(**options: Any) -> MixtureAttention:
    """Two heads, with a prior that is not the initial one."""
    torch.manual_seed(1)
    module = MixtureAttention(EMBED, 2, head_dim=16, impl="triton", **options)
    if module.log_prior is not None:
        module.log_prior.data += 0.5 * torch.randn_like(module.log_prior)
    return module.to(DEVICE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every call of the whole layer."""
    noted, whole = [], layer.attention_layer

    def note(*args: Any) -> Tensor:
        noted.append(True)
        return whole(*args)

    monkeypatch.setattr(layer, "attention_layer", note)
    return noted


def results(module: MixtureAttention, x: Tensor, call: Callable[[MixtureAttention, Tensor], Tensor]) -> list[Tensor]:
    """Output, and gradients of x and of all parameters."""
    torch.manual_seed(2)
    x = x.detach().requires_grad_()
    output = call(module, x)
    grads = torch.autograd.grad(output, [x, *module.parameters()], normal(*output.shape, seed=3).to(output.dtype))
    return [output.detach(), *grads]


def plainly(module: MixtureAttention, x: Tensor, **options: Any) -> Tensor:
    return module(x, **options)[0]  # type: ignore[no-any-return]


def packed(module: MixtureAttention, x: Tensor) -> Tensor:
    packing = Packing(REAL, int(REAL.sum()) + 2)
    return module(packing.pack(x), packing=packing)[0][:-2]  # type: ignore[no-any-return]


KINDS: dict[str, dict[str, Any]] = {
    "smgk": {}, "smgk-hard": {"e_step": "hard"}, "mgk": {"variant": "mgk"},
    "mgk-hard": {"variant": "mgk", "e_step": "hard"},
}  # fmt: skip
CALLS: dict[str, tuple[dict[str, Any], Callable[[MixtureAttention, Tensor], Tensor]]] = {
    "whole": ({}, plainly),
    "causal": ({"causal": True, "bias": False}, plainly),
    "masked": ({}, lambda module, x: plainly(module, x, key_padding_mask=~REAL, query_padding_mask=~REAL)),
    "dropout": ({"dropout": 0.3, "prior": "uniform"}, plainly),
    "packed": ({"num_components": 3}, packed),
}


# Every kind in every call (dropout once), and every precision in every call.
CASES = [(kind, how, "float32") for kind in KINDS for how in CALLS if how != "dropout" or kind == "smgk"]
CASES += [(kind, how, "bfloat16") for kind, how in zip(cycle(KINDS), CALLS, strict=False)]
CASES += [(kind, how, "autocast") for kind, how in zip(cycle(reversed(KINDS)), CALLS, strict=False)]


@pytest.mark.parametrize(("kind", "how", "precision"), CASES)
def test_it_is_what_its_parts_are(
    kind: str, how: str, precision: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, call = CALLS[how]
    module, x = make(**(KINDS[kind] | options)), normal(BATCH, LENGTH, EMBED)
    if precision == "bfloat16":
        module, x = module.bfloat16(), x.bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16) if precision == "autocast" else nullcontext():
        whole = results(module, x, call)
        assert len(calls) == 1
        monkeypatch.setattr(MixtureAttention, "_whole", lambda *args: None)
        parts = results(module, x, call)
    assert len(calls) == 1
    # Both round what they compute, and sum up to BATCH * LENGTH rows in another order.
    eps = torch.finfo(torch.float32 if precision == "float32" else torch.bfloat16).eps
    for got, expected in zip(whole, parts, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        size = max(float(expected.abs().max()), 1e-3)  # a gradient that is nothing but rounding is as small as that
        torch.testing.assert_close(got, expected, rtol=0, atol=4 * eps * size)


def test_the_rest_of_a_batch_may_be_alone() -> None:
    """(N,E) without a batch."""
    module, x = make(), normal(LENGTH, EMBED)
    assert torch.equal(module(x)[0], module(x[None])[0][0])


def cross(module: MixtureAttention, x: Tensor) -> Tensor:
    return module(x, x.flip(1))[0]  # type: ignore[no-any-return]


def hooked(module: MixtureAttention, x: Tensor) -> Tensor:
    module.key_proj.register_forward_hook(lambda *_: None)
    return plainly(module, x)


def frozen(module: MixtureAttention, x: Tensor) -> Tensor:
    module.value_proj.weight.requires_grad_(False)
    return plainly(module, x)


def exchanged(module: MixtureAttention, x: Tensor) -> Tensor:
    module.out_proj = nn.Sequential(module.out_proj)  # type: ignore[assignment]
    return plainly(module, x)


def counted(module: MixtureAttention, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        output = plainly(module, x)
    assert counter.get_total_flops() > 2 * BATCH * LENGTH * EMBED * 32 * 4  # the projections' and more
    return output


def turned(module: MixtureAttention, x: Tensor) -> Tensor:
    angle = torch.zeros(1, LENGTH, 16, device=DEVICE)
    return plainly(module, x, rotary=Rotation(angle.cos(), angle.sin()))


def few(module: MixtureAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        return plainly(module, x[:, :5])


APART: dict[str, tuple[dict[str, Any], Callable[[MixtureAttention, Tensor], Tensor]]] = {
    "cross": ({}, cross), "hooked": ({}, hooked), "frozen": ({}, frozen), "exchanged": ({}, exchanged),
    "counted": ({}, counted), "turned": ({"rotary_dim": 8}, turned), "few": ({}, few),
    "weights": ({}, lambda module, x: plainly(module, x, need_weights=True)),
    "cache": ({}, lambda module, x: plainly(module, x, cache=module.new_cache(BATCH))),
    "em": ({"prior": "em"}, plainly), "means": ({"means": "em"}, plainly),
    "variance": ({"learn_variance": True}, plainly),
    "softmax": ({"variant": "softmax"}, plainly), "linear": ({"variant": "linear"}, plainly),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_who_wants_parts_gets_parts(case: str, calls: list[bool]) -> None:
    options, call = APART[case]
    output = call(make(**options), normal(BATCH, LENGTH, EMBED))
    assert output.isfinite().all()
    assert not calls


def test_without_gradients_it_is_whole_too(calls: list[bool]) -> None:
    module, x = make(), normal(BATCH, LENGTH, EMBED)
    with torch.no_grad():
        output = plainly(module, x)
    assert torch.equal(output, plainly(module, x))
    assert len(calls) == 2


@pytest.mark.parametrize("call", [plainly, packed])
def test_who_looks_inside_sees_the_parts(call: Callable[[MixtureAttention, Tensor], Tensor], calls: list[bool]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = make(variant="smgk")

        def forward(self, x: Tensor) -> Tensor:
            return call(self.attention, x)

    model, x = Model(), normal(BATCH, LENGTH, EMBED)
    (found,) = collect(model, x)
    assert found.name == "attention"
    assert found.query.shape == (BATCH, 2, LENGTH, 16)
    assert not calls
    model(x)
    assert calls == [True]
