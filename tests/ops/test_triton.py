"""The GPU kernels against the reference; without a GPU, through Triton's interpreter, at small ragged shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mgk
from tests.ops.common import E_STEPS, VARIANTS, Case, Inputs, attend, cases
from tests.ops.test_precision import eager
from tests.ops.triton_env import DEVICE, overflow_checked, rounded_exponent, strict_memory

# isort: split
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from mgk.ops import dispatch
from mgk.ops.dispatch import Tile, override
from mgk.ops.triton import launch_shifted, operators, primitives
from mgk.ops.triton.bias import spans
from mgk.ops.triton.host import dropout_numbers

# The kernels make infinities on purpose (the log of an empty sum); numpy, which the interpreter computes with, says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NO_MORE = 0, 0.0, 0, 0, False  # window, dropout, lengths of packed sequences, lse
CASE = Case(B=1, H=2, M=2, Nq=37, Nk=53, D=20, Dv=12, prior="position", masked=True, seed=3)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Small inputs cross several tiles; fresh memory is NaN."""
    tiles = {
        "forward": Tile(16, 16, 4, 1), "query": Tile(16, 16, 4, 1), "key": Tile(16, 32, 4, 1),
        "short forward": Tile(16, 32, 4, 1), "short backward": Tile(16, 32, 4, 1),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, strict_memory(), overflow_checked(False):
        for family in ("shifted", "projected"):
            for kernel, tile in tiles.items():
                patch.setitem(override, (family, kernel), tile)
        dispatch.plan.cache_clear()
        yield
    dispatch.plan.cache_clear()


def incoming(output: Tensor) -> Tensor:
    """An incoming gradient that depends on the shape alone."""
    angles = torch.linspace(-1, 1, output.numel(), dtype=torch.float64)
    return angles.cos().view(output.shape).to(output.device, output.dtype)


def run(inputs: Inputs, impl: str, options: dict[str, Any]) -> list[Tensor]:
    """Output and gradients, on the CPU in float64."""
    device = DEVICE if impl == "triton" else "cpu"
    there = {name: tensor.detach().to(device).requires_grad_() for name, tensor in inputs.items()}
    masks = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    output = attend(there, impl, **masks)
    grads = torch.autograd.grad(output, list(there.values()), incoming(output))
    return [tensor.detach().cpu().double() for tensor in (output, *grads)]


def assert_close(inputs: Inputs, options: dict[str, Any], scale: float = 1.0) -> None:
    """Errors against float64 within those of float32 arithmetic on exponents of this size."""
    exact = run({name: tensor.double() for name, tensor in inputs.items()}, "reference", options)
    got = run(inputs, "triton", options)
    exponent = rounded_exponent(inputs)
    size = max(1.0, *(float(inputs[name].detach().abs().max()) for name in ("query", "key")))
    for name, have, want in zip(["output", *inputs], got, exact, strict=True):
        # a relative error e of the weights, times what they weigh: values, or the products of the chain rule
        # (distances squared for the variance), summed over the pairs
        terms = float(want.abs().max()) + inputs["value"].shape[-2] * size ** (2 if name == "variance" else 1)
        bound = 8 * (exponent + torch.finfo(torch.float32).eps) * terms
        error = float((have - want).abs().max()) if want.numel() else 0.0
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


@settings(max_examples=8)
@given(case=cases(B=1, H=st.integers(1, 2), Nq=st.integers(1, 40), Nk=st.integers(1, 40), D=st.integers(1, 20)))
def test_agrees_with_the_reference(case: Case) -> None:
    assert_close(case.inputs(torch.float32), case.options())


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, H=6, G=2, prior="head"),
        replace(CASE, H=3, G=1, variant="mgk", variance="tensor"),
        replace(CASE, H=4, G=2, variance="tensor"),
        replace(CASE, Nq=80, Nk=90, is_causal=True, window=1),
        replace(CASE, variant="mgk", Nq=80, Nk=70, is_causal=True, window=21),
        replace(CASE, H=2, G=1, M=3, Nq=40, Nk=90, is_causal=True, window=40, variance="tensor"),
    ],
    ids=["groups", "groups, variances", "groups, shared", "window of 1", "window, projected", "both"],
)
def test_grouped_queries_and_windows(case: Case, e_step: str) -> None:
    case = replace(case, e_step=e_step)
    assert_close(case.inputs(torch.float32), case.options() | {"key_mask": None})


def test_a_head_that_overflows_takes_its_group_along() -> None:
    """All of it goes to the second launch, where the gradients of the shared keys are summed."""
    inputs = replace(CASE, H=4, G=2, masked=False, prior="head").inputs(torch.float32)
    with torch.no_grad():
        inputs["shift"][3] *= 30  # the last query head
    assert_close(inputs, {})


@pytest.mark.parametrize("window", [None, 17])
def test_tiles_outside_the_window_are_not_visited(window: int | None) -> None:
    """NaN in values that a causal query's tiles reach shows in all of these, as 0 * NaN is NaN."""
    inputs = replace(CASE, Nq=96, Nk=96, prior=None).inputs(torch.float32)
    with torch.no_grad():
        inputs["value"][:, :, 0] = torch.nan
    there = {name: tensor.detach().to(DEVICE) for name, tensor in inputs.items()}
    there["query"].requires_grad_()
    output = attend(there, "triton", is_causal=True, window=window)
    bad = output.isnan().any(-1)
    assert bool(bad[:, :, :17].all())
    assert bool(bad[:, :, 48:].any()) == (window is None)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter looks for it")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_integer_overflows(variant: str, dtype: torch.dtype) -> None:
    """The other tests here do not look, which would take them half as long again."""
    with overflow_checked(True):
        run(replace(CASE, variant=variant).inputs(dtype), "triton", {"is_causal": True, "dropout_p": 0.3})


@triton.jit  # type: ignore[untyped-decorator]
def square_kernel(OUT, n):  # type: ignore[no-untyped-def]
    tl.store(OUT, n * n)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter looks for it")
def test_an_integer_that_overflows_is_seen() -> None:
    with overflow_checked(True), pytest.raises(InterpreterError, match="mul of int32"):
        square_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 1 << 16)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [6.0, 30.0])
def test_large_numbers(variant: str, e_step: str, scale: float) -> None:
    """At 6 sMGK is beyond the light road; at 30 nearly every row has one key."""
    case = replace(CASE, variant=variant, e_step=e_step, is_causal=True)
    assert_close(case.inputs(torch.float32, scale=scale), case.options())


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("M", [2, 3])
def test_shifted_keys_with_variances(M: int, e_step: str) -> None:
    """One score product for all components, whose exponents it is divided by their variances in."""
    case = replace(CASE, variance="tensor", M=M, e_step=e_step, is_causal=M == 2)
    for scale in (1.0, 30.0):
        assert_close(case.inputs(torch.float32, scale=scale), case.options())
    for dtype in (torch.bfloat16, torch.float16):
        assert_low_precision(replace(case, masked=False), dtype)


def heads_of_both_roads() -> Inputs:
    inputs = replace(CASE, B=2, masked=False, prior="head").inputs(torch.float32)
    with torch.no_grad():
        inputs["key"][1, 0] *= 8  # one head of four
    return inputs


def test_each_head_takes_its_road() -> None:
    """A head whose numbers reach too far does not slow the others down, and all are right."""
    inputs = heads_of_both_roads()
    there = {name: tensor.detach().to(DEVICE) for name, tensor in inputs.items()}
    none = (None, None, None, None, None)
    far = operators.shifted_forward(
        there["query"], there["key"], there["shift"], there["value"], there["log_prior"], *none, CASE.D**0.5, False,
        False, *NO_MORE,
    )[-1]  # fmt: skip
    assert (far[:, 0] > 0).tolist() == [False, False, True, False]
    assert_close(inputs, {})


def test_a_row_whose_heavy_keys_sit_in_the_other_component() -> None:
    """u and w of such a row multiply to nothing; exp l does not."""
    inputs = replace(CASE, M=2, masked=False, prior=None, D=16).inputs(torch.float32)
    with torch.no_grad():
        inputs["shift"][:] = 0
        inputs["shift"][:, 0, 0], inputs["shift"][:, 1, 0] = 100, -100
        inputs["query"][:, :, ::2, 0], inputs["query"][:, :, 1::2, 0] = 100, -100
        inputs["key"][:, :, ::2, 0], inputs["key"][:, :, 1::2, 0] = 200, -200
    assert_close(inputs, {})


def assert_low_precision(case: Case, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Output and gradients no worse than twice what the formula commits when it is written down in that precision."""
    inputs = {
        name: tensor.detach().to(torch.float32 if name in ("log_prior", "shift") else dtype)
        for name, tensor in case.inputs(torch.float32, scale=scale).items()
    }
    exact = run({name: tensor.double() for name, tensor in inputs.items()}, "reference", case.options())
    got = run(inputs, "triton", case.options())
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    output = eager(leaves, case)
    grad = incoming(output)
    rough = [output, *torch.autograd.grad(output, list(leaves.values()), grad, materialize_grads=True)]
    for name, have, want, low in zip(["output", *inputs], got, exact, rough, strict=True):
        error, allowed = (float((x.detach().double() - want).norm()) for x in (have, low))
        # what a sum that cancels leaves is judged by the size of its terms, one rounding each
        terms = float(want.norm()) + (1.0 if name in ("shift", "log_prior", "variance") else 0.0)
        assert error <= 2 * allowed + 2 * torch.finfo(dtype).eps * terms, name


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(variant: str, e_step: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SHORT", 0)
    dispatch.plan.cache_clear()
    case = replace(CASE, variant=variant, e_step=e_step, masked=False, is_causal=True, Nq=40, Nk=40)
    assert_low_precision(case, dtype)


@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"Nq": 37, "Nk": 53, "masked": True},
        {"Nq": 128, "Nk": 128, "masked": False},
        {"Nq": 70, "Nk": 90, "masked": False, "is_causal": True},
    ],
    ids=["ragged", "whole", "causal"],
)
def test_the_nearest_component_is_found_in_low_precision(
    M: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SHORT", 0)
    dispatch.plan.cache_clear()
    case = replace(CASE, variant="smgk", e_step="hard", M=M, D=16, Dv=16, B=1, **options)
    assert_low_precision(case, torch.bfloat16)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_components(variant: str, e_step: str) -> None:
    """More than the products that sum rows have columns for."""
    case = replace(CASE, variant=variant, e_step=e_step, M=9, D=8, Dv=8, masked=False, is_causal=True, Nq=40, Nk=40)
    assert_low_precision(case, torch.bfloat16)


SHORT = Case(B=2, H=2, M=2, Nq=40, Nk=40, D=16, Dv=16, prior="head", is_causal=True, seed=3)


@pytest.mark.parametrize("scale", [1.0, 6.0])  # at 6 heads are beyond the light road
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize(
    "case",
    [
        SHORT,
        replace(SHORT, B=1, Nq=128, Nk=128),  # whole tiles
        replace(SHORT, Nq=37, Nk=53, D=20, Dv=12, prior="position"),
        replace(SHORT, M=1, Nk=53, prior=None, is_causal=False),
        replace(SHORT, M=3, D=9, is_causal=False),
    ],
    ids=["causal", "even", "ragged", "one", "three"],
)
def test_short_sequences(case: Case, e_step: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program does a head: its gradients are as good as those of two kernels."""
    taken: list[bool] = []
    short_backward = launch_shifted.short_backward

    def noted(*arguments: Any) -> Any:
        taken.append(True)
        return short_backward(*arguments)

    monkeypatch.setattr(launch_shifted, "short_backward", noted)
    assert_low_precision(replace(case, e_step=e_step), torch.bfloat16, scale)
    assert taken


@pytest.mark.parametrize("length", [256, 0])
@pytest.mark.parametrize("e_step", E_STEPS)
def test_queries_far_from_all_keys_in_low_precision(e_step: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SHORT", length)
    dispatch.plan.cache_clear()
    inputs = {name: tensor.detach().bfloat16() for name, tensor in far_from_all_keys("smgk").items()}
    exact = run({name: tensor.double() for name, tensor in inputs.items()}, "reference", {"e_step": e_step})
    got = run(inputs, "triton", {"e_step": e_step})
    for name, have, want in zip(["output", *inputs], got, exact, strict=True):
        # exponents of 2^9 in bfloat16 products, whose errors are those of their float32 sums
        assert float((have - want).norm()) <= 4 * torch.finfo(torch.bfloat16).eps * (1 + float(want.norm())), name


@pytest.mark.parametrize("e_step", E_STEPS)
def test_short_and_long_sequences_drop_the_same_weights(e_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, results = replace(SHORT, e_step=e_step).inputs(torch.bfloat16), []
    for length in (256, 0):
        monkeypatch.setattr(dispatch, "SHORT", length)
        dispatch.plan.cache_clear()
        torch.manual_seed(5)
        results.append(run(inputs, "triton", {"e_step": e_step, "is_causal": True, "dropout_p": 0.3}))
    for name, one, other in zip(["output", *inputs], *results, strict=True):
        assert float((one - other).norm()) <= 4 * torch.finfo(torch.bfloat16).eps * (1 + float(other.norm())), name


@pytest.mark.parametrize("batch", [1, 5, 130])
def test_masks_say_what_takes_part_and_which_batches_are_longest(batch: int) -> None:
    """130: more than one program looks at in one go."""
    generator = torch.Generator().manual_seed(batch)
    queries, keys = (torch.rand(batch, size, generator=generator) > 0.7 for size in (9, 11))
    keys[0] = False
    found = spans(queries.to(DEVICE), keys.to(DEVICE), 9, 11)
    assert found is not None
    for (last_query, last_key, first_key, hole, _, masked), of_queries, of_keys in zip(
        found.tolist(), queries.tolist(), keys.tolist(), strict=True
    ):
        assert last_query == max([i + 1 for i, taken in enumerate(of_queries) if taken], default=0)
        assert last_key == max([j + 1 for j, taken in enumerate(of_keys) if taken], default=0)
        assert first_key == min([j for j, taken in enumerate(of_keys) if taken], default=11)
        assert hole == min([j for j, taken in enumerate(of_keys) if not taken], default=11)
        assert masked == min([i for i, taken in enumerate(of_queries) if not taken], default=9)
    pairs = found[:, 0] * found[:, 1]
    assert found[:, 4].tolist() == torch.argsort(pairs, descending=True, stable=True).tolist()


def far_from_all_keys(variant: str) -> Inputs:
    """Ordinary numbers, but one head's queries are so far away that every weight underflows without a maximum."""
    inputs = replace(CASE, variant=variant, B=2, masked=False, prior="head").inputs(torch.float32)
    with torch.no_grad():
        inputs["query"][1, 0, 5:9] += 12.0  # |q - k|^2 / 2 s2 is about 12^2 * 20 / (2 * 4.5) = 322
    return inputs


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_far_from_all_keys(variant: str, e_step: str) -> None:
    """The bound that stands in for the row maximum is far above it; the kernel notices."""
    assert_close(far_from_all_keys(variant), {"e_step": e_step})


def test_a_head_with_a_query_far_from_all_keys_is_left_to_the_second_launch() -> None:
    inputs = far_from_all_keys("smgk")
    there = {name: tensor.detach().to(DEVICE) for name, tensor in inputs.items()}
    far = operators.shifted_forward(
        there["query"], there["key"], there["shift"], there["value"], there["log_prior"], None, None, None, None,
        None, CASE.D**0.5, True, False, *NO_MORE,
    )[-1]  # fmt: skip
    assert not far[:, 0].any()  # which programs read while others find misfits: all warps of one must read the same
    assert (far[:, 1] > 0).tolist() == [False, False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a race needs many programs at once")
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_misfits_are_found_while_other_programs_of_the_head_begin(variant: str, width: int) -> None:
    torch.manual_seed(0)
    query, value = (torch.randn(8, 8, 4096, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    query[:, ::2, ::500] += 20.0
    if variant == "smgk":
        keys: Any = torch.randn_like(query), torch.randn(8, 2, width, device=DEVICE)
    else:
        keys = (torch.randn(8, 8, 2, 4096, width, device=DEVICE, dtype=torch.bfloat16),)
    attention: Any = mgk.smgk_attention if variant == "smgk" else mgk.mgk_attention
    first, *others = (attention(query, *keys, value, is_causal=True, impl="triton") for _ in range(20))
    assert first.isfinite().all()
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(128, 0), (0, 128), (40, 0), (0, 40)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_keys_or_no_queries(variant: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Whole tiles, but none of them."""
    case = replace(CASE, variant=variant, Nq=lengths[0], Nk=lengths[1], masked=False, prior="head")
    leaves = {name: tensor.detach().to(DEVICE).requires_grad_() for name, tensor in case.inputs(dtype).items()}
    output = attend(leaves, "triton")
    assert (output == 0).all()
    grads = torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padding_is_no_misfit(variant: str) -> None:
    """Causal queries before the first real key see none: zeros, and no reason to compute the head again."""
    case = replace(CASE, variant=variant, B=2, Nq=40, Nk=40, is_causal=True, masked=False, prior="head")
    mask = torch.arange(40)[None] >= torch.tensor([9, 0])[:, None]
    inputs = case.inputs(torch.float32)
    assert_close(inputs, {"key_mask": mask, "is_causal": True})
    if variant == "smgk":
        there = {name: tensor.detach().to(DEVICE) for name, tensor in inputs.items()}
        far = operators.shifted_forward(
            there["query"], there["key"], there["shift"], there["value"], there["log_prior"], mask.to(DEVICE), None,
            None, None, None, CASE.D**0.5, False, True, *NO_MORE,
        )[-1]  # fmt: skip
        assert not far.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_query_mask_and_padding(variant: str) -> None:
    """Padded queries get zeros and zero gradients, and nothing of theirs reaches anybody else."""
    case = replace(CASE, variant=variant, B=2, Nq=50, Nk=50, masked=False)
    mask = torch.arange(50)[None] < torch.tensor([17, 50])[:, None]
    assert_close(case.inputs(torch.float32), {"key_mask": mask, "query_mask": mask})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_hidden_keys_hold_does_not_matter(variant: str, e_step: str, dtype: torch.dtype) -> None:
    """Whole tiles of them, single ones between others, and the last ones: no value of theirs reaches any number."""
    case = replace(CASE, variant=variant, e_step=e_step, B=2, H=1, Nq=33, Nk=70, masked=False)
    mask = torch.arange(70)[None] < torch.tensor([43, 70])[:, None]
    mask[1, [0, 5, 40]] = False
    mask[1, 16:33] = False
    inputs = case.inputs(dtype)
    results = []
    for content in (0.0, 3e4):
        key = inputs["key"].detach().clone()
        key.movedim(-2, 1)[~mask] = content
        results.append(run({**inputs, "key": key}, "triton", {"key_mask": mask}))
    for name, one, other in zip(["output", *inputs], *results, strict=True):
        assert other.isfinite().all(), name
        assert torch.equal(one, other), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_shows_one_mask_forward_and_backward(variant: str) -> None:
    """With the identity for values the output is the dropped weights; the gradients are those of that mask."""
    case = replace(CASE, variant=variant, masked=False, prior=None, Nq=40, Nk=40, Dv=40)
    inputs = {name: tensor.detach().to(DEVICE) for name, tensor in case.inputs(torch.float32).items()}
    inputs["value"] = torch.eye(40, device=DEVICE).expand(1, 2, 40, 40).contiguous()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    torch.manual_seed(5)
    output = attend(leaves, "triton", dropout_p=0.4)
    dense = {n: t.detach().double().cpu().requires_grad_() for n, t in inputs.items()}
    kept = (output.detach().cpu() != 0).double() / 0.6
    weights = attend(dense, "reference") * kept
    share = float((kept > 0).double().mean())
    assert abs(share - 0.6) < 5 * (0.24 / kept.numel()) ** 0.5
    assert torch.allclose(output.detach().cpu().double(), weights, atol=1e-5)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad(output, [leaves["query"], leaves["key"]], grad.to(DEVICE))
    want = torch.autograd.grad(weights, [dense["query"], dense["key"]], grad.double())
    for have, expected in zip(got, want, strict=True):
        assert torch.allclose(have.cpu().double(), expected, atol=1e-4)


@triton.jit  # type: ignore[untyped-decorator]
def dropout_kernel(SEED, OUT, threshold, size, KEYS_DOWN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    first_query, first_key = tl.program_id(0) * BM, tl.program_id(1) * BN
    drop = primitives.dropout(SEED, tl.program_id(2), first_query, first_key, threshold, 1.0, KEYS_DOWN, BM, BN)
    o_m, o_n = (first_query + tl.arange(0, BM))[:, None], (first_key + tl.arange(0, BN))[None, :]
    tl.store(OUT + (tl.program_id(2) * size + o_m) * size + o_n, tl.trans(drop) if KEYS_DOWN else drop)


def dropped(size: int, heads: int, p: float, rows: int, columns: int, keys_down: bool = False) -> Tensor:
    """(heads,size,size), 1 where a pair is dropped."""
    seed, out = torch.tensor([123456789], device=DEVICE), torch.empty(heads, size, size, device=DEVICE)
    threshold, _ = dropout_numbers(p)
    dropout_kernel[(size // rows, size // columns, heads)](seed, out, threshold, size, keys_down, rows, columns)
    return 1 - out.cpu().double()


def test_dropout_is_a_function_of_the_place() -> None:
    """Whichever tile a pair is in, and whichever way the tile lies."""
    whole = dropped(128, 2, 0.3, 128, 64)
    for rows, columns in ((64, 64), (32, 128), (16, 32), (64, 16)):
        for keys_down in (False, True):
            assert torch.equal(dropped(128, 2, 0.3, rows, columns, keys_down), whole)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropped_pairs_are_independent(p: float) -> None:
    """Rates, and products of any two of the 64 pairs that share a hash and of neighbours, within 5 standard errors."""
    size, heads = 512, 4
    drop = dropped(size, heads, p, 128, 128) - p
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(drop.mean())) < 5 * sigma / drop.numel() ** 0.5
    shape = (heads, size // 32, 4, 4, 2, size // 32, 4, 4, 2)
    blocks = drop.view(shape).permute(0, 1, 3, 5, 7, 2, 4, 6, 8).reshape(-1, 64) / sigma  # by their bits 0, 3 and 4
    together = blocks.T @ blocks / len(blocks) - torch.eye(64)
    assert float(together.fill_diagonal_(0).abs().max()) < 5 / len(blocks) ** 0.5
    for down, along in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (8, 8), (0, 32), (32, 0), (0, 64)):
        product = drop[:, down:, along:] * drop[:, : size - down, : size - along] / sigma**2
        assert abs(float(product.mean())) < 5 / product.numel() ** 0.5
    assert abs(float((drop[1:] * drop[:-1]).mean())) < 5 * sigma**2 / drop[1:].numel() ** 0.5  # heads


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_without_entries_give_no_gradient(variant: str) -> None:
    inputs = replace(CASE, variant=variant, Dv=0).inputs(torch.float32)
    output, *grads = run(inputs, "triton", {})
    assert output.shape[-1] == 0
    assert not any(grad.any() for grad in grads)


def test_strided_inputs_keep_their_layout() -> None:
    """(B,N,H,D) in memory, as projections leave it: no copy before, none after."""
    query, key, value = torch.randn(3, 2, 33, 2, 16).transpose(2, 3).to(DEVICE).unbind(0)
    shift = torch.randn(2, 2, 16, device=DEVICE)
    output = mgk.smgk_attention(query.requires_grad_(), key, shift, value, impl="triton")
    assert output.transpose(1, 2).is_contiguous()
    plain = mgk.smgk_attention(query.contiguous(), key.contiguous(), shift, value.contiguous(), impl="triton")
    assert torch.equal(output, plain)


def test_operators_pass_opcheck() -> None:
    query, value = (torch.randn(1, 2, 24, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    key = torch.randn(1, 2, 2, 24, 16, device=DEVICE, requires_grad=True)
    shift, prior = torch.randn(2, 2, 16, device=DEVICE, requires_grad=True), torch.zeros(2, 2, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    rest = (None, None, None, None, None, 4.0, False, True, 9, 0.0, 0, 0, True)
    torch.library.opcheck(
        operators.shifted_forward.op, (query, key[:, :, 0].detach(), shift, value, prior, *rest), test_utils=tests
    )
    for keys, shifts, variances in ((key, None, None), (key[:, :, 0].detach(), shift, torch.ones(2, 2, device=DEVICE))):
        inputs = query, keys, shifts, value, prior, variances, *rest
        torch.library.opcheck(operators.projected_forward.op, inputs, test_utils=tests)


def test_flop_formulas() -> None:
    query, key, value = (torch.randn(1, 2, 24, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    shift, variance = torch.randn(2, 3, 16, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    keys = torch.randn(1, 2, 3, 24, 16, device=DEVICE, requires_grad=True)
    pairs = 2 * 24 * 24
    for call, forward, backward in (
        (lambda: mgk.smgk_attention(query, key, shift, value, impl="triton"), 2 * 16, 5 * 16),
        (lambda: mgk.smgk_attention(query, key, shift, value, variance=variance, impl="triton"), 2 * 16, 5 * 16),
        (lambda: mgk.mgk_attention(query, keys, value, impl="triton"), 4 * 16, 11 * 16),
    ):
        with FlopCounterMode(display=False) as counter:
            output = call()  # type: ignore[no-untyped-call]
        assert counter.get_total_flops() == 2 * pairs * forward
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()  # type: ignore[no-untyped-call]
        assert counter.get_total_flops() == 2 * pairs * backward


def test_named_implementation_says_what_it_cannot_do() -> None:
    wide = torch.randn(1, 1, 2, 257, device=DEVICE)
    with pytest.raises(ValueError, match="up to 256"):
        mgk.mgk_attention(wide, wide[:, :, None], wide, impl="triton")
    double = torch.randn(1, 1, 2, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(TypeError, match="query: expected bfloat16"):
        mgk.mgk_attention(double, double[:, :, None], double, impl="triton")
