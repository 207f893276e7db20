"""Causal linear-attention kernels against the reference in float64, in Triton's interpreter if there is no GPU.

B batch, H heads, M components, N positions, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mgk.ops import cost, dispatch, linear
from mgk.ops.feature_maps import elu
from mgk.ops.linear import linear_attention, mlk_attention, smlk_attention
from tests.ops.common import VARIANTS, Case, Inputs
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
from mgk.ops.triton import scan as kernels

# A query without visible keys divides by zero before it gets zeros; numpy, used by the interpreter, warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

N = 37  # two tiles and five positions
CASE = Case(B=1, H=2, M=2, Nq=N, Nk=N, D=20, Dv=12, prior="head", seed=3)  # "smgk": shifted keys, "mgk": projected keys
PLAIN = replace(CASE, variant="mgk", M=1, prior=None)
BATCH = replace(CASE, B=2, H=1, prior="position")
NO_HEADROOM = -100  # bits: every tile takes the fallback path

default_tile = kernels.tile


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Make small inputs span several tiles, and fill fresh memory with NaN."""
    with pytest.MonkeyPatch.context() as patch, strict_memory():
        patch.setattr(kernels, "tile", lambda *_: SMALL_TILE)
        yield


def attend(inputs: Inputs, impl: str, key_mask: Tensor | None = None, **options: Any) -> Tensor:
    function: Callable[..., Tensor] = smlk_attention if "shift" in inputs else mlk_attention
    return function(**inputs, key_mask=key_mask, is_causal=True, impl=impl, **options)


def run(inputs: Inputs, impl: str, mask: Tensor | None = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return output and gradients, on the CPU in float64."""
    device = DEVICE if impl == "triton" else "cpu"
    leaves = {name: tensor.detach().to(device).requires_grad_() for name, tensor in inputs.items()}
    output = attend(leaves, impl, None if mask is None else mask.to(device))
    results = output, *torch.autograd.grad(output, list(leaves.values()), incoming(output, dtype or output.dtype))
    return {name: x.detach().cpu().double() for name, x in zip(["output", *inputs], results, strict=True)}


def assert_right(inputs: Inputs, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Compare the kernels with the reference in float64 and return what the kernels computed."""
    exact = run({name: x.double() for name, x in inputs.items()}, "reference", mask, inputs["query"].dtype)
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    sizes = sizes_of_terms(size_of_output(leaves, mask, is_causal=True), leaves)
    return assert_rounded(run(inputs, "triton", mask), exact, sizes, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        replace(CASE, variant="mgk", M=3, prior="position", D=9, Dv=33),
        replace(CASE, D=33, Dv=16, Nq=16, Nk=16),
        replace(CASE, M=4, prior="position", masked=True),
        replace(CASE, variant="mgk", prior=None, D=1, Dv=1, Nq=17, Nk=17),
    ],
    ids=["linear", "projected", "shifted", "masked", "narrow"],
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


@pytest.mark.parametrize("width", [16, 64, 128])
def test_default_tiles(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests use smaller tiles."""
    monkeypatch.setattr(kernels, "tile", default_tile)
    assert_right(numbers(replace(CASE, H=1, Nq=70, Nk=70, D=width, Dv=width), torch.bfloat16))


MASKS = {
    "padding": torch.arange(N)[None] < torch.tensor([9, N])[:, None],
    "holes": torch.arange(2 * N).view(2, N) % 3 > 0,
    "a tile": (torch.arange(N)[None] // 16 != torch.tensor([1, 0])[:, None]),
    "left": torch.arange(N)[None] >= torch.tensor([33, 3])[:, None],
    "everything": torch.arange(N)[None].expand(2, N) < torch.tensor([0, 20])[:, None],
}


@pytest.mark.parametrize(
    ("variant", "mask", "headroom"),
    [
        *(("smgk", mask, kernels.HEADROOM) for mask in MASKS),
        ("mgk", "everything", kernels.HEADROOM),
        ("mgk", "left", NO_HEADROOM),
        ("smgk", "holes", NO_HEADROOM),
    ],
)
def test_masks(variant: str, mask: str, headroom: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEADROOM", headroom)
    got, hidden = assert_right(numbers(replace(BATCH, variant=variant)), MASKS[mask]), ~MASKS[mask]
    assert not got["key"].movedim(-2, 1)[hidden].any()
    assert not got["value"].movedim(-2, 1)[hidden].any()
    blind = ~MASKS[mask].cummax(1).values
    assert not got["output"].movedim(-2, 1)[blind].any()
    assert not got["query"].movedim(-2, 1)[blind].any()


@pytest.mark.parametrize(
    ("variant", "headroom"), [("mgk", kernels.HEADROOM), ("smgk", kernels.HEADROOM), ("mgk", NO_HEADROOM)]
)
def test_masked_keys_are_not_read(variant: str, headroom: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEADROOM", headroom)
    inputs, mask, results = numbers(replace(BATCH, variant=variant)), MASKS["holes"] & MASKS["padding"], []
    for content in (0.0, torch.nan):
        changed = {name: inputs[name].clone() for name in ("key", "value")}
        for tensor in changed.values():
            tensor.movedim(-2, 1)[~mask] = content
        results.append(run({**inputs, **changed}, "triton", mask))
    for name, one in results[0].items():
        assert torch.equal(one, results[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [replace(PLAIN, H=1), replace(CASE, variant="mgk", H=1, M=3, prior="position", Nq=20, Nk=20), replace(CASE, H=1)],
    ids=["linear", "projected", "shifted"],
)
def test_the_fallback_path(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced, for numbers that do not need it."""
    monkeypatch.setattr(kernels, "HEADROOM", NO_HEADROOM)
    assert_right(numbers(case, dtype))


@pytest.mark.parametrize(("variant", "dtype"), [("mgk", torch.bfloat16), ("smgk", torch.float32)])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 300.0])
def test_every_range_of_numbers(scale: float, variant: str, dtype: torch.dtype) -> None:
    assert_right(numbers(replace(BATCH, variant=variant), dtype, scale), MASKS["padding"])


CHANGES = {
    "rising": torch.linspace(-900, 0, N),
    "falling": torch.linspace(0, -900, N),
    "late": torch.tensor([-1e3] * 24 + [0.0] * (N - 24)),  # in the middle of a tile
    "in turn": torch.tensor([-1e3, 0.0, -50.0, 1e4]).repeat(10)[:N],
    "a little": torch.linspace(-45, 0, 16).repeat(3)[:N],  # near the limit, on both sides of it
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("variant", "dtype"), [("mgk", torch.bfloat16), ("smgk", torch.float32)])
def test_keys_that_change_within_a_tile(variant: str, dtype: torch.dtype, change: str) -> None:
    """What a query sees may be negligible for the next query."""
    inputs = numbers(replace(CASE, variant=variant, H=1), dtype)
    inputs["key"] += CHANGES[change][:, None].to(dtype)
    assert_right(inputs)


@pytest.mark.parametrize("size", [-1e3, 1e4])
def test_queries_that_change(size: float) -> None:
    inputs = numbers(replace(CASE, variant="mgk", H=1))
    inputs["query"][:, :, ::3, ::2] += size
    inputs["key"][..., 1::2, 1::2] -= 1e3
    assert_right(inputs)


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
    inputs["log_prior"] += torch.linspace(-400, 400, N)
    assert_right(inputs)
    inputs = numbers(replace(CASE, variant=variant, prior="position"))
    inputs["log_prior"][:, 0, ::3] = -torch.inf
    inputs["log_prior"][:, :, ::4] = -torch.inf
    inputs["log_prior"][1] = -torch.inf
    got = assert_right(inputs)["output"]
    assert not got[:, 1].any()
    assert not got[:, :, 0].any()


@pytest.mark.parametrize("sizes", [{"Nq": 0, "Nk": 0}, {"B": 0}, {"Dv": 0}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_inputs_give_zeros_and_zero_gradients(variant: str, sizes: dict[str, int]) -> None:
    case = replace(CASE, variant=variant, prior="position", **sizes)  # type: ignore[arg-type]
    for name, tensor in run(numbers(case), "triton", torch.ones(case.B, case.Nk, dtype=torch.bool)).items():
        assert (tensor == 0).all(), name


def test_one_position_is_its_value() -> None:
    inputs = numbers(replace(CASE, Nq=1, Nk=1))
    torch.testing.assert_close(assert_right(inputs)["output"], inputs["value"].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # numpy again
@pytest.mark.parametrize("name", ["query", "key"])
def test_nan_reaches_the_output_but_no_earlier_position(name: str) -> None:
    inputs = numbers(CASE, torch.bfloat16)
    before = run(inputs, "triton")["output"]
    inputs[name][0, 0, 20, 2] = torch.nan
    output = run(inputs, "triton")["output"]
    assert output[0, 0, 20].isnan().all()
    assert torch.equal(output[0, 0, :20], before[0, 0, :20])
    assert torch.equal(output[0, 1], before[0, 1])


def test_strided_inputs_keep_their_layout() -> None:
    """(B,N,H,D) in memory, as projections write it: nothing is copied."""
    query, key, value = torch.randn(3, 2, 33, 2, 16).transpose(2, 3).to(DEVICE).unbind(0)
    results = []
    for inputs in ((query, key, value), tuple(x.contiguous() for x in (query, key, value))):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = linear_attention(*leaves, is_causal=True, impl="triton")
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(x.transpose(1, 2).is_contiguous() for x in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    columns = query.mT.contiguous().mT  # not even rows are contiguous
    assert torch.equal(linear_attention(columns, key, value, is_causal=True, impl="triton"), results[0][0])


def test_results_are_deterministic() -> None:
    inputs = numbers(replace(BATCH, variant="mgk"), torch.bfloat16)
    one, other = (run(inputs, "triton", MASKS["holes"]) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_pass_opcheck(variant: str) -> None:
    inputs = leaves_of(replace(BATCH, variant=variant))
    mask = MASKS["padding"].to(DEVICE)
    arguments = *(inputs.get(name) for name in ("query", "key", "shift", "value", "log_prior")), mask
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels.scan_forward.op, arguments, test_utils=tests)
    detached = [None if x is None else x.detach() for x in (kernels.scan_forward(*arguments), *arguments)]
    torch.library.opcheck(kernels.scan_backward.op, tuple(detached), test_utils=tests)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile loads torch.jit on a GPU
def test_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    inputs, results = leaves_of(BATCH), []
    for function in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
        output = function(inputs, "triton", MASKS["padding"].to(DEVICE))
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
    case = replace(case, H=1, Nq=130, Nk=130)  # more than a chunk
    inputs, counts = leaves_of(case), []
    with FlopCounterMode(display=False) as counter:
        output = attend(inputs, "triton")
    counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()  # type: ignore[no-untyped-call]
    counts.append(counter.get_total_flops())
    expected = cost.attention_flops(
        cost.Dimensions(
            variant=variant, heads=case.H, head_dim=case.D, value_dim=case.Dv, queries=case.Nq, keys=case.Nk,
            batch=case.B, components=case.M, causal=True,
        )
    )  # fmt: skip
    assert counts == [expected.forward, expected.backward]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_graph_captures_it() -> None:
    """A replay takes the path, fast or fallback, that its numbers need."""
    inputs, places = leaves_of(BATCH, torch.bfloat16), MASKS["padding"].to(DEVICE)

    def step() -> list[Tensor]:
        output = attend(inputs, "auto", places)
        grads = torch.autograd.grad(output.float().square().sum(), list(inputs.values()))
        return [output.detach(), *grads]  # autograd's graph belongs to a stream and must not outlive it

    def change() -> None:
        places.copy_(MASKS["left"])
        with torch.no_grad():
            inputs["key"] += CHANGES["rising"][:, None].to(inputs["key"])

    assert_graph_follows(step, change)


def test_errors_name_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "HAS_FLA", False)
    inputs = {name: tensor.detach() for name, tensor in leaves_of(PLAIN).items()}
    wide = torch.randn(1, 1, 1, 2, 129, device=DEVICE)
    with pytest.raises(ValueError, match=r"'triton' needs head widths D and Dv up to 128 without fla-core, got 129"):
        mlk_attention(wide[:, :, 0], wide, wide[:, :, 0], is_causal=True, impl="triton")
    with pytest.raises(ValueError, match=r"'triton' has only the feature map 'elu' without fla-core, got dpfp"):
        attend(inputs, "triton", feature_map="dpfp")
    with pytest.raises(ValueError, match=r"'triton' needs float32 or half on CUDA, got torch.float64 on"):
        attend({name: tensor.double() for name, tensor in inputs.items()}, "triton")
    with pytest.raises(ValueError, match=r"'triton' scans with Nq = Nk where is_causal=True, got Nq = 5, Nk = 37"):
        attend({**inputs, "query": inputs["query"][:, :, :5]}, "triton")
    monkeypatch.setattr(linear, "HAS_TRITON", False)
    with pytest.raises(ImportError, match=r"'triton' needs Triton, which is not installed: pip install 'mgk\[gpu\]'"):
        attend(inputs, "triton")


class FakeCuda:
    """The attributes of a CUDA tensor that decide which implementation is used."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), dtype, torch.Size(shape)


def test_which_implementation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def path(positions: int = 64, impl: str = "auto", phi: Any = elu, **options: Any) -> str | None:
        tensor: Any = FakeCuda(1, 1, positions, 8, **options)
        return linear._gpu_path(tensor, tensor, tensor, phi, True, impl)

    long = dispatch.LONG_SCAN + 1
    monkeypatch.setattr(linear, "capability", lambda device: (9, 0))
    monkeypatch.setattr(linear, "HAS_FLA", False)
    assert [path(), path(long), path(impl="triton")] == ["kernels"] * 3
    assert [path(impl="blockwise"), path(impl="reference"), path(phi=None), path(dtype=torch.float64)] == [None] * 4
    monkeypatch.setattr(linear, "HAS_FLA", True)
    assert [path(), path(long), path(long, impl="triton")] == ["kernels", "fla", "kernels"]
    assert [path(phi=None), path(phi=None, impl="triton")] == ["fla", "fla"]
    exact = torch.float32  # fla-core would take TF32, which is not allowed
    assert [path(long, dtype=exact), path(phi=None, dtype=exact)] == ["kernels", None]
    assert path(phi=None, dtype=exact, impl="triton") == "fla"


def test_auto_uses_the_kernels_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = numbers(PLAIN)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "scan_attention", lambda *_: pytest.fail("on a CPU"))
    assert torch.equal(attend(inputs, "auto"), attend(inputs, "blockwise"))
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"'triton' needs float32 or half on CUDA, got torch.float32 on cpu"):
        attend(inputs, "triton")
