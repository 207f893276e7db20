"""The linear family: the choice of an implementation, and wrong arguments one by one.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.ops import linear, linear_forms
from mgk.ops.linear import LinearState, linear_attention, linear_step, mlk_attention, smlk_attention
from tests.ops.linear_cases import agree, gradients, inputs, numbers


def fake_fla(monkeypatch: pytest.MonkeyPatch, chunk_gla: Callable[..., Any] | None) -> None:
    """Put a module in the place of fla-core; None is fla-core that cannot be imported."""
    module = ModuleType("fla.ops.gla")
    if chunk_gla is not None:
        module.chunk_gla = chunk_gla  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops", "fla.ops.gla"):
        monkeypatch.setitem(sys.modules, name, module if chunk_gla is not None else None)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_scan_handed_to_fla_is_the_chunked_form(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the recurrence that fla-core documents: S = exp(g_t) S + k_t v_t^T, o_t = scale q_t S, all (B,N,H,.)."""

    def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float) -> tuple[Tensor, None]:
        assert all(x.is_contiguous() for x in (q, k, v, g))
        assert bool((g <= 0).all())
        state, outputs = torch.zeros(()), []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, :, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append(scale * (q[:, t, :, None] @ state).squeeze(-2))
        return torch.stack(outputs, 1), None

    fake_fla(monkeypatch, chunk_gla)
    monkeypatch.setattr(linear, "_fla_obstacle", lambda *_: None)
    monkeypatch.setattr(linear_forms, "NEGLIGIBLE", -700.0)  # of float64, which these gradients are compared in
    arguments, mask = inputs(Nq=40, Nk=40, scale=scale), numbers(2, 40) > -0.5
    mask[0, :5] = False
    got, expected = (
        mlk_attention(**arguments, is_causal=True, key_mask=mask, impl=impl) for impl in ("triton", "blockwise")
    )
    agree([got], [expected], 1e-8)
    for one, other in zip(gradients(got, arguments), gradients(expected, arguments), strict=True):
        assert (one - other).abs().max() <= 1e-8 * (1 + other.abs().max())


def test_fla_asked_for_by_name_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    arguments = {name: x.detach().float() for name, x in inputs(Nq=7).items()}
    with pytest.raises(ValueError, match=r"impl: 'triton' needs float32 or half on CUDA, got torch.float32 on cpu"):
        mlk_attention(**arguments, is_causal=True, impl="triton")
    on_gpu = FakeCuda(arguments["query"])
    monkeypatch.setattr(linear, "HAS_FLA", True)
    refused = linear._fla_obstacle(on_gpu, arguments["key"][..., :5, :])  # type: ignore[arg-type]
    assert isinstance(refused, ValueError)
    assert "scans with Nq = Nk where is_causal=True, got Nq = 7, Nk = 5" in str(refused)
    monkeypatch.setattr(linear, "HAS_FLA", False)
    absent = linear._fla_obstacle(on_gpu, arguments["key"])  # type: ignore[arg-type]
    assert isinstance(absent, ImportError)
    assert "fla-core here, which is not installed: pip install 'mgk[fla]'" in str(absent)
    monkeypatch.setattr(linear, "HAS_FLA", True)
    assert linear._fla_obstacle(on_gpu, arguments["key"]) is None  # type: ignore[arg-type]


class FakeCuda:
    """What `_fla_obstacle` looks at of a query on CUDA."""

    def __init__(self, query: Tensor) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), query.dtype, query.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fla-core's, about torch.jit,
@pytest.mark.filterwarnings("ignore::ImportWarning")  # and about flash-attn, which it can do without
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_fla_agrees_on_cuda(dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 has 11 bits: 2^-11 for each of the two products behind a sum, and for each of the two sums of a quotient."""
    pytest.importorskip("fla")
    monkeypatch.setattr(linear, "_kernel_obstacle", lambda *_: ValueError("not these"))
    leaves = inputs(Nq=200, Nk=200, D=32, Dv=32, scale=scale)
    low = {name: x.detach().to("cuda", dtype).requires_grad_() for name, x in leaves.items()}
    high = {name: x.detach().double().requires_grad_() for name, x in low.items()}
    got, expected = (
        mlk_attention(**arguments, is_causal=True, impl=impl)
        for arguments, impl in ((low, "triton"), (high, "blockwise"))
    )
    bound = 4 * 2**-11 + torch.finfo(dtype).eps
    assert (got.double() - expected).abs().max() <= bound * expected.abs().max()
    (grad,) = torch.autograd.grad(got.sum(), low["value"])
    (wanted,) = torch.autograd.grad(expected.sum(), high["value"])
    assert (grad.double() - wanted).abs().max() <= bound * wanted.abs().max()


GOOD = {name: x.detach().float() for name, x in inputs().items()}
SHIFT = torch.zeros(2, 2, 4)
MASK = torch.ones(2, 7, dtype=torch.bool)
BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("query", None, TypeError, r"query: expected a torch.Tensor \(B,H,Nq,D\), got NoneType"),
    ("query", GOOD["query"][0], ValueError, r"query: expected 4 dimensions"),
    ("query", GOOD["query"].long(), TypeError, r"query: expected a floating-point tensor.*int64"),
    ("key", GOOD["key"][..., :3], ValueError, r"key: expected shape"),
    ("key", GOOD["key"].double(), TypeError, r"key: expected the dtype of query, torch.float32, got torch.float64"),
    ("key", GOOD["key"].to("meta"), ValueError, r"key: expected the device of query, cpu, got meta"),
    ("value", GOOD["value"][:, :, :3], ValueError, r"value: expected shape"),
    ("value", [1.0], TypeError, r"value: expected a torch.Tensor"),
    ("log_prior", torch.zeros(2, 3), ValueError, r"log_prior: expected shape \(H,M\) = \(2, 2\).*got \(2, 3\)"),
    ("log_prior", torch.full((2, 2), torch.nan), ValueError, r"log_prior: expected numbers below \+inf"),
    ("log_prior", 0.5, TypeError, r"log_prior: expected a tensor"),
    ("feature_map", "favor", ValueError, r"feature_map: expected one of elu, dpfp or a callable.*got 'favor'"),
    ("feature_map", 3, TypeError, r"feature_map: expected a name or a callable, got int 3"),
    ("feature_map", lambda x: x.sum(-1), ValueError, r"feature_map: expected features"),
    ("is_causal", 1, TypeError, r"is_causal: expected True or False, got int 1"),
    ("key_mask", MASK[:, :3], ValueError, r"key_mask: expected shape \(B,Nk\) = \(2, 7\), got \(2, 3\)"),
    ("key_mask", MASK.float(), TypeError, r"key_mask: expected a bool tensor"),
    ("impl", "cuda", ValueError, r"impl: expected one of auto, reference, blockwise, triton, got 'cuda'"),
    ("impl", None, TypeError, r"impl: expected one of"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "match"), BAD)
def test_bad_arguments_are_named(name: str, wrong: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mlk_attention(**GOOD | {name: wrong})
    if name in ("value", "log_prior", "feature_map", "is_causal", "key_mask", "impl"):
        arguments = {**GOOD, "key": GOOD["key"][:, :, 0], "shift": SHIFT, name: wrong}
        with pytest.raises(error, match=match):
            smlk_attention(**arguments)


@pytest.mark.parametrize(
    ("name", "wrong", "error", "match"),
    [
        ("shift", None, TypeError, r"shift: expected a torch.Tensor \(H,M,D\), got NoneType"),
        ("shift", SHIFT[:1], ValueError, r"shift: expected shape \(H,M,D\)"),
        ("shift", SHIFT[:, :0], ValueError, r"shift: expected at least one component"),
        ("shift", SHIFT.to("meta"), ValueError, r"shift: expected the device of query"),
        ("key", GOOD["key"], ValueError, r"key: expected 4 dimensions \(B,G,Nk,D\)"),
    ],
)
def test_bad_shifts_are_named(name: str, wrong: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        smlk_attention(**{**GOOD, "key": GOOD["key"][:, :, 0], "shift": SHIFT, name: wrong})


def test_bad_keys_of_linear_attention_are_named() -> None:
    with pytest.raises(ValueError, match=r"key: expected 4 dimensions \(B,G,Nk,D\)"):
        linear_attention(GOOD["query"], GOOD["key"], GOOD["value"])
    with pytest.raises(ValueError, match=r"key: expected shape \(B,G,Nk,D\) = \(2, 2, 7, 4\)"):
        linear_attention(GOOD["query"], GOOD["key"][:, :, 0, :, :2], GOOD["value"])
    with pytest.raises(TypeError, match=r"query: expected a torch.Tensor"):
        linear_attention(None, GOOD["key"][:, :, 0], GOOD["value"])  # type: ignore[arg-type]


def test_bad_states_are_named() -> None:
    token = (GOOD["query"][:, :, :1], GOOD["key"][:, :, :, :1], GOOD["value"][:, :, :1])
    _, state = linear_step(None, *token)
    with pytest.raises(TypeError, match="state: expected a LinearState or None, got int 3"):
        linear_step(3, *token)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"state.numerator: expected shape \(B,H,F,Dv\) = \(2, 2, 24, 3\), got \(2, 2, 4, 3\)"
    ):
        linear_step(state, *token, feature_map="dpfp")
    with pytest.raises(TypeError, match=r"state.denominator: expected the dtype of query"):
        linear_step(LinearState(state.numerator, state.denominator.double(), state.exponent), *token)
    with pytest.raises(ValueError, match=r"state.exponent: expected shape"):
        linear_step(LinearState(state.numerator, state.denominator, state.exponent[..., :1]), *token)
    with pytest.raises(ValueError, match="key: expected one key per query, n = 5"):
        linear_step(None, GOOD["query"], GOOD["key"], GOOD["value"])
