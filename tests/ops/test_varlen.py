"""Packed sequences of different lengths equal a loop over them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mgk
from tests.ops.common import IMPLS, VARIANTS, Case, Inputs, assert_same, attend_with_lse, cases

LENGTHS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=5)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed_case(case: Case, lengths: list[tuple[int, int]]) -> tuple[Inputs, dict[str, Any]]:
    """Inputs (1,H,T,D) and so on whose rows are those of all sequences, and where these start."""
    total_q, total_k = (sum(each) for each in zip(*lengths, strict=True))
    longest = max(k for _, k in lengths)
    inputs = replace(case, B=1, Nq=total_q, Nk=total_k).inputs()
    if case.prior == "position":  # of a position within a sequence, with some to spare
        inputs["log_prior"] = replace(case, Nk=longest + 2, prior="position").inputs()["log_prior"]
    where = {
        "cu_seq_q": starts([q for q, _ in lengths]), "cu_seq_k": starts([k for _, k in lengths]),
        "max_q": max(q for q, _ in lengths), "max_k": longest,
    }  # fmt: skip
    return inputs, where


def varlen(inputs: Inputs, **options: Any) -> Any:
    """The call in its own layout, positions first."""
    own = dict(inputs)
    own["query"], own["value"] = (inputs[name][0].transpose(0, 1) for name in ("query", "value"))
    own["key"] = inputs["key"][0].movedim(-2, 0)
    function: Any = mgk.smgk_varlen_attention if "shift" in inputs else mgk.mgk_varlen_attention
    return function(**own, **options)


def loop(inputs: Inputs, where: dict[str, Any], impl: str, **options: Any) -> tuple[Tensor, Tensor]:
    outputs, lses = [], []
    for q, next_q, k, next_k in zip(
        *(x for cu in (where["cu_seq_q"], where["cu_seq_k"]) for x in (cu.tolist(), cu.tolist()[1:])), strict=False
    ):
        alone = dict(inputs)
        alone["query"] = inputs["query"][:, :, q:next_q]
        alone["key"], alone["value"] = inputs["key"][..., k:next_k, :], inputs["value"][:, :, k:next_k]
        if "log_prior" in inputs and inputs["log_prior"].dim() == 3:
            alone["log_prior"] = inputs["log_prior"][..., : next_k - k]
        output, lse = attend_with_lse(alone, impl, **options)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2)[0].transpose(0, 1), torch.cat(lses, 2)[0]


@pytest.mark.parametrize("impl", IMPLS)
@given(case=cases(masked=False, window=st.sampled_from([None, 1, 3])), lengths=LENGTHS)
def test_equals_a_loop_over_the_sequences(impl: str, case: Case, lengths: list[tuple[int, int]]) -> None:
    """Outputs (Tq,H,Dv), lse (H,Tq) and gradients, with sequences of no query or no key among them."""
    inputs, where = packed_case(replace(case, H=4, G=2), lengths)
    options = {"e_step": case.e_step, "is_causal": case.is_causal or case.window is not None, "window": case.window}
    output, lse = varlen(inputs, **where, **options, impl=impl, return_lse=True)
    wanted, wanted_lse = loop(inputs, where, impl, **options)
    assert_same(output, wanted, inputs)
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    assert_same(lse.masked_fill(lse == -torch.inf, 0), wanted_lse.masked_fill(lse == -torch.inf, 0), inputs)
    assert torch.equal(varlen(inputs, **where, **options, impl=impl), output)


def test_merges_with_other_keys() -> None:
    """The halves of the keys of each sequence, packed in the layout of the output."""
    case = Case("smgk", H=2, prior="head")
    inputs, where = packed_case(case, [(3, 4), (2, 6)])
    first = torch.tensor([0, 1, 4, 5, 6])
    second = torch.tensor([2, 3, 7, 8, 9])
    parts = []
    for rows, ends in ((first, [0, 2, 5]), (second, [0, 2, 5])):
        own = inputs | {"key": inputs["key"][..., rows, :], "value": inputs["value"][:, :, rows]}
        parts.append(varlen(own, **where | {"cu_seq_k": torch.tensor(ends, dtype=torch.int32)}, return_lse=True))
    output, lse = mgk.merge_attention(*parts)
    whole, whole_lse = varlen(inputs, **where, return_lse=True)
    assert_same(output, whole, inputs)
    assert_same(lse, whole_lse, inputs)


def test_dropout_has_the_right_mean() -> None:
    inputs, where = packed_case(Case(prior=None), [(40, 50), (30, 60)])
    ones = inputs | {"value": torch.ones_like(inputs["value"])}
    torch.manual_seed(0)
    output = varlen(ones, **where, dropout_p=0.25)
    # Means of 140 rows of about 20 weights that matter, each with a variance of 1/3 of its square.
    assert abs(output[..., 0].mean().item() - 1) < 5 * (1 / 3 / (140 * 20)) ** 0.5 + 0.02


GOOD = {
    "cu_seq_q": torch.tensor([0, 3, 5], dtype=torch.int32), "cu_seq_k": torch.tensor([0, 4, 10], dtype=torch.int32),
    "max_q": 3, "max_k": 6,
}  # fmt: skip


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"cu_seq_q": ends(0, 3, 4)}, ValueError, "^cu_seq_q: expected numbers from 0 to 5"),
        ({"cu_seq_k": ends(1, 4, 10)}, ValueError, "^cu_seq_k: expected numbers from 0 to 10"),
        ({"cu_seq_k": ends(0, 11, 10)}, ValueError, r"^cu_seq_k: .*do not decrease"),
        ({"cu_seq_q": GOOD["cu_seq_q"].long()}, TypeError, "^cu_seq_q: expected dtype torch.int32"),  # type: ignore[attr-defined]
        ({"cu_seq_q": [0, 3, 5]}, TypeError, "^cu_seq_q: expected an int32 tensor"),
        ({"cu_seq_k": ends(0, 5, 5, 10)}, ValueError, r"^cu_seq_k: expected shape \(S\+1\) = \(3,\), as cu_seq_q"),
        ({"cu_seq_k": ends(0)}, ValueError, r"^cu_seq_k: expected a shape \(S\+1,\)"),
        ({"cu_seq_k": GOOD["cu_seq_k"].to("meta")}, ValueError, "^cu_seq_k: expected the device"),  # type: ignore[attr-defined]
        ({"max_q": 2}, ValueError, "^max_q: expected at least 3"),
        ({"max_k": 5}, ValueError, "^max_k: expected at least 6"),
        ({"max_k": 6.0}, TypeError, "^max_k: expected an integer"),
        ({"window": 3}, ValueError, "^window: expected None without is_causal"),
    ],
)
def test_wrong_packing_is_an_error(variant: str, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = Case(variant, B=1, Nq=5, Nk=10, prior=None).inputs()
    with pytest.raises(error, match=message):
        varlen(inputs, **GOOD | wrong)


def test_wrong_tensors_are_errors() -> None:
    inputs = Case(B=1, Nq=5, Nk=10, prior="head").inputs()
    inputs["log_prior"] = inputs["log_prior"][..., None].expand(-1, -1, 5)
    with pytest.raises(ValueError, match=r"^log_prior: .*\(2, 2, 6\)"):
        varlen(inputs, **GOOD)
    del inputs["log_prior"]
    with pytest.raises(ValueError, match=r"^value: expected shape \(Tk,G,Dv\)"):
        varlen(inputs | {"value": inputs["value"][:, :, 1:]}, **GOOD)
    with pytest.raises(ValueError, match=r"^query: expected 3 dimensions"):
        mgk.mgk_varlen_attention(inputs["query"], inputs["key"], inputs["value"], **GOOD)  # type: ignore[call-overload]
