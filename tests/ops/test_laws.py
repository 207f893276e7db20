"""Laws of mixture-key attention, values and gradients, for every implementation: what must agree with what.

Each law computes one function of the same leaves in two ways. The cases are ragged, and the blocks small.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, pad, scaled_dot_product_attention

import mgk
from tests.ops.common import (
    IMPLS,
    VARIANTS,
    Case,
    Inputs,
    assert_close,
    assert_same,
    attend,
    call,
    cases,
    component_keys,
    dense_log_weights,
    dense_weights,
    identity_values,
    pick_components,
    pick_keys,
    pick_queries,
    visible,
    without,
)

pytestmark = [pytest.mark.usefixtures("small_blocks"), pytest.mark.parametrize("impl", IMPLS)]


@given(case=cases())
def test_output_is_the_dense_formula(impl: str, case: Case) -> None:
    inputs, options = case.inputs(), case.options()
    expected = dense_weights(inputs, options) @ inputs["value"]
    assert_same(attend(inputs, impl, **options), expected, inputs)


@given(case=cases())
def test_implementations_agree(impl: str, case: Case) -> None:
    inputs, options = case.inputs(), case.options()
    assert_same(attend(inputs, impl, **options), attend(inputs, "reference", **options), inputs)


@given(case=cases(variant="smgk"))
def test_smgk_is_mgk_on_shifted_keys(impl: str, case: Case) -> None:
    inputs, options = case.inputs(), case.options()
    component = {**without(inputs, "shift"), "key": component_keys(inputs)}
    assert_same(attend(inputs, impl, **options), attend(component, impl, **options), inputs)


@given(case=cases(M=1), count=st.integers(2, 4))
def test_identical_components_are_one(impl: str, case: Case, count: int) -> None:
    inputs, options = case.inputs(), case.options()
    assert_same(attend(pick_components(inputs, [0] * count), impl, **options), attend(inputs, impl, **options), inputs)


@given(case=cases(), place=st.integers(0, 3))
def test_splitting_a_component_and_its_prior_changes_nothing(impl: str, case: Case, place: int) -> None:
    inputs, options = case.inputs(), case.options()
    place %= case.M
    split = pick_components(inputs, [*range(case.M), place])
    prior = split.get("log_prior", torch.zeros(case.H, case.M + 1, dtype=torch.float64))
    halves = math.log(2) * torch.tensor([r in (place, case.M) for r in range(case.M + 1)], dtype=torch.float64)
    split["log_prior"] = prior - halves.view(1, -1, *[1] * (prior.dim() - 2))
    assert_same(attend(split, impl, **options), attend(inputs, impl, **options), inputs)


@given(case=cases(M=st.integers(2, 4)), order=st.permutations(range(4)))
def test_order_of_components_does_not_matter(impl: str, case: Case, order: list[int]) -> None:
    inputs, options = case.inputs(), case.options()
    permuted = pick_components(inputs, [r for r in order if r < case.M])
    assert_same(attend(permuted, impl, **options), attend(inputs, impl, **options), inputs)


@given(case=cases(M=1, prior=None, variance=None, masked=False), extra=st.integers(0, 3), s2=st.floats(0.1, 10))
def test_one_component_of_unit_norm_is_softmax_attention(impl: str, case: Case, extra: int, s2: float) -> None:
    """Eqn 6: with |q| = |k| = 1 the distance is 2 - 2 q.k."""
    case = replace(case, variant="mgk", Nk=case.Nq + extra)
    inputs, options = case.inputs(), case.options()
    unit = {**inputs, "query": normalize(inputs["query"], dim=-1), "key": normalize(inputs["key"], dim=-1)}
    softmax = scaled_dot_product_attention(
        unit["query"], unit["key"][:, :, 0], inputs["value"], attn_mask=visible(inputs, options), scale=1 / s2
    )
    assert_same(attend(unit, impl, variance=s2, **options), softmax, inputs)


def clustered(case: Case, spacing: float, noise: float) -> Inputs:
    """Queries each near one of M centres on a line; keys whose components are each near another of these centres."""
    inputs = replace(case, variant="mgk").inputs(scale=noise)
    generator = torch.Generator().manual_seed(case.seed)
    home = torch.randint(case.M, (case.B, case.H, case.Nq), generator=generator)
    order = torch.rand(case.B, case.H, case.M, case.Nk, generator=generator).argsort(2)
    query, key = inputs["query"].detach(), inputs["key"].detach()
    query[..., 0] += spacing * home
    key[..., 0] += spacing * order
    return {**inputs, "query": query.requires_grad_(), "key": key.requires_grad_()}


@given(case=cases(M=st.integers(2, 4), prior=None, variance=None, e_step="soft"))
def test_small_variance_is_the_hard_e_step(impl: str, case: Case) -> None:
    """Noise of sqrt(s2) keeps the weights over the keys spread out; the other components are exp(-100) or less away."""
    s2 = 0.05
    inputs, options = clustered(case, spacing=10, noise=math.sqrt(s2)), case.options()
    soft = attend(inputs, impl, variance=s2, **options)
    hard = attend(inputs, impl, variance=s2, **{**options, "e_step": "hard"})
    # The exponents are 1e3 larger than in the other cases, and gradients have a factor 1/s2.
    assert_same(soft, hard, inputs, tolerance=1e-8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shrinking_variance_closes_the_gap_to_hard(impl: str, variant: str) -> None:
    inputs = Case(variant=variant, M=3, prior=None, Nq=9, Nk=9, seed=3).inputs()
    gaps = []
    for s2 in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
        soft, hard = (attend(inputs, impl, variance=s2, e_step=e_step) for e_step in ("soft", "hard"))
        gaps.append(float((soft - hard).detach().abs().max()))
    assert gaps[0] > 1e-2
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-9


@given(case=cases(M=st.integers(2, 4), prior=st.sampled_from(["head", "position"]), e_step="soft"), gone=st.data())
def test_prior_of_zero_removes_a_component(impl: str, case: Case, gone: st.DataObject) -> None:
    inputs, options = case.inputs(), case.options()
    removed = gone.draw(st.sets(st.integers(0, case.M - 1), min_size=1, max_size=case.M - 1))
    with torch.no_grad():
        inputs["log_prior"][:, list(removed)] = -torch.inf
    kept = pick_components(inputs, [r for r in range(case.M) if r not in removed])
    assert_same(attend(inputs, impl, **options), attend(kept, impl, **options), inputs)


@given(case=cases(prior="position", e_step="soft", masked=True))
def test_key_whose_priors_are_all_zero_is_masked(impl: str, case: Case) -> None:
    """One mask for all batch entries, once as priors and once as `key_mask`."""
    inputs, hidden = case.inputs(), ~case.key_mask()[0]  # type: ignore[index]
    with torch.no_grad():
        inputs["log_prior"].masked_fill_(hidden, -torch.inf)
    mask = (~hidden).expand(case.B, -1)
    finite = {**inputs, "log_prior": inputs["log_prior"].masked_fill(hidden, 0)}
    by_prior = attend(inputs, impl, is_causal=case.is_causal)
    assert_same(by_prior, attend(finite, impl, is_causal=case.is_causal, key_mask=mask), inputs)


@given(case=cases(is_causal=True, Nq=st.integers(2, 10), Nk=st.integers(2, 10)), cut=st.integers(1, 9))
def test_causal_prefix_does_not_see_the_future(impl: str, case: Case, cut: int) -> None:
    """The first outputs depend on nothing that comes later, and send it no gradient."""
    inputs, options = case.inputs(), case.options()
    cut = min(cut, case.Nq - 1, case.Nk - 1)
    past = pick_queries(pick_keys(inputs, slice(0, case.Nk - cut)), slice(0, case.Nq - cut))
    mask = options["key_mask"]
    short = attend(past, impl, **{**options, "key_mask": None if mask is None else mask[:, : case.Nk - cut]})
    assert_same(attend(inputs, impl, **options)[:, :, : case.Nq - cut], short, inputs)


@given(case=cases(is_causal=True), extra=st.integers(0, 8))
def test_causal_is_aligned_at_the_last_query(impl: str, case: Case, extra: int) -> None:
    """Fewer queries than keys are the last rows of the square; more start with rows that see nothing."""
    square = replace(case, Nq=case.Nk)
    inputs, options = square.inputs(), square.options()
    full = attend(inputs, impl, **options)
    last = min(case.Nk, case.Nq)
    tail = attend(pick_queries(inputs, slice(case.Nk - last, None)), impl, **options)
    assert_same(tail, full[:, :, case.Nk - last :], inputs)
    early = torch.randn(case.B, case.H, extra, case.D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    longer = attend({**inputs, "query": torch.cat([early, inputs["query"]], 2)}, impl, **options)
    assert_same(longer, torch.cat([torch.zeros(case.B, case.H, extra, case.Dv, dtype=torch.float64), full], 2), inputs)


@given(case=cases(masked=True, is_causal=False))
def test_masked_keys_might_as_well_not_be_there(impl: str, case: Case) -> None:
    """What they hold does not matter, and they get no gradient."""
    inputs, options = case.inputs(), case.options()
    mask = case.key_mask()
    assert mask is not None
    garbage = {name: inputs[name].detach().clone() for name in ("key", "value")}
    garbage["key"].masked_fill_(~mask.view(case.B, *[1] * (garbage["key"].dim() - 3), case.Nk, 1), 50.0)
    garbage["value"].masked_fill_(~mask.view(case.B, 1, case.Nk, 1), -50.0)
    inputs |= {name: tensor.requires_grad_() for name, tensor in garbage.items()}
    removed = []
    for b in range(case.B):
        own = {
            name: tensor[b : b + 1] if name in ("query", "key", "value") else tensor for name, tensor in inputs.items()
        }
        removed.append(attend(pick_keys(own, mask[b].nonzero()[:, 0]), impl, e_step=case.e_step))
    assert_same(attend(inputs, impl, **options), torch.cat(removed), inputs)


@given(case=cases(), extra=st.integers(1, 9))
def test_padding_agrees_with_masking(impl: str, case: Case, extra: int) -> None:
    """Keys appended behind a mask change nothing; causal queries are padded along, so that positions stay."""
    inputs, options = case.inputs(), case.options()
    padded = {name: pad_positions(tensor, name, extra, case) for name, tensor in inputs.items()}
    mask = torch.ones(case.B, case.Nk, dtype=torch.bool) if options["key_mask"] is None else options["key_mask"]
    output = attend(padded, impl, **{**options, "key_mask": pad(mask, (0, extra), value=False)})
    assert_same(output[:, :, : case.Nq], attend(inputs, impl, **options), inputs)


def pad_positions(tensor: Tensor, name: str, extra: int, case: Case) -> Tensor:
    if name in ("query", "key", "value"):
        return pad(tensor, (0, 0, 0, extra), value=3.0)
    if name == "log_prior" and case.prior == "position":
        return pad(tensor, (0, extra), value=3.0)
    return tensor


@given(case=cases(prior="head"))
def test_prior_per_head_is_the_same_at_every_position(impl: str, case: Case) -> None:
    inputs, options = case.inputs(), case.options()
    repeated = {**inputs, "log_prior": inputs["log_prior"][..., None].expand(-1, -1, case.Nk)}
    assert_same(attend(repeated, impl, **options), attend(inputs, impl, **options), inputs)


@given(case=cases(prior=None, variance=None), s2=st.floats(0.1, 10))
def test_defaults_and_numbers_are_tensors_of_them(impl: str, case: Case, s2: float) -> None:
    """No prior is any uniform one, no variance is sqrt(D), a number is a tensor filled with it."""
    inputs, options = case.inputs(), case.options()
    uniform = torch.full((case.H, case.M), -math.log(case.M), dtype=torch.float64)
    filled = torch.ones(case.H, case.M, dtype=torch.float64)
    plain = attend(inputs, impl, **options)
    explicit = {**inputs, "log_prior": uniform, "variance": filled * math.sqrt(case.D)}
    assert_same(plain, attend(explicit, impl, **options), inputs)
    number = attend(inputs, impl, variance=s2, **options)
    assert_same(number, attend({**inputs, "variance": filled * s2}, impl, **options), inputs)


@given(case=cases())
def test_weights_are_the_output_for_identity_values(impl: str, case: Case) -> None:
    """Rows sum to one where a key is visible, and to zero where none is."""
    inputs, options = case.inputs(), case.options()
    leaves = without(inputs, "value")
    weights = call(mgk.attention_weights, leaves, **options)
    assert_same(attend(identity_values(inputs), impl, **options), weights, leaves)
    seen = visible(inputs, options).any(-1).to(weights).expand(weights.shape[:-1])
    assert_close("row sums", weights.sum(-1), seen, 1e-12)
    assert (weights >= 0).all()


@given(case=cases(e_step="soft"))
def test_responsibilities_share_out_every_visible_pair(impl: str, case: Case) -> None:
    """Eqn 11: a softmax over the components alone, zero where nothing is visible."""
    inputs = without(case.inputs(), "value")
    options = without(case.options(), "e_step")
    gamma = call(mgk.responsibilities, inputs, **options)
    seen = visible(inputs, options)
    assert_close("sum over r", gamma.sum(2), seen.to(gamma).expand(-1, case.H, -1, -1), 1e-12)
    assert_same(gamma, dense_log_weights(inputs).softmax(2) * seen[:, :, None], inputs)
