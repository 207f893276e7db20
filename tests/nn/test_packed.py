"""Attention of packed rows equals that of padded rows, for padding at any place; spare rows are never read.

B batch, H heads, N positions, D width of a head, T = B N rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.nn import Block, MixtureAttention, softmax
from mgk.nn.packing import Packing, group_sums, real_first
from tests.nn.common import EXACT, KINDS, make, normal
from tests.ops.triton_env import DEVICE

LENGTHS = (7, 3, 0, 5)
RIGHT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
MASKS = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "holes": normal(4, 7, seed=5) > 0,
    "none": torch.ones(4, 7, dtype=torch.bool),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Kernel(torch.autograd.Function):
    """`softmax.flash` sequence by sequence; what the kernel does not write is NaN, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v, ends)
        ctx.is_causal = is_causal
        return Kernel.attend(q, k, v, ends, is_causal)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, is_causal: bool) -> Tensor:
        output = torch.full_like(q, math.nan)
        for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            if stop > start:
                attended = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
                output[start:stop] = attended.transpose(0, 1)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ends = ctx.saved_tensors
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            output = Kernel.attend(inputs[0], inputs[1], inputs[2], ends, ctx.is_causal)
            written = int(ends[-1])
            grads = torch.autograd.grad(output[:written], inputs, grad[:written])
        for each in grads:
            each[written:] = math.nan
        return *grads, None, None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pack on this machine too; returns the dropouts asked for."""
    asked: list[float] = []

    def flash(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool, dropout_p: float, window: None
    ) -> Tensor:
        assert longest == 7
        assert window is None
        assert ends.dtype == torch.int32
        asked.append(dropout_p)
        return Kernel.apply(q, k, v, ends, causal)  # type: ignore[no-untyped-call, no-any-return]

    monkeypatch.setattr(softmax, "flash", flash)
    monkeypatch.setattr(softmax, "can_be_packed", lambda query, value: True)
    return asked


@pytest.mark.parametrize("place", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_attention_equals_masked_attention(place: str, is_causal: bool, kernel: list[float]) -> None:
    """Values and gradients at the real tokens, zeros at the others."""
    mask, results = MASKS[place], []
    for query_mask in (mask, None):  # packed, and as ever
        inputs = [normal(4, 2, 7, 8, seed=s).requires_grad_() for s in range(3)]
        output = softmax.softmax_attention(
            *inputs, is_causal=is_causal, key_mask=mask, dropout_p=0.0, impl="reference", query_mask=query_mask
        )
        real = mask[:, None, :, None]
        assert query_mask is None or not output[~real.expand_as(output)].any()
        torch.autograd.backward((output * normal(4, 2, 7, 8, seed=3)).masked_fill(~real, 0).sum())
        results.append([output.masked_fill(~real, 0), *(x.grad for x in inputs)])
    torch.testing.assert_close(results[0], results[1], **EXACT)
    assert kernel == [0.0]


def test_a_layer_packs_its_padded_batch(kernel: list[float]) -> None:
    """In training, with dropout; and padding does not reach the gradients of the weights."""
    torch.manual_seed(0)
    attention = MixtureAttention(12, 3, variant="softmax", dropout=0.25, dtype=torch.float64)
    block = Block(attention, 16, norm="pre").double().train()
    grads = []
    for scale in (1.0, 1e6):
        x = normal(4, 7, 12)
        x[~RIGHT] *= scale
        block.zero_grad()
        block(x, ~RIGHT)[RIGHT].square().sum().backward()
        grads.append([p.grad for p in block.parameters()])
    torch.testing.assert_close(grads[0], grads[1], **EXACT)
    assert kernel == [0.25, 0.25]


def test_other_masks_are_not_packed(kernel: list[float]) -> None:
    """Queries that are not padded where the keys are, or are not said to be, keep their outputs."""
    attention = MixtureAttention(12, 3, variant="softmax", dtype=torch.float64).eval()
    x = normal(4, 7, 12)
    alone, _ = attention(x, key_padding_mask=~RIGHT)
    other, _ = attention(x, key_padding_mask=~RIGHT, query_padding_mask=RIGHT)
    assert kernel == []
    assert alone[1, 3:].any()
    torch.testing.assert_close(other[~RIGHT], alone[~RIGHT], **EXACT)


@pytest.mark.parametrize("place", MASKS)
def test_real_first(place: str) -> None:
    real = MASKS[place].flatten()
    place_of, order = real_first(real)
    torch.testing.assert_close(order, torch.argsort(~real, stable=True), rtol=0, atol=0)
    torch.testing.assert_close(place_of[order], torch.arange(len(real)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*KINDS, "softmax in the kernel"])
@pytest.mark.parametrize("place", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("spare", [0, 3])
def test_packed_rows(kind: str, place: str, is_causal: bool, spare: int, request: pytest.FixtureRequest) -> None:
    """Values, gradients and M-steps; rows behind the tokens change nothing and get no gradient, whatever is in them."""
    mask = MASKS[place]
    size = min(int(mask.sum()) + spare, mask.numel())
    packing, x, grad = Packing(mask, size), normal(4, 7, 12), normal(4, 7, 12, seed=1)
    results = []
    for packed in (False, True):
        module = make(kind.split()[0]).train()
        if packed and kind not in KINDS:
            request.getfixturevalue("kernel")
        given = (torch.cat([x[mask], 1e3 * normal(size, 12)])[:size] if packed else x.clone()).requires_grad_()
        if packed:
            output, _ = module(given, packing=packing, is_causal=is_causal)
            assert output.isfinite().all()
            torch.autograd.backward(output[~packing.spare], grad[mask])
            assert given.grad is not None
            assert not given.grad[packing.spare].any()
            found = [output[~packing.spare], given.grad[~packing.spare]]
        else:
            output, _ = module(given, key_padding_mask=~mask, query_padding_mask=~mask, is_causal=is_causal)
            torch.autograd.backward(output[mask], grad[mask])
            assert given.grad is not None
            found = [output[mask], given.grad[mask]]
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append([*found, gradients, dict(module.named_buffers())])
    torch.testing.assert_close(results[1], results[0], **EXACT)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numbers that Triton's interpreter drops
@pytest.mark.parametrize(
    "kind",
    [
        "mgk", "mgk-hard", "smgk", "smgk-hard", "smgk-variance", "linear", "mlk", "smlk", "mlk-keys", "smlk-keys",
    ],
)  # fmt: skip
def test_kernels_read_packed_rows_without_padding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 against float64, sums of dozens of numbers."""
    mask, results = MASKS["holes"], []
    given = normal(int(mask.sum()) + 3, 12)
    for impl, device, dtype in (("triton", DEVICE, torch.float32), ("blockwise", "cpu", torch.float64)):
        packing = Packing(mask.to(device), len(given))
        module, x = make(kind, impl=impl).to(device, dtype), given.to(device, dtype).requires_grad_()
        with monkeypatch.context() as patch:
            if impl == "triton":
                patch.setattr(Packing, "unpack", None)
            output, _ = module(x, packing=packing)
        torch.autograd.backward(output[:-3], normal(len(x) - 3, 12, seed=1).to(output))
        assert x.grad is not None
        assert not x.grad[-3:].any()
        gradients = {name: parameter.grad.double() for name, parameter in module.named_parameters()}  # type: ignore[union-attr]
        results.append([output[:-3].double(), x.grad.double(), gradients])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4, check_device=False)


@pytest.mark.parametrize("kind", ["softmax", "smgk"])
def test_packed_rows_with_projection_hooks(kind: str) -> None:
    """A hook of a projection is called, and nothing else changes."""
    module, packing, seen = make(kind), Packing(RIGHT, 17), []
    expected, _ = module(normal(17, 12), packing=packing)
    module.key_proj.register_forward_hook(lambda *call: seen.append(call[2].shape))
    output, _ = module(normal(17, 12), packing=packing)
    torch.testing.assert_close(output, expected, **EXACT)
    assert seen == [(1, 17, 12)]


def test_arguments_that_packing_excludes() -> None:
    attention, packing = make("smgk"), Packing(RIGHT, 20)
    for extra in ({"key": normal(20, 12)}, {"key_padding_mask": ~RIGHT}, {"need_weights": True}):
        with pytest.raises(ValueError, match="packing: expected at most is_causal and rotary"):
            attention(normal(20, 12), packing=packing, **extra)
    with pytest.raises(ValueError, match="query: expected"):
        attention(normal(20, 11), packing=packing)
    with pytest.raises(ValueError, match=r"key: expected at most 16 positions \(prior_positions\), got 17"):
        make("smgk-positions")(normal(9, 12), packing=Packing(torch.arange(34).view(2, 17) % 4 == 0, 9))


@pytest.mark.parametrize("place", MASKS)
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("width", [3, 5])  # fewer and more than sequences
def test_sum_of_packed_rows(place: str, spare: int, width: int) -> None:
    mask = MASKS[place]
    packing = Packing(mask, min(int(mask.sum()) + spare, mask.numel()))
    x = normal(4, 7, width).requires_grad_()
    expected = x.masked_fill(~mask[..., None], 0).sum(1)
    total = packing.sum(packing.pack(x))
    torch.testing.assert_close(total, expected, **EXACT)
    grad = normal(4, width, seed=1)
    results = [torch.autograd.grad(each, x, grad) for each in (total, expected)]
    torch.testing.assert_close(results[0], results[1], **EXACT)


@pytest.mark.parametrize("rows", [0, 1, 31, 384])  # in 128 parts, in one, in one, in 128
def test_sums_of_groups(rows: int) -> None:
    """What is in no group is left out. Autocast rounds nothing: errors are of float32, of sums of the order of 10."""
    x, group = normal(rows, 5), torch.arange(rows) % 7 - 1
    expected = torch.stack([x[group == each].sum(0) for each in range(4)])
    torch.testing.assert_close(group_sums(x, group, 4), expected, **EXACT)
    with torch.autocast("cpu", torch.bfloat16):
        found = group_sums(x.float(), group, 4)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@gpu
def test_packed_rows_on_a_gpu() -> None:
    """The real kernel on rows as they come out of the projection, against float64: a few roundings (2^-8)."""
    mask, results = MASKS["holes"].cuda(), []
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        module = MixtureAttention(16, 2, variant="softmax", dtype=torch.float64).to("cuda", dtype)
        packing = Packing(mask, int(mask.sum()) + 2)
        x = normal(len(packing.position), 16).to("cuda", dtype).requires_grad_()
        output, _ = module(x, packing=packing)
        torch.autograd.backward(output[:-2], normal(len(x) - 2, 16, seed=1).to(output))
        results.append([each.double() for each in (output[:-2], x.grad)])  # type: ignore[union-attr]
    torch.testing.assert_close(*results, rtol=0.04, atol=0.04)


@gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_window_on_a_gpu(packed: bool) -> None:
    """The real kernel with a window, as a batch without padding and as packed rows: a few roundings (2^-8)."""
    mask, results = (MASKS["right"] if packed else torch.ones(4, 7, dtype=torch.bool)).cuda(), []
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        options: dict[str, Any] = {"variant": "softmax", "causal": True, "window": 3, "dtype": torch.float64}
        module = MixtureAttention(16, 2, **options).to("cuda", dtype)
        x = normal(4, 7, 16).to("cuda", dtype).requires_grad_()
        packing = Packing(mask, int(mask.sum()))
        output = packing.unpack(module(packing.pack(x), packing=packing)[0]) if packed else module(x)[0]
        torch.autograd.backward(output[mask], normal(4, 7, 16, seed=1).to(output)[mask])
        results.append([each.double() for each in (output[mask], x.grad)])  # type: ignore[union-attr]
    torch.testing.assert_close(*results, rtol=0.04, atol=0.04)


@gpu
@pytest.mark.parametrize("place", ["right", "left", "holes"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_real_kernel(place: str, is_causal: bool) -> None:
    """Half precision against float64: an error of a few roundings (2^-8), of numbers of the order of 1 to 10."""
    mask, results = MASKS[place].cuda(), []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [normal(4, 2, 7, 8, seed=s).bfloat16().to("cuda", dtype).requires_grad_() for s in range(3)]
        output = softmax.softmax_attention(
            *inputs, is_causal=is_causal, key_mask=mask, dropout_p=0.0, impl="reference", query_mask=mask
        )
        output = output.masked_fill(~mask[:, None, :, None], 0)
        torch.autograd.backward((output * normal(4, 2, 7, 8, seed=3).to(output)).sum())
        results.append([x.double() for x in (output, *(x.grad for x in inputs))])  # type: ignore[union-attr]
    torch.testing.assert_close(*results, rtol=0.04, atol=0.04)
    assert softmax.can_be_packed(*(torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
