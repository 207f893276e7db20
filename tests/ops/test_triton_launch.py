"""Repeated launches: the kernel and the arguments that Triton itself would launch, found without its help.

Triton specialises and keys for real here; only what it would compile, load and launch is written down instead (see
`tests.ops.machine`).
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.ops.triton_env  # noqa: F401  (may choose the interpreter, before Triton is there)

# isort: split
import triton.language as tl
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton.launch import compile_together, launch
from tests.ops.machine import Machine

launching: Any = sys.modules[launch.__module__]  # in the package the name may be that of a function


def example(A, B, n, m, scale, flag, C: tl.constexpr, D: tl.constexpr = 7):  # type: ignore[no-untyped-def]
    pass


def one(A, C: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def any_number(A, *rest):  # type: ignore[no-untyped-def]
    pass


MEMORY = torch.zeros(64)
DESCRIBED = torch.zeros(32, 32)
CALL: dict[str, Any] = {"A": MEMORY, "B": MEMORY, "n": 5, "m": 32, "scale": 0.5, "flag": True, "C": 3, "num_warps": 4}
TENSORS = [MEMORY, MEMORY[1:], MEMORY.half(), MEMORY.half()[1:], torch.nn.Parameter(MEMORY), MEMORY[:0], None] + [
    TensorDescriptor.from_tensor(tensor, [rows, 16]) for tensor in (DESCRIBED, DESCRIBED.half()) for rows in (8, 16)
]
LAYOUTS = NVMMASharedLayout(0, 32, 2), NVMMASharedLayout(32, 32, 2)
TENSORS += [gluon.TensorDescriptor.from_tensor(DESCRIBED, [8, 16], layout) for layout in LAYOUTS]
INTEGERS = [0, 1, 2, 3, 16, 48, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40 + 1, 2**63, 2**63 + 1]


def go(how: Any, kernel: Any, call: dict[str, Any]) -> None:
    """With what comes before C by position."""
    names = [name for name in ("A", "B", "n", "m", "scale", "flag") if name in call]
    how(kernel, (2, 3), *(call[name] for name in names), **{key: call[key] for key in call if key not in names})


def ordinary(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)


ABSENT = object()
VALUES = [
    {"A": TENSORS, "B": TENSORS},
    {"n": [*INTEGERS, 0.5, None, True, (2, 3), (16, 3), (2, 5), (1, 3), (2, 3, 5), (2, 0.5), ()], "m": INTEGERS},
    {"scale": [0.25, 1.0, 2.5, 1, 3, None], "flag": [False, True, 3, MEMORY]},
    {"C": [1, 2, "two", None], "D": [ABSENT, 8], "num_warps": [ABSENT, 4, 8], "maxnreg": [ABSENT, 8]},
]


@pytest.mark.parametrize("values", VALUES, ids=["tensors", "integers", "numbers", "constants"])
def test_every_launch_is_the_one_that_triton_would_have_made(machine: Machine, values: dict[str, list[Any]]) -> None:
    """Same compiled kernel, grid, stream and arguments, in the same order; the second time without asking Triton."""
    kernel, other = JITFunction(example), JITFunction(example)
    some = [CALL | dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    some = [{name: value for name, value in call.items() if value is not ABSENT} for call in some]
    for again, call in [(again, call) for again in (False, True) for call in some]:
        before = machine.asked
        go(launch, kernel, call)
        can_be_told = call["n"] != (2, 0.5) and any(isinstance(call[name], Tensor) for name in "AB")
        assert machine.asked == before or not (again and can_be_told)
        go(ordinary, other, call)
        ours, theirs = machine.launches[-2:]
        assert ours == theirs


def test_the_second_launch_does_not_ask_triton(machine: Machine) -> None:
    kernel = JITFunction(example)
    go(launch, kernel, CALL)
    go(launch, kernel, CALL | {"n": 7, "m": 64, "scale": 2.5, "flag": False, "A": torch.ones(64)})
    assert machine.asked == 1
    assert [launched[1:3] for launched in machine.launches] == [((2, 3, 1), 100)] * 2
    assert machine.launches[1][3][1:] == [MEMORY.data_ptr(), 7, 64, 2.5, False, 3, 7]
    assert not any(isinstance(arg, Tensor) for arg in machine.compilations[0].given)  # the driver would look each up


@dataclass(frozen=True)
class Device:
    is_cuda: bool = True
    device: int = 0


@dataclass
class Twice:
    """A problem whose launcher launches two kernels."""

    kind: str
    query: Device = Device()


def test_the_first_call_of_a_kind_compiles_everything_before_it_launches(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels, steps = [JITFunction(example), JITFunction(one)], []

    def launcher(problem: Twice, number: int) -> int:
        for kernel in kernels:
            launch(kernel, (2, 3), *([MEMORY] * 2 + [5, 32, 0.5, True] if kernel is kernels[0] else [MEMORY]), C=3)
        steps.append((len(machine.compilations), len(machine.launches)))
        return number

    call = compile_together(launcher)
    assert call(Twice("a"), 7) == 7
    assert steps[1] == (2, 2)  # compiled before the launches, and not again
    assert steps[0][1] == 0
    assert call(Twice("a"), 8) == 8
    assert len(steps) == 3
    call(Twice("b"), 9)
    assert len(steps) == 5
    assert len(machine.compilations) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"A": MEMORY.half()}, {"A": MEMORY[1:]}, {"B": None}, {"n": 1}, {"n": 16}, {"n": 2**31}, {"n": 2.0}, {"C": 4},
        {"D": 8}, {"num_warps": 8}, {"maxnreg": 64}, {"A": TensorDescriptor.from_tensor(DESCRIBED, [16, 16])},
    ],
    ids=lambda change: "-".join(f"{name}={str(value)[:12]}" for name, value in change.items()),
)  # fmt: skip
def test_what_triton_distinguishes_is_compiled_anew(machine: Machine, change: dict[str, Any]) -> None:
    kernel = JITFunction(example)
    for call in (CALL, CALL | change, CALL, CALL | change):
        go(launch, kernel, call)
    assert len(machine.compilations) == machine.asked == 2
    assert [launched[0] for launched in machine.launches] == [each.made_for for each in machine.compilations] * 2


def test_constants_count_by_value_wherever_they_stand(machine: Machine) -> None:
    """2 and 3 are of one kind, which is enough for an integer, but not for a constant."""
    kernel = JITFunction(one)
    for constant in (2, 3, 2, 3):
        launch(kernel, (1,), MEMORY, constant)
    assert len(machine.compilations) == machine.asked == 2
    assert [launched[3] for launched in machine.launches] == [[MEMORY.data_ptr(), value] for value in (2, 3, 2, 3)]


def test_block_shapes_of_descriptors_count(machine: Machine) -> None:
    kernel = JITFunction(example)
    for rows in (8, 16, 8, 16):
        go(launch, kernel, CALL | {"A": TensorDescriptor.from_tensor(DESCRIBED, [rows, 16])})
    assert machine.asked == 2
    assert isinstance(machine.launches[-1][3][0], TensorDescriptor)  # Triton's launcher takes it apart


def test_layouts_of_descriptors_count(machine: Machine) -> None:
    """Of a kernel in Gluon, which is found again as any other."""
    kernel = GluonJITFunction(example)
    for layout in LAYOUTS * 2:
        go(launch, kernel, CALL | {"A": gluon.TensorDescriptor.from_tensor(DESCRIBED, [8, 16], layout)})
    assert machine.asked == 2
    assert isinstance(machine.launches[-1][3][0], gluon.TensorDescriptor)


def test_two_kernels_are_two(machine: Machine) -> None:
    kernels = JITFunction(example), JITFunction(example)
    for kernel in kernels * 2:
        go(launch, kernel, CALL)
    assert machine.asked == 2
    assert [launched[0] for launched in machine.launches] == [machine.compilations[0].made_for] * 4


@pytest.mark.parametrize("everywhere", [False, True])
def test_debug_mode_is_compiled_in(machine: Machine, monkeypatch: pytest.MonkeyPatch, everywhere: bool) -> None:
    kernel = JITFunction(example)
    go(launch, kernel, CALL)
    monkeypatch.setattr(knobs.runtime if everywhere else kernel, "debug", True)
    for _ in range(2):
        go(launch, kernel, CALL)
    assert len(machine.compilations) == machine.asked == 2
    assert machine.launches[-1][0] == machine.compilations[1].made_for != machine.compilations[0].made_for


def test_every_setting_in_tritons_key_is_in_ours(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `JITFunction.run` adds to the options of a call."""
    kernel, added = JITFunction(example), {}
    *caches, binder = kernel.device_caches[0]

    def spy(*args: Any, **options: Any) -> Any:
        added.update(options)
        return binder(*args, **options)

    kernel.device_caches[0] = (*caches, spy)
    go(launch, kernel, CALL)
    assert {name.split(".")[1] for name in launching.SETTINGS} == added.keys() - CALL.keys() - {"enable_fp_fusion"}


def test_launch_hooks_see_every_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = JITFunction(example)
    seen: list[Any] = []
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = type(knobs.runtime.launch_enter_hook)()
        chain.add(lambda about, name=name: seen.append((name, about.get()["name"], about.get()["stream"])))
        monkeypatch.setattr(knobs.runtime, name, chain)
    for _ in range(3):
        go(launch, kernel, CALL)
    assert machine.asked == 1
    assert seen == [("launch_enter_hook", "example", 100), ("launch_exit_hook", "example", 100)] * 3
    assert machine.launches == machine.launches[:1] * 3


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_bare_function_as_the_only_hook_is_called_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kernel = JITFunction(example)
    seen: list[Any] = []
    for each in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, each, seen.append if each == name else None)
    for _ in range(2):
        go(launch, kernel, CALL)
    assert len(seen) == 2


def test_what_wants_to_see_every_call_does(machine: Machine) -> None:
    """Hooks before a run, and functions that describe a launch by its tensors."""
    hooked, described = JITFunction(example), JITFunction(example, launch_metadata=lambda *_: {})
    seen: list[Any] = []
    hooked.add_pre_run_hook(lambda *args, **_: seen.append(args[0]))
    for kernel in (hooked, described) * 2:
        go(launch, kernel, CALL)
    assert machine.asked == 4
    assert len(seen) == 2


def test_stages_under_inspection_are_tritons(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a hook says anew for every launch what is to be compiled."""
    kernel = JITFunction(example)
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))
    for _ in range(2):
        go(launch, kernel, CALL)
    assert machine.asked == 2


def test_what_a_hook_keeps_from_being_compiled_is_not_launched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = JITFunction(example)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: True)
    for _ in range(2):
        go(launch, kernel, CALL)
    assert machine.asked == 2
    assert not machine.launches


def test_any_number_of_arguments_is_left_to_triton(machine: Machine) -> None:
    """They come as one tuple, whose parts nobody looked at."""
    kernel = JITFunction(any_number)
    for _ in range(2):
        launch(kernel, (1,), MEMORY, MEMORY)
    assert machine.asked == 2


def test_a_length_that_grows_fills_no_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MAX_INTEGERS", 40)
    kernel = JITFunction(example)
    for length in range(300):
        go(launch, kernel, CALL | {"n": length})
        assert machine.launches[-1][3][2] == length
    assert machine.asked == len(machine.compilations) == 3  # 1, multiples of 16, others
    assert len(launching.integer_kinds) <= 40
    assert [len(signature.compiled) for signature in launching.signatures.values()] == [3]


def test_tensors_choose_the_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = JITFunction(example)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(launching, "get_device", lambda tensor, device=device: device)
        go(launch, kernel, CALL)
    assert machine.asked == len(machine.compilations) == 2
    assert [launched[2] for launched in machine.launches] == [100, 101, 100, 101]
    assert machine.device == 0


@pytest.mark.parametrize("devices", [(-1, -1), (0, -1), (0, 1)])
def test_tensors_in_the_wrong_place_are_tritons_to_refuse(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, devices: tuple[int, int]
) -> None:
    kernel = JITFunction(example)
    for _ in range(2):
        go(launch, kernel, CALL)
    places = dict(zip(map(id, (MEMORY, other := torch.zeros(64))), devices, strict=True))
    monkeypatch.setattr(launching, "get_device", lambda tensor: places[id(tensor)])
    go(launch, kernel, CALL | {"B": other})
    assert machine.asked == 2
    assert machine.launches[-1][2] == 100  # nobody moved


def test_a_triton_nobody_has_compared_launches_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "KNOWN", False)
    kernel = JITFunction(example)
    for _ in range(3):
        go(launch, kernel, CALL)
    assert machine.asked == len(machine.launches) == 3


def test_tensors_by_keyword_are_left_to_triton(machine: Machine) -> None:
    """Keywords are in the key by value, where a tensor would stay for good."""
    kernel = JITFunction(example)
    for memory in (MEMORY, MEMORY[1:]):
        launch(kernel, (1,), MEMORY, B=memory, n=5, m=32, scale=0.5, flag=True, C=3)
    assert machine.asked == 2
    assert machine.launches[0][0] != machine.launches[1][0]
    assert not any(signature.compiled for signature in launching.signatures.values())


def test_a_call_that_does_not_fit_is_tritons_to_refuse(machine: Machine) -> None:
    kernel = JITFunction(example)
    for _ in range(2):
        with pytest.raises(TypeError, match="missing"):
            launch(kernel, (1,), MEMORY, C=3)
    assert not machine.launches


def test_the_interpreter_gets_the_call_as_it_is() -> None:
    seen: list[Any] = []
    interpreted = {(4,): lambda *args, **constants: seen.append((args, constants))}
    launch(interpreted, (4,), MEMORY, 5, C=3)
    assert seen == [((MEMORY, 5), {"enable_fp_fusion": True, "C": 3})]


def test_this_triton_has_been_compared() -> None:
    """Fails with a new Triton: compare its `JITFunction.run` with `launch`, then say so in KNOWN."""
    assert launching.KNOWN or torch.version.hip
