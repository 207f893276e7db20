"""Packed sequences through the GPU kernels, against each of them alone; without a GPU, through Triton's interpreter.

B sequences, T rows, H heads, M components, D width of a head, Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.ops.common import E_STEPS, VARIANTS, Case, Inputs, attend, pick_keys, pick_queries
from tests.ops.test_precision import eager
from tests.ops.triton_env import DEVICE, assert_graph_follows, overflow_checked, rounded_exponent, strict_memory

# isort: split
from mgk.ops import dispatch
from mgk.ops import triton as kernels
from mgk.ops.dispatch import Tile, override
from mgk.ops.options import Options, Rows, Visibility
from mgk.ops.triton import operators
from mgk.ops.triton.bias import spans

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # see test_triton.py

CASE = Case(B=1, H=1, M=2, D=16, Dv=12, prior="position", seed=3)
LENGTHS = (5, 0, 37, 1)  # the third has two tiles of queries and three of keys, or three and two
LONGEST, SPARE = 40, 3
ROWS = sum(LENGTHS) + SPARE
PACKED = ("query", "key", "value")  # what has a row for each token


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Small inputs cross several tiles; fresh memory is NaN."""
    tiles = {"forward": Tile(32, 16, 4, 1), "query": Tile(32, 16, 4, 1), "key": Tile(16, 32, 4, 1)}
    with pytest.MonkeyPatch.context() as patch, strict_memory(), overflow_checked(False):
        for family in ("shifted", "projected"):
            for kernel, tile in tiles.items():
                patch.setitem(override, (family, kernel), tile)
        dispatch.plan.cache_clear()
        yield
    dispatch.plan.cache_clear()


def ends_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def numbers(case: Case, dtype: torch.dtype = torch.float32, scale: float = 1.0, rows: int = ROWS) -> Inputs:
    """Packed rows, and a prior per position that has more of them than any sequence; what has no rows stays wide."""
    inputs = replace(case, Nq=rows, Nk=max(rows, LONGEST)).inputs(torch.float32, scale=scale)
    return {
        name: tensor.detach()[..., :rows, :].to(dtype) if name in PACKED else tensor.detach()
        for name, tensor in inputs.items()
    }


def attend_packed(inputs: Inputs, ends: Tensor, options: dict[str, Any]) -> Tensor:
    inputs = dict(inputs)
    tensors = [inputs.pop(name) for name in ("query", "key", "shift", "value") if name in inputs]
    function: Any = kernels.smgk_attention if len(tensors) == 4 else kernels.mgk_attention
    given = Options(
        inputs.get("log_prior"), inputs.get("variance", tensors[0].shape[-1] ** 0.5),
        Visibility(options.get("is_causal", False)), options.get("e_step", "soft") == "hard",
        options.get("dropout_p", 0.0),
    )  # fmt: skip
    output: Tensor = function(*tensors, given, Rows(ends, ends, LONGEST, LONGEST))[0]
    return output


def one_by_one(inputs: Inputs, ends: Tensor, function: Any) -> Tensor:
    """What it gives for each sequence alone, packed; and zeros."""
    results = []
    for first, last in pairwise(ends.tolist()):
        rows = slice(first, last)
        alone = pick_queries(pick_keys(inputs, rows), rows)
        if "log_prior" in inputs and inputs["log_prior"].dim() == 3:
            alone["log_prior"] = inputs["log_prior"][..., : last - first]
        results.append(function(alone))
    return pad(torch.cat(results, 2), (0, 0, 0, inputs["query"].shape[2] - int(ends[-1])))


def incoming(output: Tensor) -> Tensor:
    """An incoming gradient that depends on the shape alone, and that bfloat16 can hold."""
    angles = torch.linspace(-1, 4, output.numel(), dtype=torch.float64)
    return angles.cos().view(output.shape).bfloat16().to(output.device, output.dtype)


def differentiated(inputs: Inputs, function: Any, spoilt: int | None = None) -> dict[str, Tensor]:
    """Output and gradients, on the CPU in float64; the incoming gradient of rows from `spoilt` on is NaN."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    output = function(leaves)
    grad = incoming(output)
    if spoilt is not None:
        grad[:, :, spoilt:] = torch.nan
    results = output, *torch.autograd.grad(output, list(leaves.values()), grad, materialize_grads=True)
    return {name: x.detach().cpu().double() for name, x in zip(["output", *inputs], results, strict=True)}


def packed_results(inputs: Inputs, options: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Spare rows, of which nothing may be seen, are NaN."""
    used = sum(lengths)
    there = {name: tensor.detach().clone().to(DEVICE) for name, tensor in inputs.items()}
    for name in PACKED:
        there[name][..., used:, :] = torch.nan
    ends = ends_of(lengths).to(DEVICE)
    got = differentiated(there, lambda leaves: attend_packed(leaves, ends, options), used)
    for name in ("output", *PACKED):
        assert (got[name][..., used:, :] == 0).all(), name
    return got


def exact_results(inputs: Inputs, options: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    doubles, ends = {name: tensor.double() for name, tensor in inputs.items()}, ends_of(lengths)
    return differentiated(
        doubles, lambda leaves: one_by_one(leaves, ends, lambda alone: attend(alone, "reference", **options))
    )


def assert_close(inputs: Inputs, options: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> None:
    """Errors against float64 within those of float32 arithmetic on exponents of this size, as in test_triton.py."""
    exact, got = exact_results(inputs, options, lengths), packed_results(inputs, options, lengths)
    size = max(1.0, *(float(inputs[name].abs().max()) for name in ("query", "key")))
    for name, want in exact.items():
        terms = float(want.abs().max()) + inputs["value"].shape[-2] * size ** (2 if name == "variance" else 1)
        bound = 8 * (rounded_exponent(inputs) + torch.finfo(torch.float32).eps) * terms
        error = float((got[name] - want).abs().max())
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, H=2, M=3, D=9, prior="head", is_causal=True),
        replace(CASE, variant="mgk", is_causal=True),
        replace(CASE, variant="mgk", prior=None),
        replace(CASE, H=2, variant="mgk", variance="tensor", is_causal=True),
        replace(CASE, variance="tensor", prior="head"),
    ],
    ids=["shifted", "shifted, causal", "causal", "plain", "variances, causal", "shifted, variances"],
)
def test_sequences_are_as_if_alone(case: Case, e_step: str) -> None:
    assert_close(numbers(case), {"e_step": e_step, "is_causal": case.is_causal})


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_numbers(variant: str, e_step: str) -> None:
    """Heads that reach too far for the light road."""
    case = replace(CASE, variant=variant, is_causal=True)
    assert_close(numbers(case, scale=30.0), {"e_step": e_step, "is_causal": True})


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_head_of_one_sequence_reaches_far(variant: str) -> None:
    """It alone is left to the second launch; another has a query far from all keys, which is noticed on the way."""
    inputs = numbers(replace(CASE, H=2, variant=variant, prior="head"))
    inputs["key"][:, 1, ..., 5:42, :] *= 8
    inputs["query"][:, 0, 2] += 12.0
    assert_close(inputs, {})
    if variant == "smgk":
        there = [inputs[name].to(DEVICE) for name in ("query", "key", "shift", "value", "log_prior")]
        ends = ends_of(LENGTHS).to(DEVICE)
        *_, far = operators.shifted_forward(*there, None, None, None, ends, 4.0, False, False, 0.0, LONGEST)
        assert far[:, 0].nonzero().flatten().tolist() == [5]  # third sequence, second head
        assert far[:, 1].nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (CASE, 1.0),
        (replace(CASE, M=3, is_causal=True), 1.0),
        (replace(CASE, is_causal=True), 6.0),  # beyond the light road
        (replace(CASE, variant="mgk", is_causal=True), 1.0),
        (replace(CASE, variant="mgk", prior="head"), 6.0),
    ],
    ids=["shifted", "three", "shifted, far", "projected", "projected, far"],
)
def test_low_precision(case: Case, e_step: str, scale: float) -> None:
    """No worse than twice what the formula commits when it is written down in bfloat16, as in test_triton.py."""
    options, ends = {"e_step": e_step, "is_causal": case.is_causal}, ends_of(LENGTHS)
    inputs, formula = numbers(case, torch.bfloat16, scale), replace(case, e_step=e_step)
    exact, got = exact_results(inputs, options), packed_results(inputs, options)
    narrow = {name: tensor.bfloat16() for name, tensor in inputs.items()}
    rough = differentiated(narrow, lambda leaves: one_by_one(leaves, ends, lambda alone: eager(alone, formula)))
    for name, want in exact.items():
        error, allowed = (float((x[name] - want).norm()) for x in (got, rough))
        terms = float(want.norm()) + (1.0 if name in ("shift", "log_prior") else 0.0)
        assert error <= 2 * allowed + 2 * torch.finfo(torch.bfloat16).eps * terms, name


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_no_integer_overflows(variant: str) -> None:
    """The interpreter looks for it here; in the other tests it does not."""
    with overflow_checked(True):
        packed_results(numbers(replace(CASE, variant=variant)), {"is_causal": True, "dropout_p": 0.4})


@pytest.mark.parametrize(("variant", "dtype"), [("mgk", torch.float32), ("smgk", torch.bfloat16)])
def test_the_padded_batch_drops_the_same_weights(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: a sequence has the same tiles, whether its rows are packed or padded."""
    monkeypatch.setattr(dispatch, "SHORT", 0)
    dispatch.plan.cache_clear()
    inputs, used = numbers(replace(CASE, H=2, variant=variant, prior="head"), dtype), sum(LENGTHS)
    mask = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]  # (B,N)
    places = mask.flatten().nonzero().flatten()

    def padded_rows(rows: Tensor) -> Tensor:
        """(1,...,T,D) -> (B,...,N,D)."""
        batch = rows.new_zeros(mask.numel(), *rows.shape[1:-2], rows.shape[-1]).index_copy(
            0, places, rows[0, ..., :used, :].movedim(-2, 0)
        )
        return batch.view(*mask.shape, *batch.shape[1:]).movedim(1, -2)

    options = {"dropout_p": 0.4, "is_causal": True}
    torch.manual_seed(5)
    packed = packed_results(inputs, options)
    leaves = {name: padded_rows(x) if name in PACKED else x for name, x in inputs.items()}
    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in leaves.items()}
    torch.manual_seed(5)
    output = attend(leaves, "triton", key_mask=mask.to(DEVICE), query_mask=mask.to(DEVICE), **options)
    grad = padded_rows(incoming(torch.empty(1, 2, ROWS, CASE.Dv, dtype=output.dtype)))
    grads = torch.autograd.grad(output, list(leaves.values()), grad.to(DEVICE))
    for name, x in zip(["output", *leaves], (output, *grads), strict=True):
        have = packed[name] if name not in ("output", *PACKED) else padded_rows(packed[name])
        assert torch.equal(have, x.detach().cpu().double()), name


@pytest.mark.parametrize(("lengths", "spare"), [((0, 0), 3), ((0, 0), 0), ((), 3)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_no_sequence_are_zero(variant: str, lengths: tuple[int, ...], spare: int) -> None:
    inputs = numbers(replace(CASE, variant=variant), rows=spare)
    for name, tensor in packed_results(inputs, {}, lengths).items():
        assert (tensor == 0).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_spare_rows(variant: str) -> None:
    inputs = numbers(replace(CASE, variant=variant), rows=17 + LONGEST)
    assert_close(inputs, {"is_causal": True}, (17, LONGEST))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bound_far_above_all_lengths(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for what is far behind a sequence end at once, and nobody misses what they would have written."""
    monkeypatch.setitem(globals(), "LONGEST", 300)
    assert_close(numbers(replace(CASE, variant=variant), rows=134), {"is_causal": True}, (3, 129))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_stay_where_they_are(variant: str) -> None:
    """Queries, keys and values beside each other, as one projection leaves them: no copy before, none after."""
    buffer, ends = torch.randn(ROWS, 4, 2, 16, device=DEVICE), ends_of(LENGTHS).to(DEVICE)
    views = buffer.permute(1, 2, 0, 3)[:, None]  # (4,1,H,T,D)
    inputs = {"query": views[0], "value": views[1]}
    if variant == "smgk":
        inputs |= {"key": views[2], "shift": torch.randn(2, 2, 16, device=DEVICE)}
    else:
        inputs |= {"key": views[2:].permute(1, 2, 0, 3, 4)}
    results = []
    for form in (lambda x: x, torch.Tensor.contiguous):
        leaves = {name: form(tensor).detach().requires_grad_() for name, tensor in inputs.items()}
        output = attend_packed(leaves, ends, {})
        results.append([output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))])
    assert all(x[0].movedim(-2, 0).is_contiguous() for x in results[0][:3])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("lengths", [LENGTHS, (7,) * 130])
def test_sequences_come_longest_first(lengths: tuple[int, ...]) -> None:
    """130: more than one program looks at in one go."""
    found = spans(None, None, 0, 0, ends_of(lengths).to(DEVICE))
    assert found is not None
    for (last_query, last_key, first_key, first_row, *_), length, begin in zip(
        found.tolist(), lengths, ends_of(lengths).tolist()[:-1], strict=True
    ):
        assert [last_query, last_key, first_key, first_row] == [length, length, 0, begin]
    assert found[:, 4].tolist() == torch.argsort(torch.tensor(lengths), descending=True, stable=True).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_pass_opcheck(variant: str) -> None:
    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in numbers(replace(CASE, variant=variant)).items()}
    names = ("query", "key", "shift", "value", "log_prior")
    own = () if variant == "smgk" else (torch.ones(1, 2, device=DEVICE, requires_grad=True),)
    tensors = *(leaves.get(name) for name in names), *own, None, None, None, ends_of(LENGTHS).to(DEVICE)
    rest = 4.0, False, True, 0.0, LONGEST
    forward: Any = operators.shifted_forward if variant == "smgk" else operators.projected_forward
    backward: Any = operators.shifted_backward if variant == "smgk" else operators.projected_backward
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(forward.op, (*tensors, *rest), test_utils=tests)
    results = forward(*tensors, *rest)
    detached = [None if x is None else x.detach() for x in (results[0], *tensors, *results)]
    torch.library.opcheck(backward.op, (*detached, *rest), test_utils=tests)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_captures_it(variant: str) -> None:
    """And takes the lengths of whatever it is replayed with."""
    inputs = numbers(replace(CASE, variant=variant), torch.bfloat16)
    leaves = {name: tensor.to(DEVICE).requires_grad_() for name, tensor in inputs.items()}
    ends, others = (ends_of(lengths).to(DEVICE) for lengths in (LENGTHS, (0, 40, 2, 4)))

    def step() -> list[Tensor]:
        output = attend_packed(leaves, ends, {"is_causal": True})
        grads = torch.autograd.grad(output.float().square().sum(), list(leaves.values()))
        return [output.detach(), *grads]  # the graph of autograd belongs to a stream, and goes with it

    assert_graph_follows(step, lambda: ends.copy_(others))
