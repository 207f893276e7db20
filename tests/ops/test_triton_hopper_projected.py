"""Hopper kernels for projected keys, and for shifted ones with a variance per component, beyond the cases of
test_triton_hopper.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.common import Case
from tests.ops.test_triton import assert_low_precision, run
from tests.ops.test_triton_hopper import ALL, CASE, assert_near, modules, taken

__all__ = ["modules", "taken"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

VARIANCES = replace(CASE, variance="tensor")


@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (replace(VARIANCES, Nq=200, Nk=331, prior="position"), 1.0),
        (replace(VARIANCES, Nq=128, Nk=320, is_causal=True, prior=None), 1.0),
        (replace(VARIANCES, D=128, Dv=128, B=2, Nq=300, Nk=333, is_causal=True), 1.0),
        (replace(VARIANCES, Nq=130, Nk=256, is_causal=True), 6.0),
    ],
    ids=["ragged", "later", "wide", "far"],
)
def test_shifted_keys_with_variances(case: Case, scale: float, taken: list[str]) -> None:
    assert_low_precision(case, torch.bfloat16, scale=scale)
    assert taken == ALL


def test_each_head_with_variances_takes_its_road(taken: list[str]) -> None:
    """One head whose keys reach too far, one with a query far from all keys, variances in either order, and queries
    that see nothing.
    """
    case = replace(VARIANCES, B=2, H=3, is_causal=True, prior=None, Nq=200, Nk=130)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    inputs["key"][1, 0] *= 16
    inputs["query"][0, 1, 77] *= 80
    inputs["variance"][2] = torch.tensor([20.0, 2.0])
    assert_near(inputs, case.options())
    assert taken == ALL


HALF = replace(CASE, variant="mgk", H=1)


@pytest.mark.parametrize(
    ("case", "scale", "kernels"),
    [
        (replace(HALF, Nq=200, Nk=331, prior="position"), 1.0, ALL),
        (replace(HALF, Nq=130, Nk=256, is_causal=True), 6.0, ALL),
        (replace(HALF, Nq=300, Nk=333, D=128, Dv=128, is_causal=True), 1.0, ALL),
        (replace(HALF, Nq=128, Nk=200, D=32, Dv=32, prior=None), 1.0, ["forward_kernel"]),
        (replace(HALF, Nq=200, Nk=331, e_step="hard", is_causal=True), 1.0, ALL),
        (replace(HALF, Nq=128, Nk=200, D=128, Dv=128, e_step="hard"), 1.0, ALL),
    ],
    ids=["ragged", "far", "wide", "narrow", "hard", "hard wide"],
)
def test_projected_keys_in_float16(case: Case, scale: float, kernels: list[str], taken: list[str]) -> None:
    """With a running maximum: weights below 2^-24 are 0 in float16."""
    assert_low_precision(case, torch.float16, scale=scale)
    assert taken == kernels


def test_queries_that_see_nothing_in_float16(taken: list[str]) -> None:
    case = replace(HALF, Nq=300, Nk=129, is_causal=True, prior=None)
    assert_near({name: x.detach() for name, x in case.inputs(torch.float32).items()}, case.options(), torch.float16)
    assert taken == ALL


@pytest.mark.parametrize(
    ("case", "dtype", "kernels"),
    [
        (replace(HALF, Nq=200, Nk=331, D=96, Dv=96, is_causal=True), torch.bfloat16, ALL),
        (replace(HALF, Nq=130, Nk=200, D=40, Dv=72, e_step="hard"), torch.bfloat16, ALL),
        (replace(HALF, Nq=130, Nk=200, D=56, Dv=48, prior="position"), torch.float16, ALL),
        (replace(HALF, Nq=130, Nk=200, D=24, Dv=32), torch.bfloat16, ["forward_kernel"]),
        (replace(VARIANCES, Nq=130, Nk=200, D=40, Dv=48), torch.bfloat16, ALL),
        (replace(VARIANCES, Nq=130, Nk=200, D=48, Dv=80, is_causal=True), torch.bfloat16, ALL),
    ],
    ids=["96", "40 and 72", "56 and 48", "24 and 32", "variances, 40 and 48", "variances, 48 and 80"],
)
def test_widths_between(case: Case, dtype: torch.dtype, kernels: list[str], taken: list[str]) -> None:
    """Zeros fill the blocks, whose width is that of the wider one of heads and values."""
    assert_low_precision(case, dtype)
    assert taken == kernels


@pytest.mark.parametrize(
    ("case", "dtype"), [(HALF, torch.float16), (replace(VARIANCES, H=1), torch.bfloat16)], ids=["float16", "variances"]
)
def test_a_component_that_its_prior_removes(case: Case, dtype: torch.dtype, taken: list[str]) -> None:
    case = replace(case, Nq=130, Nk=200, is_causal=True, prior="position")
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    inputs["log_prior"][:, 0, ::3] = -torch.inf
    inputs["log_prior"][:, 1, 100] = -torch.inf
    assert_near(inputs, case.options(), dtype)
    assert taken == ALL


def test_variances_far_apart(taken: list[str]) -> None:
    """The component with the smaller variance has few of the weights and nearly all of the gradient: it must not be
    what sums over the other one leave.
    """
    case = replace(VARIANCES, Nq=130, Nk=200)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    inputs["variance"] = torch.tensor([[8.0, 2000.0], [1e6, 8.0]])
    inputs = {name: x.bfloat16() if name in ("query", "key", "value") else x for name, x in inputs.items()}
    exact = run({name: x.double() for name, x in inputs.items()}, "reference", {})
    for name, have, want in zip(["output", *inputs], run(inputs, "triton", {}), exact, strict=True):
        if name != "log_prior":  # whose sum cancels
            assert float((have - want).norm()) <= 4 * torch.finfo(torch.bfloat16).eps * float(want.norm()), name
    assert taken == ALL


def test_not_a_number_in_float16(taken: list[str]) -> None:
    """Rows that see it are NaN, as on the other paths; other heads are not touched."""
    case = replace(HALF, H=2, Nq=130, Nk=200, is_causal=True)
    inputs = {name: x.detach().half() for name, x in case.inputs(torch.float32).items()}
    inputs["key"][0, 1, 0, 150, 3] = torch.nan
    output = run(inputs, "triton", case.options())[0]
    seen = torch.arange(130) + 70 >= 150
    assert output[0, 1].isnan().all(-1).equal(seen)
    assert not output[0, 0].isnan().any()
    assert taken == ALL
