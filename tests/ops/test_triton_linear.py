"""Linear-attention kernels against the reference in float64, in Triton's interpreter if there is no GPU.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import FlopCounterMode

from mgk.ops import cost, linear
from mgk.ops.feature_maps import elu
from mgk.ops.linear import linear_attention, mlk_attention, smlk_attention
from tests.ops.common import VARIANTS, Case, Inputs, cases, pick_keys, pick_queries
from tests.ops.linear_kernels import (
    DTYPES,
    SMALL_TILE,
    assert_rounded,
    incoming,
    leaves_of,
    numbers,
    size_of_output,
    sizes_of_terms,
)
from tests.ops.triton_env import DEVICE, assert_graph_follows, strict_memory

# isort: split
from mgk.ops.triton import linear as kernels

# A query without visible keys divides by zero before it gets zeros; numpy, used by the interpreter, warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CASE = Case(
    B=1, H=2, M=2, Nq=21, Nk=37, D=20, Dv=12, prior="head", seed=3
)  # "smgk": shifted keys, "mgk": projected keys
PLAIN = replace(CASE, variant="mgk", M=1, prior=None)
PACKED = replace(CASE, Nq=40, Nk=40, prior="position")
CU_SEQLENS = torch.tensor([[0, 17, 38], [0, 5, 40]], dtype=torch.int32)
MAX_SEQLEN = 40  # for all packed sequences

default_tile = kernels.tile
SIZE_OF_OUTPUT = partial(size_of_output, is_causal=False)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Make small inputs span several splits of several tiles, and fill fresh memory with NaN."""
    with pytest.MonkeyPatch.context() as patch, strict_memory():
        patch.setattr(kernels, "tile", lambda *_: SMALL_TILE)
        patch.setattr(kernels, "PROGRAMS", 4)
        yield


def attend(inputs: Inputs, impl: str, key_mask: Tensor | None = None, **options: Any) -> Tensor:
    function: Callable[..., Tensor] = smlk_attention if "shift" in inputs else mlk_attention
    return function(**inputs, key_mask=key_mask, impl=impl, **options)


def attend_packed(inputs: Inputs, impl: str, cu_seqlens: Tensor) -> Tensor:
    if impl == "reference":
        return one_by_one(partial(attend, impl=impl), inputs, cu_seqlens)
    shift, prior = inputs.get("shift"), inputs.get("log_prior")
    return kernels.linear_attention(
        inputs["query"], inputs["key"], shift, inputs["value"], prior, None, cu_seqlens, MAX_SEQLEN
    )


def one_by_one(function: Callable[[Inputs], Tensor], inputs: Inputs, cu_seqlens: Tensor) -> Tensor:
    """Apply `function` to each sequence alone and pack the results, followed by zeros."""
    results = []
    for first, last in pairwise(cu_seqlens.tolist()):
        rows = slice(first, last)
        alone = pick_queries(pick_keys(inputs, rows), rows)
        if "log_prior" in inputs and inputs["log_prior"].dim() == 3:
            alone["log_prior"] = inputs["log_prior"][..., : last - first]
        results.append(function(alone))
    return pad(torch.cat(results, 2), (0, 0, 0, inputs["query"].shape[2] - int(cu_seqlens[-1])))


def run(
    inputs: Inputs,
    impl: str,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return output and gradients, on the CPU in float64."""
    device = DEVICE if impl == "triton" else "cpu"
    leaves = {name: tensor.detach().to(device).requires_grad_() for name, tensor in inputs.items()}
    if cu_seqlens is None:
        output = attend(leaves, impl, None if mask is None else mask.to(device))
    else:
        output = attend_packed(leaves, impl, cu_seqlens.to(device))
    grad = incoming(output, dtype or output.dtype)
    results = output, *torch.autograd.grad(output, list(leaves.values()), grad)
    return {name: x.detach().cpu().double() for name, x in zip(["output", *inputs], results, strict=True)}


def assert_right(inputs: Inputs, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
    """Compare the kernels with the reference in float64 and return what the kernels computed."""
    exact = run({name: x.double() for name, x in inputs.items()}, "reference", mask, inputs["query"].dtype, cu_seqlens)
    leaves, size = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}, SIZE_OF_OUTPUT
    output = size(leaves, mask) if cu_seqlens is None else one_by_one(size, leaves, cu_seqlens)
    return assert_rounded(
        run(inputs, "triton", mask, cu_seqlens=cu_seqlens), exact, sizes_of_terms(output, leaves), inputs
    )


@settings(max_examples=8)
@given(
    case=cases(
        Nq=st.integers(1, 40), Nk=st.integers(1, 40), D=st.integers(1, 20), Dv=st.integers(1, 20), variance=None,
        e_step="soft", is_causal=False,
    )
)  # fmt: skip
def test_agrees_with_the_reference(case: Case) -> None:
    assert_right(numbers(case), case.key_mask())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        replace(CASE, variant="mgk", M=3, prior="position", D=9, Dv=33),
        replace(CASE, M=2, Nq=37, Nk=21, D=33, Dv=16),
        replace(CASE, M=4, prior="position", masked=True),
    ],
    ids=["linear", "projected", "shifted", "masked"],
)
def test_every_precision(case: Case, dtype: torch.dtype) -> None:
    assert_right(numbers(case, dtype), case.key_mask())


def test_products_in_tf32_where_the_user_allows_them() -> None:
    """Float32 products then have eleven bits. They are exact otherwise, which `assert_right` checks."""
    inputs = numbers(CASE)
    torch.set_float32_matmul_precision("high")
    try:
        got = run(inputs, "triton")["output"]
    finally:
        torch.set_float32_matmul_precision("highest")
    want = run({name: tensor.double() for name, tensor in inputs.items()}, "reference")["output"]
    assert 2**-14 < float((got - want).norm() / want.norm()) < 4 * 2**-11


@pytest.mark.parametrize("width", [32, 64, 128])
def test_default_tiles(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests use smaller tiles."""
    monkeypatch.setattr(kernels, "tile", default_tile)
    case = replace(CASE, B=1, H=1, Nq=70, Nk=70, D=width, Dv=width)
    assert_right(numbers(case, torch.bfloat16))


@pytest.mark.parametrize("programs", [1, 10**6])
def test_splits_are_joined(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, and one for every tile, with exponents that differ between splits."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    inputs = numbers(CASE)
    inputs["key"] -= torch.linspace(0, 200, CASE.Nk)[:, None]
    assert_right(inputs)


def test_the_number_of_splits() -> None:
    assert kernels.split(0, 16, 4, False) == (1, 0)
    assert kernels.split(53, 16, 2, False) == (2, 2)  # four programs are enough
    assert kernels.split(53, 16, 1, False) == (4, 1)
    assert kernels.split(53, 16, 100, False) == (1, 4)
    assert kernels.split(16 * 9, 16, 1, False) == (3, 3)  # no split is left without a tile
    assert kernels.split(53, 16, 4, True) == (4, 1)  # packed sequences are shorter than the longest one


BATCH = replace(CASE, B=2, H=1, prior="position")
MASKS = {
    "padding": torch.arange(37)[None] < torch.tensor([9, 37])[:, None],
    "holes": torch.arange(74).view(2, 37) % 3 > 0,
    "a tile": (torch.arange(37)[None] // 16 != torch.tensor([1, 0])[:, None]),
    "left": torch.arange(37)[None] >= torch.tensor([33, 3])[:, None],
    "everything": torch.arange(37)[None].expand(2, 37) < torch.tensor([0, 20])[:, None],
}


@pytest.mark.parametrize(
    ("variant", "mask"), [*(("smgk", mask) for mask in MASKS), ("mgk", "padding"), ("mgk", "everything")]
)
def test_masks(variant: str, mask: str) -> None:
    got, hidden = assert_right(numbers(replace(BATCH, variant=variant)), MASKS[mask]), ~MASKS[mask]
    assert not got["key"].movedim(-2, 1)[hidden].any()
    assert not got["value"].movedim(-2, 1)[hidden].any()
    assert not got["output"][hidden.all(1)].any()
    assert not got["query"][hidden.all(1)].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_keys_are_not_read(variant: str) -> None:
    inputs, mask, results = numbers(replace(BATCH, variant=variant)), MASKS["holes"] & MASKS["padding"], []
    for content in (0.0, torch.nan):
        changed = {name: inputs[name].clone() for name in ("key", "value")}
        for tensor in changed.values():
            tensor.movedim(-2, 1)[~mask] = content
        results.append(run({**inputs, **changed}, "triton", mask))
    for name, one in results[0].items():
        assert torch.equal(one, results[1][name]), name


@pytest.mark.parametrize(("variant", "dtype"), [("mgk", torch.bfloat16), ("smgk", torch.float32)])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 300.0])
def test_every_range_of_numbers(scale: float, variant: str, dtype: torch.dtype) -> None:
    assert_right(numbers(replace(BATCH, variant=variant), dtype, scale), MASKS["padding"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_that_are_zero_for_all_keys(dtype: torch.dtype) -> None:
    """Entries of -1e4 in one feature of all keys, and in all of one head: exp(-1e4) is zero, but their ratios count."""
    inputs = numbers(replace(CASE, variant="mgk"), dtype)
    inputs["key"][:, 0, ..., 3] = -1e4
    inputs["key"][:, 1] -= 1e4
    inputs["query"][:, 1, ::2] -= 1e4
    assert_right(inputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_priors_of_any_size(variant: str) -> None:
    """From e^-400 to e^400, and zero for a component, a position or a head."""
    inputs = numbers(replace(CASE, variant=variant, prior="position"))
    inputs["log_prior"] += torch.linspace(-400, 400, CASE.Nk)
    assert_right(inputs)
    inputs = numbers(replace(CASE, variant=variant, prior="position"))
    inputs["log_prior"][:, 0, ::3] = -torch.inf
    inputs["log_prior"][:, :, ::4] = -torch.inf
    inputs["log_prior"][1] = -torch.inf
    assert not assert_right(inputs)["output"][:, 1].any()


@pytest.mark.parametrize("sizes", [{"Nq": 0}, {"Nk": 0}, {"Nq": 0, "Nk": 0}, {"B": 0}, {"Dv": 0}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_inputs_give_zeros_and_zero_gradients(variant: str, sizes: dict[str, int]) -> None:
    case = replace(CASE, variant=variant, prior="position", **sizes)  # type: ignore[arg-type]
    for name, tensor in run(numbers(case), "triton", torch.ones(case.B, case.Nk, dtype=torch.bool)).items():
        assert (tensor == 0).all(), name


def test_nan_in_a_query_reaches_the_output() -> None:
    inputs = numbers(CASE, torch.bfloat16)
    inputs["query"][0, 0, 5, 2] = torch.nan
    output = run(inputs, "triton")["output"]
    assert output[0, 0, 5].isnan().all()
    assert not output[0, 0, :5].isnan().any()


def test_strided_inputs_keep_their_layout() -> None:
    """(B,N,H,D) in memory, as projections write it: nothing is copied."""
    query, key, value = torch.randn(3, 2, 33, 2, 16).transpose(2, 3).to(DEVICE).unbind(0)
    results = []
    for inputs in ((query, key, value), tuple(x.contiguous() for x in (query, key, value))):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = linear_attention(*leaves, impl="triton")
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(x.transpose(1, 2).is_contiguous() for x in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    columns = query.mT.contiguous().mT  # not even rows are contiguous
    assert torch.equal(linear_attention(columns, key, value, impl="triton"), results[0][0])


def test_results_are_deterministic() -> None:
    inputs = numbers(replace(BATCH, variant="mgk"), torch.bfloat16)
    one, other = (run(inputs, "triton", MASKS["holes"]) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_linear_attention_is_one_component() -> None:
    inputs = numbers(PLAIN)
    there = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    output = attend(there, "triton")
    for feature_map in ("elu", elu):
        single = linear_attention(
            there["query"], there["key"][:, :, 0], there["value"], feature_map=feature_map, impl="triton"
        )
        assert torch.equal(single, output)


def packed(case: Case, dtype: torch.dtype, lengths: tuple[int, ...], spare: int) -> tuple[Inputs, Tensor]:
    """Return sequences followed by `spare` rows of NaN, and cu_seqlens; priors have at least MAX_SEQLEN positions."""
    rows, cu_seqlens = sum(lengths) + spare, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    inputs = numbers(replace(case, B=1, Nq=rows, Nk=max(rows, MAX_SEQLEN)), dtype)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name][..., :rows, :]
        inputs[name][..., sum(lengths) :, :] = torch.nan
    return inputs, cu_seqlens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [PLAIN, replace(CASE, variant="mgk", M=3, prior="position", D=9), CASE, replace(CASE, prior="position", Dv=33)],
    ids=["linear", "projected", "shifted", "shifted, position"],
)
def test_packed_rows(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third sequence has three tiles in two splits; the others have one tile at most."""
    monkeypatch.setattr(kernels, "PROGRAMS", 16)
    inputs, cu_seqlens = packed(case, dtype, (5, 0, 37, 1), spare=3)
    got = assert_right(inputs, cu_seqlens=cu_seqlens)
    assert not any(got[name][..., 43:, :].any() for name in ("output", "query", "key", "value"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_without_spare_ones(variant: str) -> None:
    inputs, cu_seqlens = packed(replace(CASE, variant=variant), torch.float32, (17, MAX_SEQLEN), spare=0)
    assert_right(inputs, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(("lengths", "spare"), [((0, 0), 3), ((0, 0), 0), ((), 3)])
def test_packed_rows_of_no_sequence_are_zero(lengths: tuple[int, ...], spare: int) -> None:
    inputs, cu_seqlens = packed(replace(CASE, prior="position"), torch.float32, lengths, spare)
    for name, tensor in run(inputs, "triton", cu_seqlens=cu_seqlens).items():
        assert (tensor == 0).all(), name


def test_packed_rows_are_not_copied() -> None:
    """Queries, keys and values side by side, as one projection writes them: nothing is copied."""
    rows, cu_seqlens = torch.randn(40, 3, 2, 16, device=DEVICE), CU_SEQLENS[0].to(DEVICE)
    views, results = rows.permute(1, 2, 0, 3)[:, None].unbind(0), []  # (1,H,T,D)
    for inputs in (views, [x.contiguous() for x in views]):
        leaves = [x.detach().requires_grad_() for x in inputs]
        query, key, value = leaves
        output = kernels.linear_attention(query, key[:, :, None], None, value, None, None, cu_seqlens, 21)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(x.transpose(1, 2).is_contiguous() for x in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_pass_opcheck(variant: str, is_packed: bool) -> None:
    inputs = leaves_of(replace(PACKED, variant=variant))
    mask = None if is_packed else torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    cu_seqlens = CU_SEQLENS[0].to(DEVICE) if is_packed else None
    arguments = *(inputs.get(name) for name in ("query", "key", "shift", "value", "log_prior")), mask, cu_seqlens
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels.linear_forward.op, (*arguments, MAX_SEQLEN), test_utils=tests)
    output, state = kernels.linear_forward(*arguments, MAX_SEQLEN)
    detached = [None if x is None else x.detach() for x in (output, *arguments, state)]
    torch.library.opcheck(kernels.linear_backward.op, (*detached, MAX_SEQLEN), test_utils=tests)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile loads torch.jit on a GPU
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_compiles_as_one_graph(is_packed: bool) -> None:
    torch.compiler.reset()
    plain: Callable[..., Tensor] = attend_packed if is_packed else attend
    inputs, places = (leaves_of(PACKED), CU_SEQLENS[0]) if is_packed else (leaves_of(BATCH), MASKS["padding"])
    results = []
    for function in (torch.compile(plain, fullgraph=True, backend="aot_eager"), plain):
        output = function(inputs, "triton", places.to(DEVICE))
        results.append([output, *torch.autograd.grad(output.square().sum(), list(inputs.values()))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_autocast_changes_nothing() -> None:
    inputs = {name: tensor.detach() for name, tensor in leaves_of(CASE).items()}
    with torch.autocast(DEVICE, torch.bfloat16):
        inside = attend(inputs, "triton")
    assert torch.equal(inside, attend(inputs, "triton"))


@pytest.mark.parametrize("variant", ["linear", "mlk", "smlk"])
def test_flops_are_those_of_the_formula(variant: str) -> None:
    case = replace(CASE, variant="smgk" if variant == "smlk" else "mgk", M=1 if variant == "linear" else 2)
    inputs = leaves_of(case)
    counts = []
    with FlopCounterMode(display=False) as counter:
        output = attend(inputs, "triton")
    counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()  # type: ignore[no-untyped-call]
    counts.append(counter.get_total_flops())
    expected = cost.attention_flops(
        cost.Dimensions(
            variant=variant, heads=case.H, head_dim=case.D, value_dim=case.Dv, queries=case.Nq, keys=case.Nk,
            batch=case.B, components=case.M,
        )
    )  # fmt: skip
    assert counts == [expected.forward, expected.backward]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_a_cuda_graph_captures_it(is_packed: bool) -> None:
    """A replay uses the lengths and masks that its tensors hold then."""
    inputs = leaves_of(PACKED if is_packed else BATCH, torch.bfloat16)
    places, others = (x.to(DEVICE) for x in (CU_SEQLENS if is_packed else (MASKS["padding"], MASKS["left"])))

    def step() -> list[Tensor]:
        output = attend_packed(inputs, "triton", places) if is_packed else attend(inputs, "auto", places)
        grads = torch.autograd.grad(output.float().square().sum(), list(inputs.values()))
        return [output.detach(), *grads]  # autograd's graph belongs to a stream and must not outlive it

    assert_graph_follows(step, lambda: places.copy_(others))


class FakeCuda:
    """The attributes of a CUDA tensor that decide which implementation is used."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), tensor.dtype, tensor.shape


def test_errors_name_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: tensor.detach() for name, tensor in leaves_of(PLAIN).items()}
    wide = torch.randn(1, 1, 1, 2, 129, device=DEVICE)
    with pytest.raises(ValueError, match=r"'triton' needs head widths D and Dv up to 128.*, got 129 and 129"):
        mlk_attention(wide[:, :, 0], wide, wide[:, :, 0], impl="triton")
    with pytest.raises(ValueError, match=r"'triton' has only the feature map 'elu' where is_causal=False, got dpfp"):
        attend(inputs, "triton", feature_map="dpfp")
    with pytest.raises(ValueError, match=r"'triton' needs float32 or half on CUDA, got torch.float64 on"):
        attend({name: tensor.double() for name, tensor in inputs.items()}, "triton")
    monkeypatch.setattr(linear, "HAS_TRITON", False)
    with pytest.raises(ImportError, match=r"'triton' needs Triton, which is not installed: pip install 'mgk\[gpu\]'"):
        attend(inputs, "triton")
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' needs float32 or half on CUDA, got torch.float32 on cpu"):
        attend({name: tensor.cpu() for name, tensor in inputs.items()}, "triton")


def test_auto_uses_the_kernels_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = numbers(PLAIN)
    on_gpu: Any = FakeCuda(inputs["query"])
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(linear, "capability", lambda device: (9, 0))
    assert linear._kernel_obstacle(on_gpu, inputs["value"], elu) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "linear_attention", lambda *_: pytest.fail("on a CPU"))
    assert torch.equal(attend(inputs, "auto"), attend(inputs, "blockwise"))
