"""Decoding step by step is the full causal pass, and a cache holds no more than it must."""

from __future__ import annotations

import pytest
import torch

from mgk.nn import KeyValueCache
from mgk.ops import cost
from tests.nn.common import EXACT, KINDS, make, normal

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("pieces", [(1,) * 7, (4, 1, 2), (7,)])
def test_steps_are_the_full_pass(kind: str, pieces: tuple[int, ...]) -> None:
    module, x = make(kind), normal(2, 7, 12)
    cache = module.new_cache(2)
    steps = [module(piece, cache=cache)[0] for piece in torch.split(x, list(pieces), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), module(x, is_causal=True)[0], **EXACT)
    assert cache.length == 7


@pytest.mark.parametrize(
    "kind", sorted(KINDS.keys() - {"smgk-positions"})
)  # padding moves a sequence to other positions
def test_left_padding(kind: str) -> None:
    module, short, long = make(kind), normal(3, 12), normal(6, 12, seed=1)
    x = torch.stack([torch.cat([50 * normal(3, 12, seed=2), short]), long])
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :3] = True
    cache, steps = module.new_cache(2), []
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        steps.append(module(x[:, start:stop], key_padding_mask=padding[:, :stop], cache=cache)[0])
    output = torch.cat(steps, 1)
    torch.testing.assert_close(output[0, 3:], module(short, is_causal=True)[0], **EXACT)
    torch.testing.assert_close(output[1], module(long, is_causal=True)[0], **EXACT)


@every_kind
def test_reorder_follows_the_beams(kind: str) -> None:
    module, x = make(kind), normal(3, 5, 12)
    beams = torch.tensor([2, 0, 2, 1])
    cache = module.new_cache(3)
    cache.reorder(torch.tensor([0, 1, 2]))  # an empty one too
    module(x[:, :4], cache=cache)
    cache.reorder(beams)
    last = normal(4, 1, 12, seed=3)
    output = module(last, cache=cache)[0]
    expected = module(torch.cat([x[beams, :4], last], 1), is_causal=True)[0][:, 4:]
    torch.testing.assert_close(output, expected, **EXACT)


@every_kind
def test_bytes_are_those_of_the_cost_model(kind: str) -> None:
    module = make(kind)
    options = {name: KINDS[kind][name] for name in ("variant", "feature_map") if name in KINDS[kind]}
    cache = module.new_cache(2)
    assert cache.bytes == 0
    for length in range(1, 5):
        module(normal(2, 1, 12), cache=cache)
        d = cost.Dimensions(
            heads=3, head_dim=4, queries=1, keys=length, batch=2, components=module.num_components, **options
        )
        assert cache.bytes == cost.cache_bytes(d, 8)


def test_shifted_keys_are_stored_once() -> None:
    key_value, shifted = make("softmax").new_cache(2), make("smgk", num_components=5).new_cache(2)
    make("softmax")(normal(2, 3, 12), cache=key_value)
    make("smgk", num_components=5)(normal(2, 3, 12), cache=shifted)
    assert key_value.bytes == shifted.bytes


def test_growth_is_geometric() -> None:
    """1,000 single positions move the buffer when there are 1, 17, 33, ..., 513 of them; with reserved room, once."""
    for capacity, expected in ((0, [1, 17, 33, 65, 129, 257, 513]), (1000, [1])):
        cache, moves, before = KeyValueCache(1, capacity), [], torch.empty(0)
        for n in range(1, 1001):
            key, value = cache.append(torch.full((1, 1, 1, 2), n), torch.full((1, 1, 1, 3), -n))
            if key.data_ptr() != before.data_ptr():
                moves.append(n)
            before = key  # alive, so that its place is not given to another
        assert moves == expected
        assert key[0, 0, :, 0].tolist() == list(range(1, 1001))
        assert value[0, 0, :, 2].tolist() == [-n for n in range(1, 1001)]


@pytest.mark.parametrize("kind", ["smgk", "smlk"])
def test_a_call_with_a_cache_is_inference(kind: str) -> None:
    module = make(kind)
    assert not module(normal(2, 3, 12).requires_grad_(), cache=module.new_cache(2))[0].requires_grad


@pytest.mark.parametrize("kind", ["softmax", "mgk", "smgk-hard"])
def test_weights_of_a_step(kind: str) -> None:
    module, x = make(kind), normal(2, 5, 12)
    cache = module.new_cache(2)
    module(x[:, :3], cache=cache)
    weights = module(x[:, 3:], need_weights=True, cache=cache)[1]
    torch.testing.assert_close(weights, module(x, need_weights=True, is_causal=True)[1][:, 3:], **EXACT)


@pytest.mark.parametrize("kind", ["smgk", "smlk"])
def test_autocast_keeps_half_the_bytes(kind: str) -> None:
    module, x = make(kind).float(), normal(2, 6, 12).float()
    cache = module.new_cache(2)
    with torch.autocast("cpu", torch.bfloat16):
        steps = torch.cat([module(x[:, i : i + 2], cache=cache)[0] for i in (0, 2, 4)], 1)
        full = module(x, is_causal=True)[0]
    if kind == "smgk":
        assert cache.bytes == 2 * 2 * 3 * 6 * (4 + 4)
    # The same bfloat16 keys and values, summed in float32 in another order, then one rounding and a projection.
    torch.testing.assert_close(steps.float(), full.float(), rtol=2**-6, atol=2**-6)
