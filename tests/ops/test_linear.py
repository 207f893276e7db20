"""The linear family: Eqn 14 in its parallel, chunked and recurrent forms, and its laws.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgk.ops.linear import linear_attention, linear_step, mlk_attention, smlk_attention
from tests.ops.linear_cases import MAPS, agree, dense, everywhere, feed, gradients, inputs, numbers

sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 2),
        "H": st.integers(1, 2),
        "M": st.integers(1, 3),
        "Nq": st.integers(1, 9),
        "Nk": st.integers(1, 9),
        "Dv": st.integers(1, 4),
        "prior": st.sampled_from((None, "head", "position")),
        "seed": st.integers(0, 1000),
    }
)


@everywhere
@given(sizes=sizes, which=st.integers(0, len(MAPS) - 1), is_causal=st.booleans(), masked=st.booleans())
def test_mlk_is_its_dense_form(impl: str, sizes: dict[str, Any], which: int, is_causal: bool, masked: bool) -> None:
    arguments = inputs(**sizes)
    options: dict[str, Any] = {"feature_map": MAPS[which], "is_causal": is_causal}
    if masked:
        options["key_mask"] = numbers(sizes["B"], sizes["Nk"], seed=sizes["seed"]) > -0.5
    got, expected = mlk_attention(**arguments, impl=impl, **options), dense(**arguments, **options)
    agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])


@pytest.mark.parametrize("is_causal", [False, True])
def test_mlk_is_not_linear_attention_with_mixed_keys(is_causal: bool) -> None:
    arguments = inputs(prior="head", Nq=7)
    prior = arguments["log_prior"].exp()[None, :, :, None, None]
    collapsed = linear_attention(
        arguments["query"], (prior * arguments["key"]).sum(2), arguments["value"], is_causal=is_causal
    )
    assert (mlk_attention(**arguments, is_causal=is_causal) - collapsed).abs().max() > 0.01


@pytest.mark.parametrize("length", [1, 63, 130, 300])
@pytest.mark.parametrize("which", range(len(MAPS)))
@pytest.mark.parametrize("prior", ["head", "position"])
def test_chunked_is_recurrent_is_dense(length: int, which: int, prior: str) -> None:
    """Values and gradients, chunks and pieces that do not divide the length."""
    arguments = inputs(B=1, Nq=length, Nk=length, prior=prior)
    options: dict[str, Any] = {"feature_map": MAPS[which]}
    expected = dense(**arguments, is_causal=True, **options)
    wanted = [expected, *gradients(expected, arguments)]
    chunked = mlk_attention(**arguments, is_causal=True, impl="blockwise", **options)
    agree([chunked, *gradients(chunked, arguments)], wanted)
    pieces = [1] * length if length <= 63 else [1, 1, 5, 129, length - 136] if length > 136 else [1, length - 2, 1]
    stepped = feed(pieces, *arguments.values(), **options)  # type: ignore[misc]
    agree([stepped, *gradients(stepped, arguments)], wanted)


def test_the_last_causal_query_is_a_parallel_one() -> None:
    arguments = inputs(Nq=130, Nk=130)
    last = arguments | {"query": arguments["query"][:, :, -1:]}
    causal = mlk_attention(**arguments, is_causal=True)[:, :, -1:]
    parallel = mlk_attention(**last)
    agree([causal, *gradients(causal, arguments)], [parallel, *gradients(parallel, arguments)])


@pytest.mark.parametrize(("queries", "keys"), [(1, 130), (63, 200), (200, 63), (130, 129), (3, 0), (0, 3)])
@everywhere
def test_causal_is_lower_right_aligned(impl: str, queries: int, keys: int) -> None:
    arguments = inputs(Nq=queries, Nk=keys)
    got, expected = (
        mlk_attention(**arguments, is_causal=True, impl=impl),
        dense(**arguments, is_causal=True),
    )
    agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])
    assert not got[:, :, : max(0, queries - keys)].any()


def test_smlk_steps_like_its_chunks() -> None:
    arguments, shift = inputs(Nq=12, Nk=12, M=3), numbers(2, 3, 4, seed=5)
    key = arguments["key"][:, :, 0]
    whole = smlk_attention(arguments["query"], key, shift, arguments["value"], arguments["log_prior"], is_causal=True)
    stepped = feed((1, 4, 7), arguments["query"], key, arguments["value"], arguments["log_prior"], shift=shift)
    agree([stepped], [whole])


def test_linear_attention_steps_like_its_chunks_with_a_mask() -> None:
    arguments, key_mask = inputs(Nq=12, Nk=12, M=1, prior=None), numbers(2, 12) > 0
    key, state, outputs = arguments["key"][:, :, 0], None, []
    for at in (slice(0, 5), slice(5, 6), slice(6, 12)):
        parts = (arguments["query"][:, :, at], key[:, :, at], arguments["value"][:, :, at])
        output, state = linear_step(state, *parts, key_mask=key_mask[:, at])
        outputs.append(output)
    whole = linear_attention(arguments["query"], key, arguments["value"], is_causal=True, key_mask=key_mask)
    agree([torch.cat(outputs, 2)], [whole])


@everywhere
@given(sizes=sizes, is_causal=st.booleans())
def test_smlk_is_mlk_on_shifted_keys(impl: str, sizes: dict[str, Any], is_causal: bool) -> None:
    arguments = inputs(**sizes)
    query, components, value, *prior = arguments.values()
    key = components[:, :, 0].detach().requires_grad_()
    shift = numbers(sizes["H"], sizes["M"], 4, seed=sizes["seed"]).requires_grad_()
    shifted = smlk_attention(query, key, shift, value, *prior, is_causal=is_causal, impl=impl)
    by_hand = key[:, :, None] + shift[None, :, :, None]
    expected = mlk_attention(query, by_hand, value, *prior, is_causal=is_causal, impl=impl)
    leaves = arguments | {"key": key, "shift": shift}
    agree([shifted, *gradients(shifted, leaves)], [expected, *gradients(expected, leaves)])


@everywhere
@given(sizes=sizes, is_causal=st.booleans())
def test_identical_components_are_one(impl: str, sizes: dict[str, Any], is_causal: bool) -> None:
    arguments = inputs(**sizes | {"prior": "head"})
    single = arguments["key"][:, :, 0]
    repeated = arguments | {"key": single[:, :, None].expand_as(arguments["key"])}
    got = mlk_attention(**repeated, is_causal=is_causal, impl=impl)
    expected = linear_attention(arguments["query"], single, arguments["value"], is_causal=is_causal, impl=impl)
    leaves = {name: arguments[name] for name in ("query", "key", "value")}
    agree([got, *gradients(got, leaves)], [expected, *gradients(expected, leaves)])


@everywhere
@given(sizes=sizes, share=st.floats(0.01, 0.99), is_causal=st.booleans())
def test_splitting_a_component_and_its_prior_changes_nothing(
    impl: str, sizes: dict[str, Any], share: float, is_causal: bool
) -> None:
    arguments = inputs(**sizes | {"prior": "position"})
    key, log_prior = arguments["key"], arguments["log_prior"]
    parts = torch.tensor([share, 1 - share], dtype=torch.float64).log()[None, :, None]
    split = arguments | {
        "key": torch.cat((key[:, :, 1:], key[:, :, :1], key[:, :, :1]), 2),
        "log_prior": torch.cat((log_prior[:, 1:], log_prior[:, :1] + parts), 1),
    }
    got, expected = (mlk_attention(**a, is_causal=is_causal, impl=impl) for a in (split, arguments))
    agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])


@everywhere
@given(sizes=sizes, is_causal=st.booleans())
def test_the_order_of_components_is_nothing(impl: str, sizes: dict[str, Any], is_causal: bool) -> None:
    arguments = inputs(**sizes | {"prior": "position"})
    order = torch.randperm(sizes["M"], generator=torch.Generator().manual_seed(sizes["seed"]))
    turned = arguments | {"key": arguments["key"][:, :, order], "log_prior": arguments["log_prior"][:, order]}
    got, expected = (mlk_attention(**a, is_causal=is_causal, impl=impl) for a in (turned, arguments))
    agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])


@everywhere
def test_masking_a_key_is_removing_it(impl: str) -> None:
    arguments = inputs(Nk=140)
    keep = (numbers(140) > 0).nonzero()[:, 0]
    mask = torch.zeros(2, 140, dtype=torch.bool)
    mask[:, keep] = True
    kept = {"query": arguments["query"], "key": arguments["key"][:, :, :, keep]}
    kept |= {"value": arguments["value"][:, :, keep], "log_prior": arguments["log_prior"][:, :, keep]}
    got, expected = mlk_attention(**arguments, key_mask=mask, impl=impl), mlk_attention(**kept, impl=impl)
    agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("which", range(len(MAPS)))
def test_masked_keys_may_hold_nan(impl: str, which: int, is_causal: bool) -> None:
    arguments, mask = inputs(Nq=7), numbers(2, 7) > -0.5
    options: dict[str, Any] = {"feature_map": MAPS[which], "is_causal": is_causal, "key_mask": mask, "impl": impl}
    dirty = dict(arguments)
    for name, hidden in (("key", ~mask[:, None, None, :, None]), ("value", ~mask[:, None, :, None])):
        dirty[name] = arguments[name].detach().masked_fill(hidden, torch.nan).requires_grad_()
    got, expected = mlk_attention(**dirty, **options), mlk_attention(**arguments, **options)
    agree([got, *gradients(got, dirty)], [expected, *gradients(expected, arguments)])


@everywhere
@pytest.mark.parametrize("prior", ["head", "position"])
def test_a_prior_of_zero_removes_a_component_and_hurts_no_gradient(impl: str, prior: str) -> None:
    for is_causal in (False, True):
        arguments = inputs(Nq=7, M=3, prior=prior)
        with torch.no_grad():
            arguments["log_prior"][:, 1] = -torch.inf
        rest = arguments | {name: arguments[name][(..., [0, 2]) + (slice(None),) * (arguments[name].dim() - d)]
                            for name, d in (("key", 3), ("log_prior", 2))}  # fmt: skip
        got, expected = (mlk_attention(**a, is_causal=is_causal, impl=impl) for a in (arguments, rest))
        agree([got, *gradients(got, arguments)], [expected, *gradients(expected, arguments)])


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_position_without_components_is_masked(impl: str, is_causal: bool) -> None:
    arguments = inputs(Nq=7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, [0, 3]] = False
    expected = mlk_attention(**arguments, is_causal=is_causal, key_mask=mask, impl=impl)
    wanted = gradients(expected, arguments)
    with torch.no_grad():
        arguments["log_prior"][:, :, [0, 3]] = -torch.inf
    got = mlk_attention(**arguments, is_causal=is_causal, impl=impl)
    agree([got, *gradients(got, arguments)], [expected, *wanted])


def test_no_prior_is_the_uniform_one_in_every_step() -> None:
    arguments = inputs(Nq=7, M=3, prior=None)
    first, rest = ({name: x[..., at, :] for name, x in arguments.items()} for at in (slice(0, 4), slice(4, 7)))
    output, state = linear_step(None, **first)
    uniform = torch.full((2, 3), 1 / 3, dtype=torch.float64).log()
    more, _ = linear_step(state, **rest, log_prior=uniform)
    agree([torch.cat((output, more), 2)], [mlk_attention(**arguments, is_causal=True)])


@everywhere
def test_a_causal_prefix_does_not_see_the_future(impl: str) -> None:
    """Nor the size of what comes: the future is e^600 times larger here."""
    arguments, cut = inputs(Nq=140, Nk=140, M=1, prior="position"), 131
    other = {name: x.detach().clone() for name, x in arguments.items()}
    other["key"][:, :, :, cut:] += 100
    other["value"][:, :, cut:] = 1e5
    other["log_prior"][:, :, cut:] += 600
    got, expected = (mlk_attention(**a, is_causal=True, impl=impl)[:, :, :cut] for a in (other, arguments))
    agree([got], [expected])


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_without_keys_get_zeros_and_no_gradients(impl: str, is_causal: bool) -> None:
    arguments = inputs(Nq=130, Nk=130)
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[0], mask[1, :3] = False, False
    output = mlk_attention(**arguments, is_causal=is_causal, key_mask=mask, impl=impl)
    empty = (0,) if not is_causal else (0, (1, slice(None), slice(3)))
    grads = dict(zip(arguments, gradients(output, arguments), strict=True))
    for at in empty:
        assert not output[at].any()
        assert not grads["query"][at].any()
    assert not grads["key"][0].any()
    assert not grads["value"][0].any()
    assert all(x.isfinite().all() for x in (output, *grads.values()))
    agree([output], [dense(**arguments, is_causal=is_causal, key_mask=mask)])
