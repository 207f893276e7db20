"""Blockwise: every path to an exact result is taken and right, and the operators pass the checks of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from mgk.ops.blockwise import attend as attend_module
from mgk.ops.blockwise.blocks import Block
from mgk.ops.blockwise.forms import flatten_heads, mixture_form, shifted_form
from mgk.ops.blockwise.kernels import Kernel
from mgk.ops.blockwise.operators import attention, attention_backward
from mgk.ops.options import Options
from tests.ops.common import E_STEPS, VARIANTS, Case, Inputs, assert_close, assert_same, attend, gradients


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of the forward passes that ran, in order; "in range" if no exponent could under- or overflow."""
    taken: list[str] = []
    run = attend_module.Forward.run

    def record(self: Any, kernel: Kernel, blocks: Iterable[Block]) -> None:
        taken.append(type(kernel).__name__ + (" in range" if kernel.in_range else ""))
        run(self, kernel, list(blocks))

    monkeypatch.setattr(attend_module.Forward, "run", record)
    return taken


def heavy_keys_elsewhere() -> Inputs:
    """Every query prefers the component that every key has the least of: each factor leaves one of the two at 0."""
    inputs = Case(H=1, B=1, D=1, Dv=2, prior=None).inputs()
    with torch.no_grad():
        inputs["shift"].copy_(torch.tensor([[[0.0], [60.0]]]))
        inputs["query"] += 60
        inputs["key"] += 60
    return inputs


def far_apart(scale: float, variant: str = "smgk") -> Inputs:
    return Case(variant=variant).inputs(scale=scale)


def near_a_key(variant: str = "smgk") -> Inputs:
    """Numbers far too wide for plain exponentials, but every query sits on a key: the free bound is met."""
    inputs = far_apart(60, variant)
    with torch.no_grad():
        if "shift" in inputs:
            inputs["shift"].mul_(1e-3)
        key = inputs["key"] if variant == "smgk" else inputs["key"][:, :, 1]
        inputs["query"].copy_(key[:, :, : inputs["query"].shape[2]])
    return inputs


@pytest.mark.parametrize(
    ("inputs", "e_step", "expected"),
    [
        (far_apart(1), "soft", ["ShiftedSoft in range"]),
        (near_a_key(), "soft", ["ShiftedSoft"]),
        (far_apart(60), "hard", ["ShiftedHard", "ShiftedHard"]),
        (heavy_keys_elsewhere(), "soft", ["ShiftedSoft", "ShiftedSoft", "Mixture"]),
        (far_apart(1, "mgk"), "soft", ["Mixture in range"]),
        (near_a_key("mgk"), "soft", ["Mixture"]),
        (far_apart(100, "mgk"), "soft", ["Mixture", "Mixture"]),
        (far_apart(100, "mgk"), "hard", ["HardMixture", "HardMixture"]),
    ],
    ids=["free", "bound", "hard-exact", "mixture", "mgk-free", "mgk-bound", "mgk-exact", "mgk-hard-exact"],
)
def test_each_path_is_taken_and_right(inputs: Inputs, e_step: str, expected: list[str], passes: list[str]) -> None:
    actual = attend(inputs, "blockwise", e_step=e_step)
    assert passes == expected
    # Exponents reach 1e5 here, so a weight is right to 1e5 * 2e-16; gradients hold differences of up to 1e3 times it.
    reference = attend(inputs, "reference", e_step=e_step)
    assert_close("output", actual, reference, 1e-9)
    wanted = gradients(reference, inputs)
    for name, grad in gradients(actual, inputs).items():
        scale = 1 + wanted[name].abs().max().item()
        assert_close(f"gradient of {name}", grad / scale, wanted[name] / scale, 1e-8)


@pytest.mark.parametrize("variance", [None, "tensor"])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [30.0, 1000.0, 10000.0])
def test_weights_of_backward_sum_to_one(variant: str, e_step: str, variance: str | None, scale: float) -> None:
    """However large the exponents are: float32 has an error of 64 in exponents of 1e9.

    The gradient of the values holds the weights; where that of the output is 1, it sums to Nq over the keys.
    """
    case = Case(variant, Nq=9, Nk=11, D=16, variance=variance, e_step=e_step)
    inputs = {name: tensor.detach().float() for name, tensor in case.inputs().items()}
    large = {name: inputs[name] * scale for name in ("query", "key", "shift") if name in inputs}
    inputs = {name: tensor.requires_grad_() for name, tensor in (inputs | large).items()}
    output = attend(inputs, "blockwise", **case.options())
    (grad,) = torch.autograd.grad(output.sum(), inputs["value"])
    total = grad.sum(2)
    assert_close("sum of weights", total, torch.full_like(total, case.Nq), 1e-5)


def test_exact_maximum_ignores_a_removed_component(passes: list[str]) -> None:
    """The component with the prior -inf would have the largest exponent by far."""
    inputs = far_apart(100, "mgk")
    with torch.no_grad():
        inputs["log_prior"][:, 0] = -torch.inf
        inputs["key"][:, :, 0] = inputs["query"][:, :, :1]
    actual = attend(inputs, "blockwise")
    assert passes == ["Mixture", "Mixture"]
    assert_close("output", actual, attend(inputs, "reference"), 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1.0, 6.0, 40.0])
def test_float32_takes_no_slow_numbers_for_right_ones(variant: str, scale: float) -> None:
    """What is kept from underflowing does not show: float32 is as near to float64 as its exponents are."""
    case = Case(variant=variant, Nq=40, Nk=50, D=8, is_causal=True, masked=True)
    exact, low = case.inputs(scale=scale), case.inputs(torch.float32, scale=scale)
    actual, wanted = attend(low, "blockwise", **case.options()), attend(exact, "reference", **case.options())
    # An exponent of size E has an error of a few E * 6e-8; E is below 10 scale^2 (8 numbers, three terms, s2 = 3).
    tolerance = 1e-5 + 40 * scale**2 * 6e-8
    assert_close("output", actual.double(), wanted, tolerance)
    for name, grad in gradients(actual, low).items():
        reference = gradients(wanted, exact)[name]
        unit = 1 + reference.abs().max().item()
        assert_close(f"gradient of {name}", grad.double() / unit, reference / unit, 10 * tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("variant", "variance"), [("mgk", None), ("mgk", "tensor"), ("smgk", None), ("smgk", "tensor")]
)
@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1e-2])
def test_hard_winners_of_small_inputs(scale: float, variant: str, variance: str | None, is_causal: bool) -> None:
    """Exponents differ by scale^2 between components, and the log of a row sum is 5: float32 must not add them.

    The bound is the share of a few wrong winners among 14400 pairs per head.
    """
    case = Case(variant, B=1, Nq=120, Nk=120, D=32, Dv=32, prior=None, e_step="hard", is_causal=is_causal)
    low = case.inputs(torch.float32, scale=scale)
    if variance:
        low["variance"] = torch.full((2, 2), 4.0, requires_grad=True)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in low.items()}
    wanted = gradients(attend(exact, "reference", **case.options()), exact)
    for name, grad in gradients(attend(low, "blockwise", **case.options()), low).items():
        assert (grad.double() - wanted[name]).norm() <= 0.01 * wanted[name].norm(), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("log_prior", "size"), [(70.0, 1e8), (-72.0, 1e-12)])
def test_a_prior_of_all_leaves_room_for_values(log_prior: float, size: float, variant: str, masked: bool) -> None:
    """exp(70) is a number in float32, and so is 1e8, but not their product; exp(-72) * 1e-12 has a few bits."""
    case = Case(variant, masked=masked, prior=None)
    inputs = case.inputs(torch.float32, scale=0.2)
    inputs["value"] = (size * inputs["value"]).detach().requires_grad_()
    inputs["log_prior"] = torch.full((2, 2), log_prior, requires_grad=True)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    actual, wanted = (attend(x, how, **case.options()) for x, how in ((inputs, "blockwise"), (exact, "reference")))
    # Exponents of 72 are rounded to 4e-6, two or three times; what is left of a gradient is a difference of weights.
    assert_close("output", actual.double() / size, wanted / size, 5e-5)
    grads = gradients(wanted / size, exact)
    for name, grad in gradients(actual / size, inputs).items():
        unit = 1 / size if name == "value" else 1.0
        assert_close(f"gradient of {name}", grad.double() / unit, grads[name] / unit, 2e-4)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_backward_inside_autocast(variant: str, e_step: str) -> None:
    """The gradients are those outside autocast, to the last bit."""
    inputs = Case(variant).inputs(torch.float32)
    output = attend(inputs, "blockwise", e_step=e_step)
    expected = gradients(output, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(output, inputs)
    for name in inputs:
        assert torch.equal(inside[name], expected[name]), name


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_as_one_graph(variant: str, e_step: str) -> None:
    inputs = Case(variant=variant).inputs()

    def attention(inputs: Inputs) -> Tensor:
        return attend(inputs, "blockwise", e_step=e_step, is_causal=True)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_same(compiled(inputs), attention(inputs), inputs)


def operator_arguments(variant: str, hard: bool, variances: bool) -> tuple[Any, ...]:
    """The arguments of the forward operator for 4 query heads that share 2 heads of keys and values."""
    inputs = Case(variant=variant, G=1, variance="tensor" if variances else None).inputs()
    options = Options(inputs["log_prior"], inputs.get("variance", 2.0))
    if variant == "mgk":
        form = mixture_form(inputs["query"], inputs["key"], options)
    else:
        form = shifted_form(inputs["query"], inputs["key"], inputs["shift"], options)
    tensors = *form.terms, flatten_heads(inputs["value"])
    leaves = [part if part is None else part.detach().requires_grad_() for part in tensors]
    return *leaves, form.bound, hard, True, 3, 0.25, torch.tensor(7)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variances", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_pass_the_checks_of_torch(variant: str, variances: bool, hard: bool) -> None:
    """Fake outputs, autograd registration and traced autograd of the forward and the backward operators."""
    arguments = operator_arguments(variant, hard, variances)
    torch.library.opcheck(attention.op, arguments)
    *tensors, _bound, hard, causal, window, dropout_p, seed = arguments
    results = attention(*arguments)
    saved = [tensor if tensor is None else tensor.detach() for tensor in (*tensors, *results)]
    grads = [torch.ones_like(each).detach() for each in results[:2]]
    torch.library.opcheck(
        attention_backward.op,
        (*grads, *saved, hard, causal, window, dropout_p, seed),
        test_utils=("test_schema", "test_faketensor"),  # it is not differentiated again
    )
