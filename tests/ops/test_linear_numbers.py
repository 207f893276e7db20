"""The linear family: derivatives, half precision, every range of numbers, and memory.

B batch, H heads, M components, Nq queries, Nk keys, D width of a head, Dv width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from mgk.ops import linear_forms
from mgk.ops.feature_maps import ScaledFeatures
from mgk.ops.linear import linear_step, mlk_attention, smlk_attention
from tests.ops.linear_cases import FAVOR, MAPS, Inputs, agree, dense, everywhere, feed, gradients, inputs, numbers


@pytest.mark.parametrize("is_causal", [False, True])
@everywhere
def test_gradcheck(impl: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "CHUNK", 2)
    query, key, value, log_prior = inputs(B=1, Nq=3, Nk=4, D=2, Dv=2).values()
    shift, mask = numbers(2, 2, 2, seed=5).requires_grad_(), torch.tensor([[True, False, True, True]])

    def mlk(*tensors: Tensor) -> Tensor:
        return mlk_attention(*tensors, is_causal=is_causal, key_mask=mask, impl=impl)

    def smlk(*tensors: Tensor) -> Tensor:
        return smlk_attention(*tensors, is_causal=is_causal, impl=impl)

    single = key[:, :, 0].detach().requires_grad_()
    for call, arguments in ((mlk, (query, key, value, log_prior)), (smlk, (query, single, shift, value, log_prior))):
        assert torch.autograd.gradcheck(call, arguments)
        assert torch.autograd.gradgradcheck(call, arguments)


def test_a_constant_takes_no_part_in_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One derivative after another, of the queries alone."""
    monkeypatch.setattr(linear_forms, "CHUNK", 2)
    query, key, value, log_prior = (x.detach() for x in inputs(B=1, Nq=5, Nk=5).values())
    second = []
    for impl in ("reference", "blockwise"):
        moved = query.clone().requires_grad_()
        output = mlk_attention(moved, key, value, log_prior, is_causal=True, impl=impl)
        (first,) = torch.autograd.grad(output.square().sum(), moved, create_graph=True)
        second += torch.autograd.grad(first.square().sum(), moved)
    torch.testing.assert_close(second[1], second[0])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [{"Nq": 0}, {"Nk": 0}, {"Nq": 0, "Nk": 0}, {"B": 0}], ids=str)
@everywhere
def test_nothing_to_read_is_zero_and_has_gradients_of_zero(impl: str, sizes: dict[str, int], is_causal: bool) -> None:
    arguments = inputs(**sizes)  # type: ignore[arg-type]
    output = mlk_attention(**arguments, is_causal=is_causal, impl=impl)
    assert (output == 0).all()
    for grad in torch.autograd.grad(output.sum(), list(arguments.values())):
        assert (grad == 0).all()


def test_causal_attention_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With entries of 300 too, where one scale does not do for a chunk."""
    monkeypatch.setattr(linear_forms, "CHUNK", 4)
    torch.compiler.reset()
    compiled = torch.compile(mlk_attention, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 300.0):
        arguments = inputs(Nq=10, Nk=11, scale=scale)
        found = compiled(**arguments, is_causal=True, impl="blockwise")
        expected = mlk_attention(**arguments, is_causal=True, impl="reference")
        agree(gradients(found, arguments), gradients(expected, arguments))
        agree([found], [expected])


def test_gradients_flow_through_the_state() -> None:
    query, key, value, log_prior = inputs(B=1, H=1, Nq=3, Nk=3, D=2, Dv=2, prior="head").values()

    def stepped(*tensors: Tensor) -> Tensor:
        return feed((1, 2), *tensors)  # type: ignore[misc]

    assert torch.autograd.gradcheck(stepped, (query, key, value, log_prior))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@everywhere
def test_half_precision_is_no_worse_than_eager_code(impl: str, is_causal: bool, dtype: torch.dtype) -> None:
    """Against float64 on the same rounded inputs; what is left is the rounding of the output, half an eps of it."""
    low = {name: x.detach().to(dtype) for name, x in inputs(Nq=130, Nk=130, prior="head").items()}
    exact = dense(**{name: x.double() for name, x in low.items()}, is_causal=is_causal)
    got = mlk_attention(**low, is_causal=is_causal, impl=impl)
    assert got.dtype == dtype
    error = (got.double() - exact).abs()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    assert error.max() <= (dense(**low, is_causal=is_causal).double() - exact).abs().max() + rounding.max()
    assert (error <= rounding * 1.01 + 1e-5).all()  # 1e-5: float32 sums of 130 terms of size 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_autocast_changes_nothing(is_causal: bool) -> None:
    arguments = {name: x.detach().float().requires_grad_() for name, x in inputs(Nq=7).items()}
    with torch.autocast("cpu", torch.bfloat16):
        inside = mlk_attention(**arguments, is_causal=is_causal)
        stepped, _ = linear_step(None, *arguments.values())
        grads = gradients(inside, arguments)
    outside = mlk_attention(**arguments, is_causal=is_causal)
    assert torch.equal(inside, outside)
    assert torch.equal(stepped, linear_step(None, *arguments.values())[0])
    assert all(map(torch.equal, grads, gradients(outside, arguments)))


@pytest.mark.parametrize("which", range(len(MAPS)))
def test_functional_gradients(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of causal attention, for all samples together and one by one."""
    monkeypatch.setattr(linear_forms, "CHUNK", 4)
    query, key, value, log_prior = (x.detach() for x in inputs(B=3, Nq=10, Nk=10, prior="head").values())

    def loss(query: Tensor, key: Tensor, value: Tensor, impl: str = "blockwise") -> Tensor:
        options: Any = {"feature_map": MAPS[which], "is_causal": True, "impl": impl}
        return mlk_attention(query, key, value, log_prior, **options).square().sum()

    expected = torch.func.grad(loss)(query, key, value, "reference")
    agree([torch.func.grad(loss)(query, key, value)], [expected])
    one_by_one = torch.func.vmap(torch.func.grad(loss))
    agree([one_by_one(query[:, None], key[:, None], value[:, None])[:, 0]], [expected])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward mode of PyTorch loads torch.jit
def test_forward_mode_of_the_parallel_form() -> None:
    query, key, value, log_prior = (x.detach() for x in inputs().values())
    results = []
    for impl in ("blockwise", "reference"):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(query, query + 1)  # type: ignore[no-untyped-call]
            output = mlk_attention(dual, key, value, log_prior, impl=impl)
            results.append(forward_ad.unpack_dual(output).tangent)  # type: ignore[no-untyped-call]
    agree(results[:1], results[1:])


def log_dense(
    arguments: Inputs, log_phi: Callable[[Tensor], Tensor], is_causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """Eqn 14 in the logarithms of the features, which must be positive: right for every size of input."""
    query, key, value, log_prior = (x.detach().double() for x in arguments.values())
    prior = log_prior[None, :, :, None, :, None] if log_prior.dim() == 3 else log_prior[None, :, :, None, None, None]
    terms = log_phi(query)[:, :, None, :, None] + log_phi(key)[:, :, :, None] + prior  # (B,H,M,Nq,Nk,F)
    logits = terms.logsumexp(-1).logsumexp(2)
    if is_causal:
        logits = logits.masked_fill(
            ~torch.ones_like(logits, dtype=torch.bool).tril(logits.shape[-1] - logits.shape[-2]), -torch.inf
        )
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -torch.inf)
    output: Tensor = logits.softmax(-1).nan_to_num(0) @ value
    return output


def log_elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


@everywhere
@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_entries_of_300_are_right_in_float32(impl: str, width: int, is_causal: bool, masked: bool) -> None:
    """exp(-300) is zero in float32: a query whose keys are all small in the features it has must see them even so."""
    arguments = {name: x.detach().float() for name, x in inputs(Nq=140, Nk=140, D=width, scale=300).items()}
    arguments["key"][:, :, :, :70] = -arguments["key"][:, :, :, :70].abs()  # and large ones come later
    mask = numbers(2, 140) > 0 if masked else None
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    got = mlk_attention(**leaves, is_causal=is_causal, key_mask=mask, impl=impl)
    grads = torch.autograd.grad(got.sum(), list(leaves.values()))
    expected = log_dense(leaves, log_elu, is_causal, mask)
    # Exponents near 1000 are rounded to 6e-5 each way in float32, and that is the relative error of a weight.
    torch.testing.assert_close(got.double(), expected, rtol=5e-4, atol=5e-4)
    assert all(x.isfinite().all() for x in grads)


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
def test_extreme_random_features_are_right(impl: str, is_causal: bool) -> None:
    """FAVOR+ has exponents of -|x|^2/2: at entries of std 300, some -1e5 from each other."""
    arguments = inputs(Nq=140, Nk=140, scale=300)

    def log_favor(x: Tensor) -> Tensor:
        exponent: Tensor = FAVOR(x).exponent
        return exponent

    got = mlk_attention(**arguments, feature_map=FAVOR, is_causal=is_causal, impl=impl)
    expected = log_dense(arguments, log_favor, is_causal)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
    assert all(x.isfinite().all() for x in gradients(got, arguments))


@pytest.mark.parametrize("which", range(3))
def test_extreme_steps_are_chunks(which: int) -> None:
    """The scale a state carries is no part of the answer."""
    arguments = inputs(Nq=60, Nk=60, scale=300)
    chunked = mlk_attention(**arguments, feature_map=MAPS[which], is_causal=True)
    stepped = feed((1, 1, 30, 1, 27), *arguments.values(), feature_map=MAPS[which])  # type: ignore[misc]
    agree([stepped], [chunked], 1e-8)
    # Gradients are differences of such terms: they are compared beside the largest, and those that vanish beside 1.
    for one, other in zip(gradients(stepped, arguments), gradients(chunked, arguments), strict=True):
        assert (one - other).abs().max() <= 1e-8 * (1 + other.abs().max())


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
def test_priors_of_any_size_are_right_in_float32(impl: str, is_causal: bool) -> None:
    """From e^-400 to e^400 within one chunk: a causal query sees nothing but what is nothing to the last."""
    arguments = {name: x.detach().float() for name, x in inputs(Nq=11, Nk=11).items()}
    arguments["log_prior"] += torch.linspace(-400, 400, 11)
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    got = mlk_attention(**leaves, is_causal=is_causal, impl=impl)
    # exponents near 400 are rounded to 3e-5 in float32
    torch.testing.assert_close(got.double(), log_dense(leaves, log_elu, is_causal), rtol=2e-4, atol=2e-4)
    assert all(x.isfinite().all() for x in torch.autograd.grad(got.sum(), list(leaves.values())))


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("prior", ["head", "position"])
@pytest.mark.parametrize("apart", [20.0, 90.0, 104.0, 300.0])
def test_features_of_zero_hide_no_others(impl: str, apart: float, prior: str, is_causal: bool) -> None:
    """A component, a key or a feature that is zero, with a prior above that of what is not; in float32."""
    arguments = {name: x.detach().float() for name, x in inputs(Nq=9, Nk=9, D=2, prior=prior).items()}
    arguments["log_prior"] += apart * torch.linspace(-0.5, 0.5, arguments["log_prior"].shape[-1])
    arguments["query"][:, :, 4] = 0  # which has no features
    arguments["key"][:, :, 0, 2:4] = 0
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    expected = dense(**exact, feature_map="dpfp", is_causal=is_causal)
    got = [mlk_attention(**leaves, feature_map="dpfp", is_causal=is_causal, impl=impl)]
    if is_causal:
        got.append(feed((1, 1, 5, 2), *leaves.values(), feature_map="dpfp"))  # type: ignore[misc]
    wanted = gradients(expected, exact)
    for output in got:
        # exponents up to 150 are rounded to 8e-6 in float32, each way
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)
        for one, other in zip(gradients(output, leaves), wanted, strict=True):
            assert (one - other).abs().max() <= 1e-4 * (1 + other.abs().max())


@everywhere
def test_one_key_is_its_value(impl: str) -> None:
    arguments = {name: x.detach().float() for name, x in inputs(Nq=1, Nk=1, D=1, scale=300).items()}
    arguments["query"][:], arguments["key"][:] = -500, -800
    for is_causal in (False, True):
        got = mlk_attention(**arguments, is_causal=is_causal, impl=impl)
        torch.testing.assert_close(got, arguments["value"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_the_exported_form_is_the_chunked_one(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no exponents of a feature differ by more than `SPREAD`; beyond that it is NaN, never a wrong number.

    Both round mantissas, of which none is negative, and an exponent of up to 850 has an error of 850 times that.
    """
    monkeypatch.setattr(linear_forms, "CHUNK", 2)
    mantissas = numbers(2, 2, 3, length, 4, seed=1).float().abs()
    exponents = numbers(2, 2, 3, length, 4, seed=2).float().clamp(-2, 2) * 200
    value = linear_forms.with_ones(numbers(2, 3, length, 5, seed=3).float(), None, mantissas)
    query, key = (ScaledFeatures(*pair) for pair in zip(mantissas, exponents, strict=True))
    if length > 2:
        key.exponent[0, :, :2] = -torch.inf  # as with a mask; the first queries see nothing
    key.exponent[1, 1, 1:], key.exponent[1, 1, 0] = 0, -850  # the first query sees only what is small beside the rest
    found = linear_forms.exported(query, key, value)
    expected = linear_forms.quotient(linear_forms.blockwise(query, key, value, True))
    tolerance = 16 * 850 * torch.finfo(torch.float32).eps * float(value.abs().max())
    torch.testing.assert_close(linear_forms.quotient(found), expected, rtol=0, atol=tolerance)
    if length > 1:
        key.exponent[1, 2, -1, 0] = 901 + key.exponent[1, 2, :, 0].min()
        bad = linear_forms.exported(query, key, value).isnan().all(-1).all(-1)
        assert bad.tolist() == [[False] * 3, [False, False, True]]


def saved_numbers(length: int) -> int:
    """How many numbers a causal forward keeps for its backward."""
    arguments = inputs(B=1, H=1, Nq=length, Nk=length, D=8, Dv=8, prior="head")
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 8
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = mlk_attention(**arguments, is_causal=True)
    assert output.requires_grad
    return sum(storages.values())


def test_what_backward_keeps_is_linear_in_the_length() -> None:
    assert saved_numbers(4096) < 4096**2 // 10
    assert saved_numbers(4096) < 2.1 * saved_numbers(2048)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers in one result of any operation."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return result


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_step_holds_more_than_linear_memory(is_causal: bool, scale: float) -> None:
    length, width = 4096, 8
    arguments = inputs(B=1, H=1, Nq=length, Nk=length, D=width, Dv=width, prior="head", scale=scale)
    with LargestTensor() as mode:  # type: ignore[no-untyped-call]
        gradients(mlk_attention(**arguments, is_causal=is_causal), arguments)
    assert mode.largest <= 2 * length * (width + 1)  # M components of features, or values with their ones


def test_a_state_is_small_and_float32_for_half_precision() -> None:
    arguments = {name: x.detach().bfloat16() for name, x in inputs(Nq=9, Nk=9, prior="head").items()}
    output, state = linear_step(None, *arguments.values(), feature_map="dpfp")
    assert output.dtype == torch.bfloat16
    assert [x.dtype for x in state] == [torch.float32] * 3
    assert [tuple(x.shape) for x in state] == [(2, 2, 24, 3), (2, 2, 24), (2, 2, 24)]


@everywhere
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_bad_numbers_show_where_they_are_seen_and_nowhere_else(
    impl: str, name: str, bad: float, is_causal: bool
) -> None:
    """Masked keys hold them, too. A value after a causal row may show there, as 0 * NaN does; see test_random_cases."""
    arguments = {each: x.detach() for each, x in inputs(Nq=11, Nk=11).items()}
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[:, 3] = False
    arguments["key"][..., 3, :], arguments["value"][..., 3, :] = bad, bad
    clean = mlk_attention(**arguments, is_causal=is_causal, key_mask=mask, impl=impl)
    assert clean.isfinite().all()
    arguments[name][0, 0, ..., 6, 0] = bad
    leaves = {each: x.requires_grad_() for each, x in arguments.items()}
    output = mlk_attention(**leaves, is_causal=is_causal, key_mask=mask, impl=impl)
    seen = torch.zeros(2, 2, 11, dtype=torch.bool)
    seen[0, 0, 6 if is_causal or name == "query" else 0 :] = True
    if name == "query":
        seen[0, 0, 7:] = False
    assert not output[seen][:, 0].isfinite().any()
    rest = torch.tensor([[False, True], [True, True]])[..., None] if name == "value" else ~seen
    rest = rest.expand_as(seen)
    agree([output[rest]], [clean[rest]])
    by_key, by_value = torch.autograd.grad(output.sum(), [leaves["key"], leaves["value"]])
    assert not by_key[0, 0].isfinite().all()
    assert by_key[1].isfinite().all()
    assert (by_key[..., 3, :] == 0).all()
    assert (by_value[..., 3, :] == 0).all()
