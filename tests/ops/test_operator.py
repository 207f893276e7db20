"""An operator is called as one only where something looks; what comes out is the same."""

# mypy: disallow-untyped-calls=False
# torch.utils._python_dispatch is typed in part.

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import mgk
from mgk.ops.operator import operator
from tests.ops.common import IMPLS

FASTEST = IMPLS[-1]

calls: list[int] = []


@operator("test_scaled")
def scaled(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    calls.append(1)
    return x * factor, x.abs()


@scaled.register_fake
def _(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.factor = inputs[1]
    ctx.mark_non_differentiable(output[1])


def gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    return grad * ctx.factor, None


scaled.register_autograd(gradient, keep)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [torch.randn, lambda n: nn.Parameter(torch.randn(n))], ids=["tensor", "parameter"])
def test_both_ways_give_the_same(make: Any) -> None:
    x = make(5).requires_grad_()
    (a, b), (c, d) = scaled(x, 3.0), scaled.op(x, 3.0)
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert b.requires_grad is d.requires_grad is False
    assert torch.equal(torch.autograd.grad(a.sum(), x)[0], torch.autograd.grad(c.sum(), x)[0])


def test_who_looks_sees_an_operator() -> None:
    x = torch.randn(5)
    with Seen() as mode:
        scaled(x, 2.0)
    assert "mgk.test_scaled.default" in mode.names
    calls.clear()
    with FakeTensorMode() as fake:
        assert scaled(fake.from_tensor(x), 2.0)[0].shape == (5,)
    assert scaled(x.to("meta"), 2.0)[0].is_meta
    assert not calls  # what they were given holds no numbers
    torch.compiler.reset()
    assert torch.equal(torch.compile(scaled, fullgraph=True, backend="eager")(x, 2.0)[0], 2 * x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward mode of PyTorch loads torch.jit
def test_transforms_of_torch_func() -> None:
    """Gradients are right, and forward mode, which there is not, is an error."""
    x = torch.randn(5)
    assert torch.equal(torch.func.grad(lambda x: scaled(x, 2.0)[0].square().sum())(x), 8 * x)
    assert torch.equal(torch.func.jacrev(lambda x: scaled(x, 2.0)[0].sum())(x), torch.full((5,), 2.0))
    with pytest.raises(NotImplementedError, match="use impl='reference'"):
        torch.func.jvp(lambda x: scaled(x, 2.0)[0], (x,), (x,))


def test_vmap() -> None:
    """Alone, of a gradient, and under one."""
    x = torch.randn(3, 5)

    def loss(x: Tensor) -> Tensor:
        return scaled(x, 2.0)[0].square().sum()  # type: ignore[no-any-return]

    assert torch.equal(torch.func.vmap(lambda x: scaled(x, 2.0)[0], -1, -1)(x), 2 * x)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), 8 * x)
    assert torch.equal(torch.func.grad(lambda x: torch.func.vmap(loss)(x).sum())(x), 8 * x)


@operator("test_alone")
def alone(x: Tensor) -> Tensor:
    return 2 * x


def test_vmap_of_what_has_one_result() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(torch.func.vmap(alone)(x), 2 * x)


@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_functional_gradients_of_attention(variant: str) -> None:
    query, key, value, shift = (torch.randn(*size).double() for size in ((1, 2, 6, 4),) * 3 + ((2, 2, 4),))
    keys = (key, shift) if variant == "smgk" else (key[:, :, None].expand(-1, -1, 2, -1, -1) + shift[:, :, None],)
    attention: Any = mgk.smgk_attention if variant == "smgk" else mgk.mgk_attention

    def loss(query: Tensor, impl: str) -> Tensor:
        return attention(query, *keys, value, is_causal=True, impl=impl).square().sum()  # type: ignore[no-any-return]

    got, expected = (torch.func.grad(loss)(query, impl) for impl in (FASTEST, "reference"))
    torch.testing.assert_close(got, expected)
    samples = torch.stack([query, query.flip(2), -query])
    by_sample = torch.func.vmap(torch.func.grad(loss), (0, None))
    torch.testing.assert_close(by_sample(samples, FASTEST), by_sample(samples, "reference"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_alone_need_no_numbers(is_causal: bool) -> None:
    query, key, value, shift = (
        torch.empty(*size, device="meta") for size in ((1, 2, 6, 4), (1, 2, 200, 4), (1, 2, 200, 3), (2, 3, 4))
    )
    components = key[:, :, None].expand(-1, -1, 3, -1, -1)
    for output in (
        mgk.mgk_attention(query, components, value, is_causal=is_causal),
        mgk.smgk_attention(query, key, shift, value, is_causal=is_causal),
        mgk.mlk_attention(query, components, value, is_causal=is_causal),
        mgk.smlk_attention(query, key, shift, value, is_causal=is_causal),
    ):
        assert output.is_meta
        assert output.shape == (1, 2, 6, 3)


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("name", ["mgk_attention", "smgk_attention", "mlk_attention", "smlk_attention"])
def test_fake_tensors_with_a_prior_and_a_variance(name: str, e_step: str) -> None:
    """Forward and backward: no check or decision reads values that are not there."""
    with FakeTensorMode():
        sizes = ((1, 2, 200, 4), (1, 2, 200, 4), (1, 2, 200, 3), (2, 3, 4), (2, 3), (2, 3))
        query, key, value, shift, log_prior, variance = (torch.empty(size, requires_grad=True) for size in sizes)
        keys = (key, shift) if name.startswith("s") else (key[:, :, None].expand(-1, -1, 3, -1, -1),)
        options: dict[str, Any] = {} if "mlk" in name else {"e_step": e_step, "variance": variance}
        output = getattr(mgk, name)(query, *keys, value, log_prior, is_causal=True, **options)
        assert output.shape == (1, 2, 200, 3)
        output.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape


def test_a_second_derivative_is_an_error() -> None:
    x = torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad(scaled(x, 2.0)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="use impl='reference'"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forward mode of PyTorch loads torch.jit
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_unsupported_derivatives_of_attention_are_errors(variant: str) -> None:
    """Second derivatives, as an operator and not, and with a constant upstream gradient; forward mode of both kinds."""
    query, key, value, shift = (torch.randn(*size) for size in ((1, 2, 6, 4),) * 3 + ((2, 2, 4),))
    keys = (key, shift) if variant == "smgk" else (key[:, :, None].expand(-1, -1, 2, -1, -1) + shift[:, :, None],)
    attention: Any = mgk.smgk_attention if variant == "smgk" else mgk.mgk_attention

    def attend(query: Tensor) -> Tensor:
        return attention(query, *keys, value, impl=FASTEST)  # type: ignore[no-any-return]

    for mode in (nullcontext(), Seen()):
        leaf = query.clone().requires_grad_()
        with mode:
            (first,) = torch.autograd.grad(attend(leaf).sum(), leaf, create_graph=True)
            with pytest.raises(RuntimeError, match="use impl='reference'"):
                first.square().sum().backward()
    with pytest.raises(RuntimeError, match="use impl='reference'"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: attend(y).square().sum())(x).sum())(query)
    with pytest.raises(NotImplementedError, match="use impl='reference'"):
        torch.func.jvp(attend, (query,), (query,))
    with pytest.raises(NotImplementedError, match="use impl='reference'"), forward_ad.dual_level():
        attend(forward_ad.make_dual(query, query))
