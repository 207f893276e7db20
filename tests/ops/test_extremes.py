"""Large numbers and small sizes: finite, and right to what rounding allows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mgk
from tests.ops.common import (
    E_STEPS,
    IMPLS,
    VARIANTS,
    Case,
    Inputs,
    Options,
    assert_close,
    assert_same,
    attend,
    call,
    cases,
    component_keys,
    dense_weights,
    gradients,
    identity_values,
    visible,
    without,
)

pytestmark = [pytest.mark.usefixtures("small_blocks"), pytest.mark.parametrize("impl", IMPLS)]

DTYPES = st.sampled_from([torch.float32, torch.float64])


def exact(inputs: Inputs) -> Inputs:
    """The same numbers in float64, as leaves of their own."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}


def reach(inputs: Inputs) -> float:
    """The largest |q| + |k| + |b|."""
    names = [name for name in ("query", "key", "shift") if name in inputs]
    return sum(float(inputs[name].detach().double().norm(dim=-1).max()) for name in names)


def least_variance(inputs: Inputs) -> float:
    return float(inputs["variance"].detach().min()) if "variance" in inputs else math.sqrt(inputs["query"].shape[-1])


def exponent_error(inputs: Inputs) -> float:
    """How far rounding moves l: the terms of the expanded distance are at most (|q|+|k|+|b|)^2 / s2 in all.

    Each passes a handful of operations, and half a unit in the last place is lost in each.
    """
    eps = torch.finfo(inputs["query"].dtype).eps
    return 4 * eps * (reach(inputs) ** 2 / least_variance(inputs) + 10)


def assert_right(inputs: Inputs, impl: str, options: Options) -> None:
    """Weights, their sums, the output and all gradients against the dense formula in float64."""
    oracle = exact(inputs)
    error, eps = exponent_error(inputs), torch.finfo(inputs["query"].dtype).eps
    expected = dense_weights(oracle, options)

    # An error e in every exponent is a factor in exp(-2e), exp(2e) on every weight.
    weights = attend(identity_values(inputs), impl, **options).detach().double()
    slack = math.expm1(2 * error) * expected.detach() + 4 * eps
    assert ((weights - expected.detach()).abs() <= slack).all()
    rows = visible(inputs, options).any(-1).double().expand(weights.shape[:-1])
    assert_close("row sums", weights.sum(-1), rows, weights.shape[-1] * 4 * eps)

    output, wanted = attend(inputs, impl, **options), expected @ oracle["value"]
    largest = float(oracle["value"].detach().abs().max())
    tolerance = min(2.0, math.expm1(2 * error) + 8 * eps) * largest
    assert_close("output", output.detach().double(), wanted.detach(), tolerance)

    # Every gradient is a sum over rows of A gamma (dA - delta) times the slope of l: at most that of q, k and b, of
    # the prior (1), or of the variance; two weights and delta each err by exp(2e), and no row has a weight above 1.
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    actual = gradients(output, inputs, upstream.to(output))
    target = gradients(wanted, oracle, upstream.to(output).double())
    inflow = float((upstream.abs().sum(-1)).sum()) * largest  # over all rows: |dA| for any key
    distance = reach(inputs)
    s2 = least_variance(inputs)
    slopes = {"value": 1 / largest, "log_prior": 1.0, "variance": (distance / s2) ** 2 / 2}
    for name in inputs:
        assert actual[name].isfinite().all(), name
        slope = slopes.get(name, distance / s2)
        assert_close(name, actual[name].double(), target[name], 3 * (math.expm1(4 * error) + 4 * eps) * inflow * slope)


@given(case=cases(), dtype=DTYPES, scale=st.sampled_from([3.0, 30.0, 300.0]))
def test_entries_and_shifts_of_any_size(impl: str, case: Case, dtype: torch.dtype, scale: float) -> None:
    assert_right(case.inputs(dtype, scale=scale), impl, case.options())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("e_step", E_STEPS)
def test_values_of_any_size(impl: str, variant: str, e_step: str) -> None:
    """Queries that sit on keys, with q.k / s2 = 72: such weights are numbers, but not times such values."""
    case = Case(variant=variant, e_step=e_step, prior=None)
    inputs = case.inputs(torch.float32)
    with torch.no_grad():
        key = 12 * torch.nn.functional.normalize(inputs["key"], dim=-1)
        inputs["key"].copy_(key)
        inputs["query"].copy_((key if variant == "smgk" else key[:, :, 0])[:, :, : case.Nq])
        inputs["value"].mul_(1e9)
        if "shift" in inputs:
            inputs["shift"].mul_(1e-3)
    assert_right(inputs, impl, case.options())


def on_lattice(case: Case, dtype: torch.dtype, spacing: float) -> Inputs:
    """Queries, keys and shifts near multiples of `spacing`: huge factors, and many pairs whose weights compete.

    A query at 1, keys at 0 and 2 and shifts of -1 and +1 has its heavy keys in both components, while each factor
    of the shifted form (u for the query, w for the key) prefers one of them by exp(spacing^2 / s2).
    """
    inputs = case.inputs()
    generator = torch.Generator().manual_seed(case.seed)
    for name in {"query", "key", "shift"} & set(inputs):
        corner = torch.randint(-1, 2, inputs[name].shape, generator=generator)
        inputs[name] = inputs[name] + spacing * corner
    return {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}


@settings(max_examples=40)
@given(
    case=cases(D=st.integers(1, 2), M=st.integers(2, 4)),
    dtype=DTYPES,
    spacing=st.sampled_from([10.0, 30.0, 100.0, 300.0]),
)
def test_heavy_keys_may_sit_in_any_component(impl: str, case: Case, dtype: torch.dtype, spacing: float) -> None:
    assert_right(on_lattice(case, dtype, spacing), impl, case.options())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [20.0, 300.0])
def test_row_whose_heavy_keys_sit_in_the_other_component(
    impl: str, distance: float, dtype: torch.dtype, is_causal: bool
) -> None:
    """The query pulls towards the component +T by exp(2 q T), all keys push to -T by more: no pair's factors agree."""
    keys = distance + torch.linspace(0.25, 1.5, 9)
    numbers = {
        "query": torch.full((1, 1, 9, 1), distance),
        "key": keys.view(1, 1, 9, 1),
        "shift": torch.tensor([-distance, distance]).view(1, 2, 1),
        "value": torch.eye(9).view(1, 1, 9, 9),
    }
    inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in numbers.items()}
    assert_right(inputs, impl, {"is_causal": is_causal})


@given(case=cases(M=st.integers(2, 4), prior="position", e_step="soft"), dtype=DTYPES)
def test_priors_of_zero_anywhere(impl: str, case: Case, dtype: torch.dtype) -> None:
    """Components removed here and there, one key losing all of them, and priors as far apart as exp(1e4)."""
    inputs = case.inputs(dtype)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        prior = inputs["log_prior"]
        prior[torch.rand(prior.shape, generator=generator) < 0.4] = -torch.inf
        prior[..., 0] = -1e4
        prior[:, 0, 0] = 1.0  # so that every row that sees a key sees one of weight above zero
        prior[..., 1:2] = -torch.inf
    keys = torch.ones(case.B, case.Nk, dtype=torch.bool) if case.key_mask() is None else case.key_mask()
    assert keys is not None
    keys[:, 0] = True
    options = {**case.options(), "key_mask": keys}
    output = attend(inputs, impl, **options)
    finite = {**inputs, "log_prior": inputs["log_prior"].clamp(min=-1e9)}  # exp(-1e9) is zero, and l stays a number
    expected = dense_weights(exact(finite), options) @ inputs["value"].detach().double()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    assert_close("output", output.detach().double(), expected.detach(), tolerance)
    grads = gradients(output, inputs)
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
    removed = grads["log_prior"][inputs["log_prior"] == -torch.inf]
    assert_close("gradient of a prior of zero", removed, torch.zeros_like(removed), tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [6.0, 20.0, 30.0, 100.0])
def test_hidden_keys_of_any_size_move_nothing(impl: str, scale: float, variant: str, is_causal: bool) -> None:
    """By a mask or by priors: unhidden, they may be so near that their weights beside the others' are infinite."""
    for seed in range(12):
        case = Case(variant, B=1, H=1, Nq=3, Nk=3, prior=None, masked=True, is_causal=is_causal, seed=seed)
        inputs = case.inputs(torch.float32, scale=scale)
        if "shift" in inputs:
            inputs["shift"] = (inputs["shift"] / scale).detach().requires_grad_()
        assert_right(inputs, impl, case.options())
        mask = case.key_mask()
        assert mask is not None
        log_prior = torch.zeros(1, 2, 3).masked_fill(~mask, -torch.inf)
        by_prior = attend({**inputs, "log_prior": log_prior}, impl, is_causal=is_causal)
        # The mask may take another path than the prior; both round the exponents as in `assert_right`.
        tolerance = 20 * math.expm1(4 * exponent_error(inputs)) * (1 + reach(inputs) / least_variance(inputs))
        assert_same(by_prior, attend(inputs, impl, **case.options()), inputs, tolerance)


@given(case=cases(masked=True), garbage=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_masked_positions_may_hold_anything(impl: str, case: Case, garbage: float) -> None:
    """NaN and infinity at masked keys, values and queries change neither the output nor any gradient."""
    inputs, options, key_mask = case.inputs(), case.options(), case.key_mask()
    query_mask = torch.rand(case.B, case.Nq, generator=torch.Generator().manual_seed(case.seed)) < 0.7
    dirty = dict(inputs)
    for name, mask in (("query", query_mask), ("key", key_mask), ("value", key_mask)):
        assert mask is not None
        hidden = ~mask.view(case.B, *[1] * (inputs[name].dim() - 3), -1, 1)
        dirty[name] = inputs[name].detach().masked_fill(hidden, garbage).requires_grad_()
    clean, output = (attend(x, impl, query_mask=query_mask, **options) for x in (inputs, dirty))
    assert_close("output", output, clean, 1e-10)
    expected = gradients(clean, inputs)
    for name, grad in gradients(output, dirty).items():
        assert_close(name, grad, expected[name], 1e-10)


@given(
    case=cases(),
    name=st.sampled_from(["query", "key", "shift"]),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    dtype=DTYPES,
)
def test_nothing_hides_a_visible_nan(impl: str, case: Case, name: str, bad: float, dtype: torch.dtype) -> None:
    """Rows that see a NaN or an infinity are NaN, and others are as they were."""
    inputs, options = case.inputs(dtype), case.options()
    name = name if name in inputs else "key"
    dirty = {**inputs, name: inputs[name].detach().clone()}
    seen = visible(inputs, options).expand(-1, case.H, -1, -1).clone()  # (B,H,Nq,Nk)
    if name == "query":
        dirty["query"][0, 0, 0, 0] = bad
        seen[1:], seen[:, 1:], seen[:, :, 1:] = False, False, False
    elif name == "key":
        dirty["key"][0, 0, ..., 0, 0] = bad
        seen[1:], seen[:, 1:], seen[..., 1:] = False, False, False
    else:
        dirty["shift"][0, -1, 0] = bad
        seen[:, 1:] = False
    expected = attend(inputs, impl, **options).masked_fill(seen.any(-1, keepdim=True), math.nan)
    output = attend(dirty, impl, **options)
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@given(case=cases(), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_nothing_hides_a_visible_value(impl: str, case: Case, bad: float) -> None:
    inputs, options = case.inputs(), case.options()
    dirty = {**inputs, "value": inputs["value"].detach().clone()}
    dirty["value"][0, 0, 0, 0] = bad
    seen = visible(inputs, options)[0, 0, :, 0]
    assert not attend(dirty, impl, **options)[0, 0, seen, 0].isfinite().any()


@pytest.mark.parametrize("prior", ["head", "position"])
@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_head_without_priors_is_zero_and_disturbs_no_other(
    impl: str, variant: str, variance: str | None, prior: str
) -> None:
    inputs = Case(variant, H=2, prior=prior, variance=variance).inputs()
    with torch.no_grad():
        inputs["log_prior"][0] = -torch.inf
    output = attend(inputs, impl)
    alone = {
        name: tensor[:, 1:] if name in ("query", "key", "value") else tensor[1:] for name, tensor in inputs.items()
    }
    other = attend(alone, impl)
    assert_same(output, torch.cat([torch.zeros_like(other), other], 1), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_see_nothing_are_zero_and_move_nothing(
    impl: str, variant: str, e_step: str, dtype: torch.dtype
) -> None:
    """One batch entry loses all keys, another is causal with more queries than keys: zeros, no NaN, no gradient."""
    case = Case(variant, B=2, Nq=9, Nk=5, variance="tensor", e_step=e_step)
    inputs, mask = case.inputs(dtype), torch.ones(2, 5, dtype=torch.bool)
    mask[1] = False
    output = attend(inputs, impl, e_step=e_step, is_causal=True, key_mask=mask)
    assert output.isfinite().all()
    assert (output[1] == 0).all()
    assert (output[0, :, :4] == 0).all()
    assert (output[0, :, 4:] != 0).any(-1).all()
    empty = torch.zeros_like(output)
    empty[1], empty[0, :, :4] = 1, 1
    for name, grad in gradients(output, inputs, empty).items():
        assert (grad == 0).all(), name
    for name, grad in gradients(output, inputs).items():
        assert grad.isfinite().all(), name
        if name in ("query", "key", "value"):
            assert (grad[1] == 0).all(), name


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_key_has_all_the_weight(impl: str, variant: str, e_step: str) -> None:
    """Whatever the distance; so nothing but the value gets a gradient."""
    inputs = Case(variant, Nk=1, M=3, variance="tensor").inputs(scale=300)
    output = attend(inputs, impl, e_step=e_step)
    assert_close("output", output, inputs["value"].expand_as(output), 1e-14)
    # Zero is the difference of numbers of the size of the value, times the slopes of l.
    tolerance = {"log_prior": 1e-13, "variance": 1e-6}
    for name, grad in gradients(output, without(inputs, "value")).items():
        assert_close(name, grad, torch.zeros_like(grad), tolerance.get(name, 1e-9))


@pytest.mark.parametrize(
    "sizes",
    [{"Nq": 1}, {"Nk": 1}, {"Nq": 1, "Nk": 1}, {"D": 1, "Dv": 1}, {"M": 1}, {"M": 3}, {"M": 4}, {"Nq": 9, "Nk": 4}],
    ids=str,
)
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_smallest_sizes(impl: str, variant: str, e_step: str, sizes: dict[str, int]) -> None:
    case = replace(Case(variant, e_step=e_step, is_causal=True), **sizes)  # type: ignore[arg-type]
    inputs = case.inputs()
    expected = dense_weights(inputs, case.options()) @ inputs["value"]
    assert_same(attend(inputs, impl, **case.options()), expected, inputs)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"Nq": 0}, {"Nk": 0}, {"Dv": 0}, {"Nq": 0, "Nk": 0}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_to_do_is_no_error(
    impl: str, variant: str, e_step: str, is_causal: bool, sizes: dict[str, int]
) -> None:
    """Empty axes give empty outputs; no keys give zeros. Gradients have the shapes of their inputs, and are zero."""
    case = replace(Case(variant, e_step=e_step, is_causal=is_causal, masked=True, variance="tensor"), **sizes)  # type: ignore[arg-type]
    inputs = case.inputs()
    output = attend(inputs, impl, **case.options())
    assert output.shape == (case.B, case.H, case.Nq, case.Dv)
    assert (output == 0).all()
    for name, grad in gradients(output, inputs).items():
        assert grad.shape == inputs[name].shape
        assert (grad == 0).all(), name


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Nq": 0}, {"Nk": 0}], ids=str)
def test_nothing_to_look_at_is_no_error(impl: str, sizes: dict[str, int]) -> None:
    """The views are empty; an M-step with nothing to learn from leaves priors, keys and variances as they were."""
    case = replace(Case("mgk", variance="tensor"), **sizes)  # type: ignore[arg-type]
    inputs = {name: tensor.detach() for name, tensor in without(case.inputs(), "value").items()}
    assert call(mgk.attention_weights, inputs).shape == (case.B, case.H, case.Nq, case.Nk)
    assert call(mgk.responsibilities, inputs).shape == (case.B, case.H, case.M, case.Nq, case.Nk)
    assert_close("prior", call(mgk.update_prior, inputs, impl=impl), inputs["log_prior"], 1e-14)
    key, variance = call(mgk.update_components, inputs, impl=impl)
    assert_close("key", key, component_keys(inputs), 1e-14)
    assert_close("variance", variance, inputs["variance"], 1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layout_in_memory_does_not_matter(impl: str, variant: str) -> None:
    """Views with swapped axes, as a projection split into heads leaves them, and gradients that are expanded."""
    inputs = Case(variant, variance="tensor", M=3, seed=2).inputs()
    strided = {
        name: tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
        for name, tensor in inputs.items()
    }
    assert not strided["key"].is_contiguous()
    plain, view = attend(inputs, impl), attend(strided, impl)
    assert_close("output", view, plain, 1e-13)
    for upstream in (torch.ones((), dtype=torch.float64).expand(plain.shape), torch.randn_like(plain.mT).mT):
        expected = gradients(plain, inputs, upstream)
        for name, grad in gradients(view, strided, upstream).items():
            assert_close(name, grad, expected[name], 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_stay_as_they_were(impl: str, variant: str) -> None:
    inputs = Case(variant, variance="tensor", is_causal=True).inputs()
    before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    gradients(attend(inputs, impl, is_causal=True), inputs)
    for name in inputs:
        assert torch.equal(inputs[name], before[name])


def test_exponentiating_distances_fails_where_this_does_not(impl: str) -> None:
    """The paper's formula taken literally, exp of unshifted distances over their sum, is 0/0 at a deviation of 6."""
    case = Case("mgk", Nq=32, Nk=32, D=32, Dv=8, prior="head", seed=1)
    inputs = case.inputs(torch.float32, scale=6.0)
    query, key, prior = inputs["query"][:, :, None, :, None], inputs["key"][:, :, :, None], inputs["log_prior"].exp()
    distance = (query - key).square().sum(-1)
    terms = (prior[None, :, :, None, None] * torch.exp(-distance / (2 * math.sqrt(case.D)))).sum(2)
    literal = terms / terms.sum(-1, keepdim=True) @ inputs["value"]
    assert literal.isnan().any()
    assert_right(inputs, impl, {})
