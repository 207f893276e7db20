"""Attention is checked against float64 before it is timed, on the inputs that are timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mgk.ops import measure
from mgk.ops.measure import BASELINE, MIXTURES, Case, Method, make_inputs

SMALL = Case("small", batch=2, heads=4, length=48, width=8)
CASES = (SMALL, Case("causal", batch=1, heads=2, length=33, width=4, is_causal=True))


def inputs_of(case: Case, method: Method) -> dict[str, Tensor]:
    return make_inputs(case, method, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("method", [BASELINE, *MIXTURES], ids=lambda method: method.name)
def test_the_error_of_a_correct_result_is_rounding(case: Case, method: Method) -> None:
    # The dense formula in float32 against itself in float64: sums of 48 terms, exponents of some tens.
    assert measure.check(case, method, inputs_of(case, method), "reference") < 48 * 40 * torch.finfo(torch.float32).eps


def spoil_value(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return out + 1e-3


def spoil_last_entry(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = torch.zeros_like(out)
    mask[-1, -1, -1, -1] = 1e-3
    return out + mask


def return_nan(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return out * torch.nan


def spoil_gradient(name: str) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """Keep the output and add a thousandth of the output's gradient to the gradient of one input."""

    def spoil(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        extra = 1e-3 * (inputs[name] - inputs[name].detach()).sum()
        return out + extra

    return spoil


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoil_value, "output has an error"),
        (spoil_last_entry, "output has an error"),
        (return_nan, "output has an error of nan"),
        *(
            (spoil_gradient(name), f"the gradient of {name} has an error")
            for name in ("query", "key", "value", "shift")
        ),
        (spoil_gradient("log_prior"), "the gradient of log_prior has an error"),
    ],
)
def test_a_wrong_result_is_an_error(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, dict[str, Tensor]], Tensor], complaint: str
) -> None:
    real = measure.attend

    def spoiled(
        method: Method, inputs: dict[str, Tensor], *, is_causal: bool, window: int | None = None, impl: str = "auto"
    ) -> Tensor:
        out = real(method, inputs, is_causal=is_causal, window=window, impl="reference")
        return out if impl == "reference" else spoil(out, inputs)

    monkeypatch.setattr(measure, "attend", spoiled)
    method = Method("smgk")
    with pytest.raises(measure.WrongResultError, match=f"smgk soft on small: {complaint}.*a wrong result is not timed"):
        measure.check(SMALL, method, inputs_of(SMALL, method))


def test_the_error_of_a_sum_that_cancels_is_relative_to_its_terms() -> None:
    terms = torch.tensor([[1e6, -1e6 + 1.0]], dtype=torch.float64)
    assert measure.relative_error(torch.tensor([1.1]), terms) == pytest.approx(0.1 / (2e6 - 1), rel=1e-5)
    assert measure.relative_error(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(0.1, rel=1e-5)


def test_queries_with_a_near_tie_are_left_out_of_the_hard_gradient() -> None:
    query = torch.tensor([[[[0.0, 0.0], [3.0, 0.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[[1.0, 0.0]], [[-1.0, 0.0]]]]], dtype=torch.float64)  # a tie for the first
    kept = measure.without_near_ties(Method("mgk", "hard"), {"query": query, "key": key})
    assert isinstance(kept, Tensor)
    assert kept.flatten().tolist() == [0.0, 1.0]


def test_a_mixture_has_half_the_heads_and_the_same_inputs_every_time() -> None:
    assert inputs_of(SMALL, BASELINE)["query"].shape[1] == 4
    for method in MIXTURES:
        first, second = inputs_of(SMALL, method), inputs_of(SMALL, method)
        assert first["query"].shape[1] == first["value"].shape[1] == 2
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in first.values())
    with pytest.raises(ValueError, match=r"heads: expected an even number, .* got 3"):
        Case("odd", batch=1, heads=3, length=4, width=4)
