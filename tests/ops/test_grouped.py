"""Grouped queries: query head h reads the keys and values of head h // (H/G), as if each head had a copy.

B batch, H query heads, G heads of keys and values, M components, Nq queries, Nk keys, D width of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mgk
from tests.ops.common import (
    E_STEPS,
    IMPLS,
    VARIANTS,
    Case,
    Inputs,
    assert_close,
    assert_same,
    attend,
    attend_with_lse,
    call,
    expanded,
    without,
)

GROUPED = Case(H=6, G=2, M=2, Nq=9, Nk=11)
LINEAR: dict[str, Any] = {"mgk": mgk.mlk_attention, "smgk": mgk.smlk_attention}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_copies_of_keys_and_values(
    groups: int, variant: str, variance: str | None, e_step: str, impl: str
) -> None:
    """Outputs, lse and all gradients; those of keys and values are sums over the heads that read them."""
    case = replace(GROUPED, G=groups, variant=variant, variance=variance, e_step=e_step, masked=True, is_causal=True)
    inputs, options = case.inputs(), case.options()
    shared, copied = (attend_with_lse(x, impl, **options) for x in (inputs, expanded(inputs)))
    assert_same(shared[0], copied[0], inputs)
    assert_same(shared[1].exp(), copied[1].exp(), inputs)


@pytest.mark.parametrize("scale", [6.0, 60.0, 1000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_copies_for_large_numbers(variant: str, scale: float) -> None:
    """The paths with an exact maximum and without factors, where every query head has weights of its own."""
    inputs = replace(GROUPED, variant=variant, D=4).inputs(scale=scale)
    # Exponents reach 1e7, so weights are right to 1e7 * 2e-16 and gradients, which hold scale / s2 times it, to 1e-6.
    assert_same(attend(inputs, "blockwise"), attend(expanded(inputs), "blockwise"), inputs, 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("prior", [None, "position"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_linear_attention_equals_copies(variant: str, prior: str | None, is_causal: bool, impl: str) -> None:
    inputs = replace(GROUPED, variant=variant, prior=prior, Nq=11).inputs()
    shared, copied = (LINEAR[variant](**x, is_causal=is_causal, impl=impl) for x in (inputs, expanded(inputs)))
    assert_same(shared, copied, inputs)


def test_linear_steps_equal_one_call() -> None:
    inputs = replace(GROUPED, variant="smgk", prior="head", Nq=11).inputs()
    mixture: dict[str, Any] = {"shift": inputs["shift"], "log_prior": inputs["log_prior"]}
    state, outputs = None, []
    for at in (slice(0, 4), slice(4, 5), slice(5, 11)):
        new = [inputs[name][:, :, at] for name in ("query", "key", "value")]
        output, state = mgk.linear_step(state, *new, **mixture)
        outputs.append(output)
    assert_same(torch.cat(outputs, 2), LINEAR["smgk"](**inputs, is_causal=True), inputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inspection_equals_copies(variant: str) -> None:
    inputs = without(replace(GROUPED, variant=variant).inputs(), "value")
    for function in (mgk.attention_weights, mgk.responsibilities):
        assert_same(call(function, inputs), call(function, expanded(inputs)), inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_priors_of_an_m_step_belong_to_query_heads(variant: str, variance: str | None, impl: str) -> None:
    inputs = without(replace(GROUPED, variant=variant, variance=variance).inputs(), "value")
    shared, copied = (call(mgk.prior_statistics, x, impl=impl) for x in (inputs, expanded(inputs)))
    assert_close("sums", shared[0], copied[0], 1e-10)
    assert_close("counts", shared[1], copied[1], 0)


def log_likelihood(inputs: Inputs) -> Tensor:
    """sum_ij log sum_r prior[r] N(q_i; k_jr, s2_r), up to a constant, over all query heads."""
    key = expanded(inputs)["key"]
    distance = (inputs["query"][:, :, None, :, None] - key[:, :, :, None]).square().sum(-1)  # (B,H,M,Nq,Nk)
    s2 = inputs["variance"][..., None, None]
    width = inputs["query"].shape[-1]
    return (inputs["log_prior"][..., None, None] - distance / (2 * s2) - width / 2 * s2.log()).logsumexp(2).sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_an_m_step_of_shared_means_does_not_lower_the_likelihood(impl: str) -> None:
    """Which it would if the heads of a group were not weighted by their precision."""
    inputs = replace(GROUPED, variant="mgk", variance="tensor", prior="head").inputs()
    with torch.no_grad():
        inputs["variance"][::2] *= 20
        current = dict(without(inputs, "value"))
        for _ in range(4):
            before = log_likelihood(current)
            normalised = current["log_prior"] - current["query"].shape[-1] / 2 * current["variance"].log()
            current["key"], variance = call(mgk.update_components, current | {"log_prior": normalised}, impl=impl)
            assert current["key"].shape == inputs["key"].shape
            means_alone = log_likelihood(current)
            assert means_alone >= before - 1e-9
            current["variance"] = variance
            assert log_likelihood(current) >= means_alone - 1e-9


@pytest.mark.parametrize(("groups", "named"), [(4, "key"), (0, "key"), (12, "key")])
def test_heads_that_do_not_divide_are_an_error(groups: int, named: str) -> None:
    inputs = replace(GROUPED, G=groups).inputs()
    with pytest.raises(ValueError, match=f"^{named}: .*divides H = 6"):
        attend(inputs, "auto")


def test_values_must_have_the_heads_of_the_keys() -> None:
    inputs = GROUPED.inputs()
    with pytest.raises(ValueError, match=r"^value: expected shape \(B,G,Nk,Dv\)"):
        attend(inputs | {"value": expanded(inputs)["value"]}, "auto")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("variance", [None, "tensor"])
def test_backward_keeps_no_copy_for_a_group(variant: str, variance: str | None) -> None:
    """What autograd keeps for 8 query heads beyond 1 head of keys is rows of queries, not of keys."""

    def saved(groups: int) -> int:
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        case = Case(variant, B=1, H=8, G=groups, Nq=1, Nk=512, D=64, Dv=64, prior=None, variance=variance)
        inputs = case.inputs(torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            output = attend(inputs, "blockwise")
        del output
        return sum(kept.values())

    # Biases, M numbers per key and query head, are all that grows with the query heads: 8 * 2 * (512 * 4) bytes, a few
    # times. One more copy of the values for the group would be 8 * 512 * 64 * 4 bytes = 1 MiB.
    numbers = 512 * 64 * 4 * (3 if variant == "mgk" else 2)
    assert saved(1) <= 4 * numbers + 6 * 8 * 2 * 512 * 4
