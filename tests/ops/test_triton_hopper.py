"""Kernels for wide heads on Hopper, compiled everywhere; without such a GPU they run in an emulation of Gluon."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.common import E_STEPS, VARIANTS, Case, Inputs
from tests.ops.test_triton import assert_low_precision, run
from tests.ops.triton_env import strict_memory

# isort: split
from mgk.ops import tiles
from mgk.ops.triton import launch_projected, launch_shifted, problem, self_check
from tests.ops.gluon_emulator import NAMES, emulated

HERE = self_check.LOADED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CASE = Case(variant="smgk", B=1, H=2, M=2, Nq=256, Nk=256, D=64, Dv=64, prior="head", seed=3)
# The log of an empty sum is infinite on purpose; numpy, which Triton's interpreter computes with, says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """Those with the kernels, or their emulations; fresh memory is NaN."""
    if not HERE:
        for name, module in zip(NAMES, emulated(), strict=True):
            for launcher in (launch_shifted, launch_projected):
                monkeypatch.setattr(launcher, name, module, raising=False)
        monkeypatch.setattr(self_check, "forced", True)
        monkeypatch.setattr(problem, "capability", lambda device: tiles.HOPPER)
    with strict_memory():
        found = [getattr(launch_shifted, name, None) or getattr(launch_projected, name, None) for name in NAMES]
        yield tuple(module for module in found if hasattr(module, "run"))


@pytest.fixture
def taken(modules: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of these kernels were launched."""
    names: list[str] = []
    launch = modules[0].run

    def noted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    for module in modules:
        monkeypatch.setattr(module, "run", noted)
    return names


ALL = ["forward_kernel", "query_kernel", "key_kernel"]


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (CASE, 1.0),
        (CASE, 6.0),  # heads are beyond the light road
        (replace(CASE, is_causal=True, prior=None), 1.0),
        (replace(CASE, is_causal=True, D=128, Dv=128), 1.0),
        (replace(CASE, D=128, Dv=128, Nq=128, Nk=384, prior="position"), 1.0),
        (replace(CASE, Nq=128, Nk=640, is_causal=True, prior="position"), 1.0),
        (replace(CASE, B=2, H=3, Nq=256, Nk=256, is_causal=True, D=128, Dv=128), 1.0),
        (replace(CASE, Nq=200, Nk=331, prior="position"), 1.0),
        (replace(CASE, Nq=300, Nk=333, D=128, Dv=128, is_causal=True), 1.0),
        (replace(CASE, Nq=300, Nk=333, D=128, Dv=128, is_causal=True), 6.0),
    ],
    ids=["whole", "far", "causal", "wide", "unequal", "later", "many", "ragged", "ragged causal", "ragged far"],
)
def test_values_and_gradients(case: Case, scale: float, variant: str, e_step: str, taken: list[str]) -> None:
    assert_low_precision(replace(case, variant=variant, e_step=e_step), torch.bfloat16, scale=scale)
    assert taken == ALL


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, Nq=200, Nk=331, D=48, Dv=48, prior="position"),
        replace(CASE, Nq=300, Nk=333, D=80, Dv=96, is_causal=True),
        replace(CASE, Nq=130, Nk=256, D=40, Dv=72, e_step="hard"),
    ],
    ids=["48", "80 and 96", "40 and 72"],
)
def test_widths_between(case: Case, taken: list[str]) -> None:
    """Zeros fill the blocks, whose width is that of the wider one of heads and values."""
    assert_low_precision(case, torch.bfloat16)
    assert taken == ALL


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, Nq=200, Nk=331, D=256, Dv=256, prior="position"),
        replace(CASE, B=2, H=1, Nq=300, Nk=333, D=192, Dv=192, is_causal=True),
        replace(CASE, H=1, Nq=384, Nk=384, D=192, Dv=256, M=3, is_causal=True, prior="position"),
    ],
    ids=["256", "192 causal", "192 and 256, 3"],
)
def test_wide_heads(case: Case, taken: list[str]) -> None:
    """On the key side one warp group has dv, the other dk."""
    assert_low_precision(case, torch.bfloat16)
    assert taken == ALL


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (replace(CASE, M=1, Nq=200, Nk=331, prior="position"), ALL),
        (replace(CASE, M=3, Nq=300, Nk=333, is_causal=True), ALL),
        (replace(CASE, M=4, Nq=130, Nk=200, D=96, Dv=96, prior="position"), ALL),
        (replace(CASE, M=8, H=1, B=2, Nq=128, Nk=256, prior=None), ALL),
        (replace(CASE, M=3, Nq=130, Nk=200, e_step="hard"), ["forward_kernel"]),
    ],
    ids=["1", "3", "4", "8", "3 hard"],
)
def test_other_numbers_of_components(case: Case, kernels: list[str], taken: list[str]) -> None:
    """Backward, a hard E-step knows only two."""
    assert_low_precision(case, torch.bfloat16)
    assert taken == kernels


HALF_KERNELS = ["share_kernel", "forward_kernel", "share_kernel", "query_kernel", "key_kernel"]


@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (replace(CASE, Nq=200, Nk=331, prior="position"), 1.0),
        (replace(CASE, Nq=300, Nk=333, is_causal=True), 1.0),
        (replace(CASE, B=2, H=1, Nq=130, Nk=200, D=80, Dv=96, prior=None), 1.0),
        (replace(CASE, Nq=128, Nk=256), 6.0),
        (replace(CASE, M=1, Nq=130, Nk=200, prior="position"), 1.0),
        (replace(CASE, M=3, Nq=130, Nk=200, is_causal=True, prior="position"), 1.0),
    ],
    ids=["ragged", "causal", "widths", "far", "1", "3"],
)
def test_float16(case: Case, scale: float, taken: list[str]) -> None:
    assert_low_precision(case, torch.float16, scale=scale)
    assert taken == HALF_KERNELS


def test_float16_with_keys_of_all_sizes(
    modules: tuple[Any, ...], taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of keys are exponents; a query that prefers a component by more than float16 can hold flags its head."""
    flags, forward = [], modules[1].forward

    def noted(p: Any, saved: Any) -> None:
        forward(p, saved)
        flags.extend(saved[4].tolist())

    monkeypatch.setattr(modules[1], "forward", noted)
    case = replace(CASE, B=2, Nq=300, Nk=256, is_causal=True, prior=None)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    inputs["key"][0] *= torch.linspace(0.5, 2.5, 256)[:, None]
    apart = inputs["shift"][1, 1] - inputs["shift"][1, 0]
    inputs["query"][1, 1, 77] -= 100 * apart / apart.square().sum()  # 2^18
    assert_near(inputs, case.options(), torch.float16, 0.02)
    assert taken == HALF_KERNELS
    assert flags == [[0, 0], [0, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_with_weights_that_grow(variant: str, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are bounded by those of the first tile of keys: 2^10 times as much fits, 2^30 flags the head."""
    home = vars(launch_shifted)["hopper"] if variant == "smgk" else vars(launch_projected)["hopper_projected"]
    flags, forward = [], home.forward

    def noted(p: Any, saved: Any) -> None:
        forward(p, saved)
        flags.extend(saved[4].tolist())

    monkeypatch.setattr(home, "forward", noted)
    case = replace(CASE, variant=variant, Nq=130, Nk=256, prior=None)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    for head, exponent in enumerate((10, 60)):
        key = inputs["key"][0, head, ..., 200, :].reshape(-1, case.D)[0]
        inputs["query"][0, head, 77] = 8 * exponent * 0.6931 * key / (key @ key)
    assert_near(inputs, case.options(), torch.float16, 0.02)
    assert flags == [[0, 0], [0, 1]]


NARROW_HEADS = replace(CASE, Nq=384, Nk=384, D=32, Dv=32)


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (replace(NARROW_HEADS, prior="position"), 1.0),
        (NARROW_HEADS, 6.0),
        (replace(NARROW_HEADS, B=2, Nq=270, Nk=300, is_causal=True), 1.0),
    ],
    ids=["whole", "far", "ragged causal"],
)
def test_narrow_heads(case: Case, scale: float, variant: str, e_step: str, taken: list[str]) -> None:
    """Some kernels are these, others Triton's, whichever is faster."""
    if variant == "smgk" and case.is_causal:
        case = replace(case, D=24)
    assert_low_precision(replace(case, variant=variant, e_step=e_step), torch.bfloat16, scale=scale)
    assert taken == (["key_kernel"] if variant == "smgk" else ALL if e_step == "hard" else ["forward_kernel"])


SHORT, SHORT_KERNELS = replace(CASE, Nq=128, Nk=128, D=16, Dv=16), ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (SHORT, 1.0),
        (SHORT, 6.0),
        (replace(SHORT, Nq=256, Nk=256, is_causal=True), 1.0),
        (replace(SHORT, is_causal=True, D=32, Dv=32, prior="position"), 1.0),
        (replace(SHORT, B=2, H=3, Nq=37, Nk=130, prior="position"), 1.0),
        (replace(SHORT, Nq=100, Nk=200, is_causal=True, prior=None), 1.0),
    ],
    ids=["whole", "far", "causal", "wide", "ragged", "later"],
)
def test_short_sequences(case: Case, scale: float, e_step: str, taken: list[str]) -> None:
    assert_low_precision(replace(case, e_step=e_step), torch.bfloat16, scale=scale)
    assert taken == SHORT_KERNELS


def assert_near(
    inputs: Inputs, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16, share: float = 0.1
) -> None:
    """Each head within some roundings, of which one in which few keys count has many."""
    inputs = {name: x if name in ("log_prior", "shift") else x.to(dtype) for name, x in inputs.items()}
    exact = run({name: tensor.double() for name, tensor in inputs.items()}, "reference", options)
    got = run(inputs, "triton", options)
    for name, have, want in zip(["output", *inputs], got, exact, strict=True):
        heads = product(range(have.shape[0]), range(have.shape[1])) if have.dim() > 3 else [(slice(None), slice(None))]
        for i, j in heads:
            error = float((have[i, j] - want[i, j]).norm())
            assert error <= share * float(want[i, j].norm()), f"{name} of head {i}, {j}"


@pytest.mark.parametrize("e_step", E_STEPS)
def test_a_short_query_far_from_all_keys(e_step: str, taken: list[str]) -> None:
    """But not nearer to one component: only the sum of its row tells."""
    case = replace(SHORT, e_step=e_step, prior=None)
    inputs = {name: x.detach().bfloat16() for name, x in case.inputs(torch.float32).items()}
    apart = (inputs["shift"][1, 1] - inputs["shift"][1, 0]).double()
    query = inputs["query"][0, 1, 77].double()
    inputs["query"][0, 1, 77] = 80 * (query - apart * (query @ apart) / apart.square().sum()).bfloat16()
    exact = run({name: x.double() for name, x in inputs.items()}, "reference", case.options())
    output = run(inputs, "triton", case.options())[0]
    error = (output[0, 1] - exact[0][0, 1]).norm(dim=-1)
    assert bool((error <= 0.1 * exact[0][0, 1].norm(dim=-1)).all())
    assert taken == SHORT_KERNELS


WIDE = replace(CASE, D=192, Dv=192)
KINDS = [
    (CASE, ALL), (replace(CASE, variant="mgk"), ALL), (WIDE, ALL), (NARROW_HEADS, ["key_kernel"]),
    (SHORT, SHORT_KERNELS),
]  # fmt: skip
each_kind = pytest.mark.parametrize(("case", "kernels"), KINDS, ids=["smgk", "mgk", "wide", "narrow", "short"])


@pytest.mark.parametrize("e_step", E_STEPS)
@each_kind
def test_each_head_takes_its_road(case: Case, kernels: list[str], e_step: str, taken: list[str]) -> None:
    """One head that reaches far and one with a query far from all keys, among others."""
    width, factor = (max(128, case.D), 8) if kernels is ALL else (case.D, 16)
    case = replace(case, B=2, e_step=e_step, is_causal=True, D=width, Dv=width, prior=None)
    inputs = {name: x.detach() for name, x in case.inputs(torch.float32).items()}
    inputs["key"][1, 0] *= factor
    inputs["query"][0, 1, 77] *= 5 * factor
    assert_near(inputs, case.options())
    assert taken == ([] if case.D > 128 and case.e_step == "hard" else kernels)


@pytest.mark.parametrize("e_step", E_STEPS)
@each_kind
def test_queries_that_see_nothing(case: Case, kernels: list[str], e_step: str, taken: list[str]) -> None:
    queries, keys = (200, 70) if kernels is SHORT_KERNELS else (384, 129)
    case = replace(case, e_step=e_step, is_causal=True, Nq=queries, Nk=keys, prior=None)
    assert_near({name: x.detach() for name, x in case.inputs(torch.float32).items()}, case.options())
    assert taken == ([] if case.D > 128 and case.e_step == "hard" else kernels)


@each_kind
def test_the_same_bits_every_time_and_in_any_layout(case: Case, kernels: list[str], taken: list[str]) -> None:
    """Gradients have no atomics; (B,N,H,D) in memory is read as it lies."""
    case = replace(case, is_causal=True)
    inputs = {name: x.detach().bfloat16() for name, x in case.inputs(torch.float32).items()}
    first, again = (run(inputs, "triton", case.options()) for _ in range(2))
    other = {name: x.transpose(1, -2).contiguous().transpose(1, -2) if x.dim() > 3 else x for name, x in inputs.items()}
    strided = run(other, "triton", case.options())
    for one, two, three in zip(first, again, strided, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert taken == 3 * kernels


@pytest.mark.parametrize(
    "case",
    [
        *(replace(CASE, Nk=100, variant=variant) for variant in VARIANTS),
        *(replace(CASE, masked=True, variant=variant) for variant in VARIANTS),
        replace(CASE, M=9),
        replace(CASE, M=3, variant="mgk"),
        *(replace(CASE, D=20, Dv=64, variant=variant) for variant in VARIANTS),
    ],
)
def test_what_they_do_not_take_is_left_to_the_others(case: Case, taken: list[str]) -> None:
    assert_low_precision(case, torch.bfloat16)
    assert not taken


@pytest.mark.parametrize("module", NAMES)
def test_they_compile(module: str, tmp_path: Path) -> None:
    """Without a GPU too, by whatever Triton is there, in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_hopper.py")), module]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_newer_triton_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an unknown Triton a small call decides, once per family; a wrong or failing one is reported."""
    monkeypatch.setattr(self_check, "VERSION", (99, 0))
    monkeypatch.setattr(self_check, "forced", None)
    monkeypatch.setattr(self_check, "LOADED", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    calls: list[str] = []

    def outcome(family: str, short: bool, device: torch.device) -> list[torch.Tensor]:
        calls.append(family)
        if family == "broken":
            raise RuntimeError("no such instruction")
        wrong = family == "wrong" and bool(self_check.forced)
        return [torch.ones(4), torch.full((4,), float("nan") if wrong else 1.0)]

    monkeypatch.setattr(self_check, "small_call", outcome)
    self_check.agrees.cache_clear()
    device = torch.device("cpu")
    assert self_check.trusted("right", False, device)
    with pytest.warns(RuntimeWarning, match="gradient 1 of a small call differs by nan"):
        assert not self_check.trusted("wrong", False, device)
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not self_check.trusted("broken", False, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not self_check.trusted("wrong", False, device)
    assert calls == ["right", "right", "wrong", "wrong", "broken"]
    self_check.agrees.cache_clear()
