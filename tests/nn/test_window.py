"""A window in the module: the dense formula with that mask, in one call, packed, from a cache and in M-steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.inspect import collect
from mgk.nn import MixtureAttention, replace_attention
from mgk.nn.cache import WindowCache
from mgk.nn.m_step import update_means
from mgk.nn.packing import Packing
from mgk.ops import cost
from tests.nn.common import EXACT, KINDS, dense, make, normal, visible
from tests.ops.triton_env import DEVICE

WINDOWED = [kind for kind in KINDS if KINDS[kind]["variant"] in ("softmax", "mgk", "smgk")]
every_kind = pytest.mark.parametrize("kind", WINDOWED)
WINDOW = 3


def windowed(kind: str, window: int | None = WINDOW, **options: Any) -> MixtureAttention:
    return make(kind, causal=True, window=window, **options)


def seen_in(window: int, seen: Tensor) -> Tensor:
    """Of the visible pairs (B,1,Nq,Nk), those in the window."""
    return seen.triu(seen.shape[3] - seen.shape[2] - window + 1)


@every_kind
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_formula_with_that_mask(kind: str, padded: bool) -> None:
    """Outputs and weights. Queries that are padding, too, see what they see without padding of queries."""
    module, x = windowed(kind), normal(2, 7, 12)
    padding = torch.arange(7) >= torch.tensor([7, 5])[:, None] if padded else None
    found, weights = module(x, key_padding_mask=padding, need_weights=True, average_attn_weights=False)
    expected, expected_weights = dense(module, x, x, x, seen_in(WINDOW, visible(2, 7, 7, True, padding)))
    real = torch.ones(2, 7, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(found[real], expected[real], **EXACT)
    torch.testing.assert_close(weights.transpose(1, 2)[real], expected_weights.transpose(1, 2)[real], **EXACT)
    if not padded:
        (layer,) = collect(module, x)
        for sample in range(2):
            for head, expected in zip(layer.heads(sample), weights[sample], strict=True):
                torch.testing.assert_close(head.rows(2, 6).weights, expected[2:6], **EXACT)


@every_kind
def test_a_window_of_the_whole_sequence_is_causal(kind: str) -> None:
    x = normal(2, 7, 12)
    expected = windowed(kind, None)(x)[0]
    for window in (7, 8, 1 << 40):
        torch.testing.assert_close(windowed(kind, window)(x)[0], expected, **EXACT)


@every_kind
@pytest.mark.parametrize("pieces", [(1,) * 12, (5, 1, 1, 2, 3), (12,), (2, 8, 2)])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_steps_are_the_full_pass(kind: str, pieces: tuple[int, ...], window: int) -> None:
    module, x = windowed(kind, window), normal(2, 12, 12)
    cache = module.new_cache(2)
    steps = [module(piece, cache=cache)[0] for piece in torch.split(x, list(pieces), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), module(x)[0], **EXACT)
    assert cache.length == 12
    d = cost.Dimensions(
        variant=module.variant, heads=3, head_dim=4, queries=1, keys=12, batch=2, causal=True, window=window,
        components=module.num_components,
    )  # fmt: skip
    assert cache.bytes == cost.cache_bytes(d, 8)


@pytest.mark.parametrize("kind", sorted(set(WINDOWED) - {"smgk-positions"}))
def test_left_padding_with_a_cache(kind: str) -> None:
    module, short, long = windowed(kind), normal(4, 12), normal(7, 12, seed=1)
    x = torch.stack([torch.cat([50 * normal(3, 12, seed=2), short]), long])
    padding = torch.arange(7) < torch.tensor([3, 0])[:, None]
    cache, steps = module.new_cache(2), []
    for start, stop in ((0, 2), (2, 5), (5, 6), (6, 7)):
        steps.append(module(x[:, start:stop], key_padding_mask=padding[:, :stop], cache=cache)[0])
    output = torch.cat(steps, 1)
    torch.testing.assert_close(output[0, 3:], module(short)[0], **EXACT)
    torch.testing.assert_close(output[1], module(long)[0], **EXACT)


def test_the_buffers_are_at_most_twice_the_window() -> None:
    """However long the text, whether it comes in one piece or position by position; and beams are followed."""
    module, x = windowed("smgk", 5), normal(2, 60, 12)
    cache = module.new_cache(2)
    assert isinstance(cache, WindowCache)
    for piece in torch.split(x, [40, *[1] * 20], 1):
        last = module(piece, cache=cache)[0]
        assert cache._key is not None
        assert cache._key.shape[-2] <= 10
    torch.testing.assert_close(last, module(x)[0][:, -1:], **EXACT)
    cache.reorder(torch.tensor([1, 1, 0]))
    more = normal(3, 1, 12, seed=5)
    expected = module(torch.cat([x[[1, 1, 0]], more], 1))[0][:, -1:]
    torch.testing.assert_close(module(more, cache=cache)[0], expected, **EXACT)


@every_kind
def test_packed_sequences_are_computed_alone(kind: str) -> None:
    module, x = windowed(kind), normal(3, 7, 12)
    mask = torch.arange(7) < torch.tensor([7, 2, 5])[:, None]
    packing = Packing(mask, int(mask.sum()) + 2)
    found = module(packing.pack(x), packing=packing)[0]
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = module(x[row, :length])[0]
        torch.testing.assert_close(packing.unpack(found)[row, :length], alone, **EXACT)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numbers that Triton's interpreter drops
@pytest.mark.parametrize("kind", ["mgk", "smgk"])
def test_kernels_read_packed_rows_with_a_window(kind: str) -> None:
    """Float32 against float64, sums of dozens of numbers."""
    mask, results = torch.arange(7) < torch.tensor([7, 2, 5])[:, None], []
    for impl, device, dtype in (("triton", DEVICE, torch.float32), ("reference", "cpu", torch.float64)):
        packing = Packing(mask.to(device), int(mask.sum()))
        module = windowed(kind, impl=impl).to(device, dtype)
        results.append(module(normal(14, 12).to(device, dtype), packing=packing)[0].double().cpu())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mgk-em", "smgk-positions"])
def test_the_prior_is_updated_over_the_visible_queries(kind: str) -> None:
    """Its M-step is the mean of the responsibilities of the pairs in the window."""
    module, x = windowed(kind).train(), normal(2, 7, 12)
    before = module.prior.log()
    seen: list[Any] = []
    with module.register_attention_hook(lambda _, inputs: seen.append(inputs)):
        module(x)
    (inputs,) = seen
    key = inputs.key if inputs.shift is None else inputs.key[:, :, None] + inputs.shift[:, :, None]
    distance = (inputs.query[:, :, None, :, None] - key[:, :, :, None]).square().sum(-1)
    prior = before[:, :, None, None] if before.dim() == 2 else before[..., :7][:, :, None]
    gamma = (prior - distance / (2 * module.head_dim**0.5)).softmax(2)
    pairs = seen_in(WINDOW, visible(2, 7, 7, True))
    total, count = (gamma * pairs[:, :, None]).sum((0, 3)), pairs.sum((0, 1, 2))
    if before.dim() == 2:
        torch.testing.assert_close(module.prior, total.sum(-1) / count.sum(), **EXACT)
    else:
        torch.testing.assert_close(module.prior[..., :7], total / count, **EXACT)


def test_means_are_updated_over_the_visible_queries() -> None:
    """Each query alone with the keys of its window, in a batch of its own, gives the same sums."""
    query, key = normal(1, 2, 7, 4), normal(1, 2, 7, 4, seed=1)
    shifts = [normal(2, 2, 4, seed=2) for _ in range(2)]
    variances = [0.3 * normal(2, 2, seed=3) for _ in range(2)]
    plain: dict[str, Any] = {"query_mask": None}
    update_means(shifts[0], variances[0], None, query, key, is_causal=True, window=WINDOW, key_mask=None, **plain)
    before = torch.nn.functional.pad(key, (0, 0, WINDOW - 1, 0))
    keys = before.unfold(2, WINDOW, 1)[0].permute(1, 0, 3, 2)  # (7,H,WINDOW,D)
    mask = torch.arange(7)[:, None] + torch.arange(WINDOW) >= WINDOW - 1
    alone = query[0].transpose(0, 1)[:, :, None]
    update_means(shifts[1], variances[1], None, alone, keys, is_causal=False, window=None, key_mask=mask, **plain)
    torch.testing.assert_close(*shifts, **EXACT)
    torch.testing.assert_close(*variances, **EXACT)


@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk"])
def test_grouped_queries_and_gradients(variant: str) -> None:
    module = MixtureAttention(12, 6, variant=variant, head_dim=4, num_kv_heads=2, causal=True, window=2).double()
    x = normal(2, 6, 12)
    grads = []
    for impl in ("reference", "auto"):
        module.impl = impl
        grads.append(torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_replaced_attention_can_have_one() -> None:
    old = torch.nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = replace_attention(torch.nn.TransformerEncoder(old, 2, enable_nested_tensor=False), causal=True, window=2)
    x = normal(2, 7, 12)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    changed = x.clone()
    changed[:, 0] += 1  # two layers see two positions back
    one, two = (model(each, mask, is_causal=True) for each in (x, changed))
    assert torch.equal(one[:, 3:], two[:, 3:])
    assert not torch.equal(one[:, 2], two[:, 2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 3}, ValueError, "^window: expected None without causal=True, got 3"),
        ({"window": 0, "causal": True}, ValueError, "^window: expected at least 1, got 0"),
        ({"window": -1, "causal": True}, ValueError, "^window: expected at least 1, got -1"),
        ({"window": 2.0, "causal": True}, TypeError, "^window: expected an integer, got float 2.0"),
        ({"window": True, "causal": True}, TypeError, "^window: expected an integer, got bool True"),
        ({"window": 3, "causal": True, "variant": "mlk"}, ValueError, "^window: expected None for variant 'mlk'"),
    ],
)
def test_wrong_windows_are_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureAttention(12, 3, **options)
