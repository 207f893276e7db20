"""Every argument of every function, one at a time, of wrong rank, size, dtype, device or value.

The error names the argument, says what was expected and shows what came.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mgk
from tests.ops.common import Case, Options

B, H, M, NQ, NK, D, DV = 2, 3, 2, 4, 5, 6, 7
CASE = Case(B=B, H=H, M=M, Nq=NQ, Nk=NK, D=D, Dv=DV, variance="tensor")


def valid(name: str, variant: str) -> Options:
    """All arguments of a function, every one of them right."""
    arguments: Options = dict(replace(CASE, variant=variant).inputs(torch.float32))
    arguments |= {
        "e_step": "soft",
        "is_causal": True,
        "window": 3,
        "return_lse": True,
        "key_mask": torch.ones(B, NK, dtype=torch.bool),
        "query_mask": torch.ones(B, NQ, dtype=torch.bool),
        "dropout_p": 0.0,
        "impl": "reference",
    }
    accepted = inspect.signature(getattr(mgk, name)).parameters
    return {key: value for key, value in arguments.items() if key in accepted}


CALLS = [("mgk_attention", "mgk"), ("smgk_attention", "smgk")] + [
    (name, variant)
    for name in ("attention_weights", "responsibilities", "prior_statistics", "update_prior", "update_components")
    for variant in ("mgk", "smgk")
]

# For each argument: what is wrong with it, how to make it so, the error, and what its message says after the name.
Bad = tuple[str, Callable[[Any], Any], type[Exception], str]


def tensors(rank: int, axes: str, *, dtype: bool) -> list[Bad]:
    """What goes wrong with any tensor argument."""
    wrong: list[Bad] = [
        ("none", lambda x: None, TypeError, r"expected a torch\.Tensor .*got NoneType"),
        ("list", lambda x: x.tolist(), TypeError, r"expected a torch\.Tensor .*got list"),
        ("array", lambda x: np.zeros(x.shape), TypeError, r"expected a torch\.Tensor .*got ndarray"),
        ("integers", lambda x: x.long(), TypeError, r"expected a floating-point tensor .*got dtype torch\.int64"),
        ("complex", lambda x: x.cfloat(), TypeError, r"expected a floating-point tensor .*torch\.complex64"),
        ("bytes", lambda x: x.to(torch.float8_e5m2), TypeError, r"expected .* of 16 bits up, got dtype .*float8_e5m2"),
        ("one axis less", lambda x: x[0], ValueError, rf"expected {rank} dimensions \({axes}\), got .*shape \("),
        ("one axis more", lambda x: x[None], ValueError, rf"expected {rank} dimensions \({axes}\), got .*shape \(1,"),
    ]
    if dtype:
        wrong.append(("dtype", lambda x: x.double(), TypeError, r"expected the dtype of query.*float32, got.*float64"))
    return wrong


def twice(axis: int, tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], axis)


def sizes(axes: dict[int, str]) -> list[Bad]:
    """Twice the entries along each of the axes that other arguments fix."""
    return [
        (f"size of {letter}", partial(twice, axis), ValueError, r"expected shape \(.*got \(")
        for axis, letter in axes.items()
    ]


DEVICE: Bad = ("device", lambda x: x.to("meta"), ValueError, "expected the device of query, cpu, got meta")
MASK: list[Bad] = [
    ("list", lambda x: x.tolist(), TypeError, r"expected a bool tensor .*got list"),
    ("floats", lambda x: x.float(), TypeError, r"expected a bool tensor .*got dtype torch\.float32"),
    ("one axis less", lambda x: x[0], ValueError, r"expected shape .*got \("),
    *sizes({0: "B", 1: "N"}),
    DEVICE,
]
FLAG: list[Bad] = [
    ("number", lambda x: 1, TypeError, "expected True or False, got int 1"),
    ("none", lambda x: None, TypeError, "expected True or False, got NoneType"),
]


def bad_arguments(name: str, variant: str) -> dict[str, list[Bad]]:
    shifted = variant == "smgk"
    key_axes = "B,G,Nk,D" if shifted else "B,G,M,Nk,D"
    shift = tensors(3, "H,M,D", dtype=False)
    if name != "smgk_attention":  # where None says that key holds the components
        shift = shift[1:]
    return {
        "query": [
            *tensors(4, "B,H,Nq,D", dtype=False),
            (
                "no width",
                lambda x: x[..., :0],
                ValueError,
                r"expected a head width D of at least 1, got .*\(2, 3, 4, 0\)",
            ),
        ],
        "key": [
            *tensors(4 if shifted else 5, key_axes, dtype=True),
            *sizes({0: "B", 1: "H", -1: "D"}),
            DEVICE,
            *([] if shifted else [no_components(2)]),
        ],
        "shift": [*shift, *sizes({0: "H", 2: "D"}), DEVICE, no_components(1)],
        "value": [*tensors(4, "B,G,Nk,Dv", dtype=True), *sizes({0: "B", 1: "H", 2: "Nk"}), DEVICE],
        "log_prior": [
            ("number", lambda x: 0.5, TypeError, r"expected a tensor \(H,M\) or \(H,M,Nk\) or None, got float 0\.5"),
            ("integers", lambda x: x.long(), TypeError, r"expected a floating-point tensor, got dtype torch\.int64"),
            (
                "one axis more",
                lambda x: x[None],
                ValueError,
                r"expected shape \(H,M\) = \(3, 2\) or .*got \(1, 3, 2, 5\)",
            ),
            ("two axes less", lambda x: x[0, :, 0], ValueError, r"expected shape \(H,M\).*got \(2,\)"),
            *sizes({0: "H", 1: "M", 2: "Nk"}),
            DEVICE,
            ("NaN", lambda x: torch.full_like(x, torch.nan), ValueError, r"expected .*got NaN or \+inf"),
            ("+inf", lambda x: torch.full_like(x, torch.inf), ValueError, r"expected .*got NaN or \+inf"),
        ],
        "variance": [
            ("text", lambda x: "1", TypeError, r"expected None, a number or a tensor \(H,M\), got str '1'"),
            ("bool", lambda x: True, TypeError, r"expected None, a number or a tensor \(H,M\), got bool True"),
            ("zero", lambda x: 0.0, ValueError, r"expected a finite number above 0, got 0\.0"),
            ("negative", lambda x: -1, ValueError, "expected a finite number above 0, got -1"),
            ("NaN", lambda x: float("nan"), ValueError, "expected a finite number above 0, got nan"),
            ("infinite", lambda x: float("inf"), ValueError, "expected a finite number above 0, got inf"),
            ("zeros", torch.zeros_like, ValueError, "expected finite numbers above 0, got"),
            ("NaNs", lambda x: torch.full_like(x, torch.nan), ValueError, "expected finite numbers above 0, got"),
            ("integers", lambda x: x.long(), TypeError, r"expected a floating-point tensor .*got dtype torch\.int64"),
            ("one axis less", lambda x: x[0], ValueError, r"expected 2 dimensions \(H,M\), got .*\(2,\)"),
            *sizes({0: "H", 1: "M"}),
            DEVICE,
        ],
        "e_step": [
            ("unknown", lambda x: "softer", ValueError, "expected one of soft, hard, got 'softer'"),
            ("bool", lambda x: True, TypeError, "expected one of soft, hard, got bool True"),
        ],
        "is_causal": FLAG,
        "return_lse": FLAG,
        "window": [
            ("zero", lambda x: 0, ValueError, "expected at least 1, got 0"),
            ("float", lambda x: 2.0, TypeError, r"expected an integer, got float 2\.0"),
            ("bool", lambda x: True, TypeError, "expected an integer, got bool True"),
        ],
        "key_mask": MASK,
        "query_mask": MASK,
        "dropout_p": [
            ("one", lambda x: 1.0, ValueError, r"expected 0 <= dropout_p < 1, got 1\.0"),
            ("negative", lambda x: -0.1, ValueError, r"expected 0 <= dropout_p < 1, got -0\.1"),
            ("NaN", lambda x: float("nan"), ValueError, r"expected 0 <= dropout_p < 1, got nan"),
            ("text", lambda x: "0.1", TypeError, r"expected a number, got str '0\.1'"),
            ("bool", lambda x: False, TypeError, "expected a number, got bool False"),
        ],
        "impl": [
            ("unknown", lambda x: "cuda", ValueError, "expected one of auto, reference, blockwise, triton, got 'cuda'"),
            ("none", lambda x: None, TypeError, "expected one of auto, reference, blockwise, triton, got NoneType"),
        ],
    }


def no_components(axis: int) -> Bad:
    return ("no component", lambda x: x.narrow(axis, 0, 0), ValueError, "expected at least one component M, got")


MISTAKES = [
    pytest.param(name, variant, argument, make, error, message, id=f"{name}-{variant}-{argument}-{label}")
    for name, variant in CALLS
    for argument, wrong in bad_arguments(name, variant).items()
    if argument in valid(name, variant)
    for label, make, error, message in wrong
]


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_right_arguments_pass(name: str, variant: str) -> None:
    getattr(mgk, name)(**valid(name, variant))


@pytest.mark.parametrize(("name", "variant", "argument", "make", "error", "message"), MISTAKES)
def test_mistake_is_named(
    name: str, variant: str, argument: str, make: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    arguments = valid(name, variant)
    value = arguments[argument]
    arguments[argument] = make(value.detach() if isinstance(value, Tensor) else value)
    with pytest.raises(error, match=rf"^{argument}: {message}") as caught:
        getattr(mgk, name)(**arguments)
    assert caught.type is error


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_no_argument_is_left_out(name: str) -> None:
    """Every parameter of the signature has mistakes of its own above."""
    tried = {parameter.values[2] for parameter in MISTAKES if parameter.values[0] == name}
    assert tried == set(inspect.signature(getattr(mgk, name)).parameters)


def test_every_function_is_tried() -> None:
    """All that is public here; linear attention has its own tests."""
    assert {name for name, _ in CALLS} == {name for name in mgk.ops.__all__ if "mlk" not in name} & {
        *dir(mgk.ops.api),
        *dir(mgk.ops.m_steps),
    }


@pytest.mark.parametrize("name", ["mgk_attention", "prior_statistics", "update_prior"])
def test_triton_by_name_wants_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("mgk.ops.triton")  # Triton reads the variable when it is imported
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="impl: expected CUDA tensors for 'triton', got cpu"):
        getattr(mgk, name)(**valid(name, "mgk") | {"impl": "triton"})


def test_auto_has_an_implementation_for_every_device() -> None:
    """One for which nothing better was written takes the formula itself."""
    for device, expected in (("cpu", mgk.ops.blockwise), ("meta", mgk.ops.reference)):
        query = torch.empty(1, 1, 1, 1, device=device)
        assert mgk.ops.api.implementation("auto", query, query) is expected


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_misspelt_argument_is_refused(name: str, variant: str) -> None:
    with pytest.raises(TypeError, match="causal"):
        getattr(mgk, name)(**valid(name, variant), causal=True)


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_optional_arguments_may_be_none(name: str, variant: str) -> None:
    optional = ("log_prior", "variance", "key_mask", "query_mask")
    arguments = {key: None if key in optional else value for key, value in valid(name, variant).items()}
    getattr(mgk, name)(**arguments)
