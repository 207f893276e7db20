"""A call that is read off a tape does what its launcher would: the same numbers, the same launches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.triton_env import DEVICE, overflow_checked

# isort: split
import triton.language as tl
from triton import knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

import mgk
from mgk.ops.triton import repeat
from mgk.ops.triton.launch import launch
from mgk.ops.triton.repeat import Tape, repeated
from mgk.ops.triton.tiles import Tile, override
from tests.ops.machine import Machine, launching

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

Launcher = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Iterator[None]:
    """The tests of the kernels look at integers."""
    with overflow_checked(False):
        yield


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes that are played, in their order."""
    tapes, play = [], Tape.play

    def noting(tape: Tape, *args: Any) -> Any:
        tapes.append(tape)
        return play(tape, *args)

    monkeypatch.setattr(Tape, "play", noting)
    return tapes


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def attend(kind: str, seed: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of a head with two components, and numbers of their own for each seed."""
    (batch, heads, length, width), seeds = (2, 1, 19, 16), itertools.count(10 * seed)
    shape = (batch, heads, 2, length, width) if kind in ("mgk", "mlk") else (batch, heads, length, width)
    tensors = [normal(*size, seed=next(seeds), dtype=dtype) for size in ((batch, heads, length, width), shape)]
    if kind.startswith("s"):
        tensors.append(normal(heads, 2, width, seed=next(seeds)))
    tensors += [normal(batch, heads, length, width, seed=next(seeds), dtype=dtype), normal(heads, 2, seed=next(seeds))]
    function: Launcher = getattr(mgk, f"{kind}_attention")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.manual_seed(seed)
    masks = {
        name: (normal(batch, length, seed=next(seeds)) < 1 if value is True else value)
        for name, value in options.items()
        if name.endswith("mask")
    }
    if masks.get("query_mask") == "that of keys":
        masks["query_mask"] = masks["key_mask"]
    output = function(*leaves, **(options | masks), impl="triton")
    grads = torch.autograd.grad(output, leaves, normal(*output.shape, seed=next(seeds), dtype=dtype))
    return [output.detach(), *grads]


GAUSSIAN: list[dict[str, Any]] = [
    {"is_causal": True}, {"e_step": "hard"}, {"key_mask": True, "query_mask": "that of keys", "dropout_p": 0.3},
]  # fmt: skip
LINEAR: list[dict[str, Any]] = [{"is_causal": True}, {"key_mask": True}]
# Short sequences in bfloat16 have kernels of their own; what else there is differs by its options.
CALLS = [(kind, each, torch.float32) for kind in ("smgk", "mgk") for each in GAUSSIAN]
CALLS += [("smgk", each, torch.bfloat16) for each in GAUSSIAN]
CALLS += [(kind, each, torch.bfloat16) for kind, each in zip(("smlk", "mlk"), LINEAR, strict=True)]


@pytest.mark.parametrize(("kind", "options", "dtype"), CALLS)
def test_every_operator_repeats_itself(
    kind: str, options: dict[str, Any], dtype: torch.dtype, played: list[Tape]
) -> None:
    """On other numbers, forward and backward, to the last bit."""
    for seed in (1, 2):
        attend(kind, seed, dtype, options)
    assert not played
    again = attend(kind, 3, dtype, options)
    assert len(played) == 2
    assert all(tape.known for tape in played)
    repeat.forget()
    assert all(map(torch.equal, again, attend(kind, 3, dtype, options)))
    assert len(played) == 2


def busy(x: Tensor, y: Tensor, times: float) -> tuple[Tensor, Tensor, Tensor]:
    """Views of what is given and of what is made, writing in place, operators of several tensors and results."""
    room = torch.empty(4, 3, dtype=x.dtype, device=x.device)
    room[1:3].copy_(x[1:] * times)
    room[0].zero_()
    room[3] = y.detach()
    largest, _ = torch.cat([room, x]).max(1)
    return room.T, largest, torch.zeros_like(y).add_(y.view(3))


def same(function: Launcher, launcher: Launcher, *inputs: Any) -> None:
    got, wanted = function(*inputs), launcher(*inputs)
    assert isinstance(got, tuple) == isinstance(wanted, tuple)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_operators_in_between_are_repeated(played: list[Tape]) -> None:
    function = repeated(busy)
    for seed in range(4):
        same(function, busy, normal(3, 3, seed=seed), normal(3, seed=-seed), 2.0)
    assert len(played) == 2


def test_calls_that_differ_have_tapes_of_their_own(played: list[Tape]) -> None:
    """In shape, strides, dtype, address or a constant."""
    function, x, y = repeated(busy), normal(3, 3), normal(3)
    kinds: list[tuple[Any, ...]] = [
        (x, y, 2.0), (x.T, y, 2.0), (x.double(), y.double(), 2.0), (x, normal(4)[1:], 2.0), (x, y, 3.0),
    ]  # fmt: skip
    for _ in range(3):
        for inputs in kinds:
            same(function, busy, *inputs)
    assert len(played) == len(set(map(id, played))) == len(kinds)


def test_results_are_new_memory_every_time() -> None:
    """Not that of the tape, nor of an argument."""
    function, x, y = repeated(busy), normal(3, 3), normal(3)
    results = [each for _ in range(4) for each in function(x, y, 2.0)]
    addresses = [each.untyped_storage().data_ptr() for each in (*results, x, y)]
    assert len(set(addresses)) == len(addresses)


def test_arguments_that_were_one_memory_may_come_apart() -> None:
    """Three parts of one tensor look like three tensors: nothing follows from where they lie to each other."""
    function = repeated(lambda *parts: tuple(2 * part for part in parts))
    for seed in range(3):
        whole = normal(2, 9, seed=seed)
        parts = [(whole if seed < 2 else whole.clone())[:, i : i + 3] for i in (0, 3, 6)]
        assert all(map(torch.equal, function(*parts), [2 * part for part in parts]))


@pytest.mark.parametrize(
    "aliased", [lambda x: (x, x), lambda x: (x, x[0]), lambda x: (x, x[:, :1])], ids=["twice", "rows", "columns"]
)
def test_one_memory_passed_twice_is_a_call_of_its_own(aliased: Launcher, played: list[Tape]) -> None:
    function = repeated(lambda x, y: (x + 2 * y, y * 3))
    for seed in range(3):
        one, other = aliased(normal(3, 3, seed=seed))
        for x, y in ((one, other), (one + 1, other)):
            assert all(map(torch.equal, function(x, y), (x + 2 * y, y * 3)))
    assert len(set(map(id, played))) == 2


@pytest.mark.parametrize("case", ["outside", "scalar", "mode", "transform"])
def test_the_launcher_is_called_where_a_tape_would_not_do(case: str, played: list[Tape]) -> None:
    outside, calls = normal(3), []

    def launcher(x: Tensor, y: Tensor) -> Tensor:
        calls.append(case)
        if case == "outside":
            return x + outside
        if case == "scalar":
            return x * float(y.sum())
        return x + y

    function, x, y = repeated(launcher), normal(3), normal(3, seed=1)
    for factor in (1.0, 2.0, 3.0, 4.0):
        outside.mul_(factor)
        a, b = x * factor, y * factor
        with FlopCounterMode(display=False) if case == "mode" else torch.no_grad():
            call = torch.func.vmap(function) if case == "transform" else function
            got = call(a, b)
        expected = {"outside": a + outside, "scalar": a * float(b.sum())}.get(case, a + b)
        assert torch.equal(got, expected)
    assert len(calls) == 4
    assert not played


def test_other_tiles_are_other_calls(played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    function = repeated(lambda x: x + len(override))
    for _ in range(3):
        function(normal(3))
    monkeypatch.setitem(override, ("shifted", "forward"), Tile(16, 16, 4, 1))
    assert float(function(torch.zeros(()))) == len(override)
    assert len(played) == 1


def test_tapes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that never come again are not written down, and no launcher has more tapes than so many."""
    monkeypatch.setattr(repeat, "MAX_TAPES", 5)
    function = repeated(lambda x: 2 * x)
    for length in range(1, 30):
        assert torch.equal(function(torch.ones(length)), torch.full([length], 2.0))
        assert len(repeat.all_tapes[-1]) <= 5
        assert not any(repeat.all_tapes[-1].values())


def test_a_launcher_that_fails_leaves_nothing_behind() -> None:
    fails: list[bool] = []

    def launcher(x: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("no")
        return x + 1

    function, x = repeated(launcher), normal(3)
    function(x)
    fails.append(True)
    with pytest.raises(RuntimeError, match="no"):
        function(x)
    assert launching.recording.writer is None
    fails.clear()
    assert torch.equal(function(x), x + 1)


def example(A, B, C, n, scale, D: tl.constexpr, E: tl.constexpr = 7):  # type: ignore[no-untyped-def]
    pass


def launches_of(kernel: Any, described: bool) -> Launcher:
    def launcher(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        room = torch.empty(64, 32, dtype=torch.bfloat16, device=x.device)
        result = torch.zeros(8, dtype=x.dtype, device=x.device)
        first = TensorDescriptor.from_tensor(room[2:].view(31, 64), [8, 16], LAYOUT) if described else room[2:]
        launch(kernel, (n, 2), first, x[1], result.view(2, 4), n, 0.5, D=3, num_warps=4)
        launch(kernel, (n,), result, None, room, 1, 0.25, D=4, num_warps=4)
        return result, room

    return launcher


LAYOUT = NVMMASharedLayout(0, 16, 2)


def seen(launched: tuple[Any, ...], names: dict[int, str]) -> list[Any]:
    """A launch with names for addresses, and descriptors as what they say."""
    return [
        *launched[:3],
        *(vars(each) | {"base": names[each.base.data_ptr()]} if isinstance(each, TensorDescriptor) else
          names.get(each, each) for each in launched[3]),
    ]  # fmt: skip


@pytest.mark.parametrize("described", [False, True])
def test_launches_are_those_of_the_launcher(machine: Machine, played: list[Tape], described: bool) -> None:
    """Compiled kernels, grids, streams and arguments; addresses of views are where those views begin."""
    launcher = launches_of((GluonJITFunction if described else JITFunction)(example), described)
    function = repeated(launcher)
    for seed, call in enumerate([launcher, function, function, launcher, function, function]):
        x = torch.full([3, 16], float(seed))
        result, room = call(x, 5)
        names = {
            x.data_ptr() + 64: "x[1]", result.data_ptr(): "result", room.data_ptr(): "room",
            room.data_ptr() + 128: "room[2]",
        }  # fmt: skip
        first, second = (seen(launched, names) for launched in machine.launches[-2:])
        assert first[1:3] == [(5, 2, 1), 100]
        assert (vars_of(first[3]) if described else first[3]) == "room[2]"
        assert first[4:] == ["x[1]", "result", 5, 0.5, 3, 7]
        assert second[1:] == [(5, 1, 1), 100, "result", None, "room", 1, 0.25, 4, 7]
    assert len(played) == 2
    assert machine.asked == 2  # for two kernels to compile


def vars_of(descriptor: dict[str, Any]) -> str:
    assert descriptor["shape"] == torch.Size([31, 64])
    assert descriptor["block_shape"] == [8, 16]
    return str(descriptor["base"])


def test_launches_go_to_the_stream_of_the_moment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    function = repeated(launches_of(JITFunction(example), described=False))
    for stream in (100, 101, 102, 103):
        monkeypatch.setattr(machine, "get_current_stream", lambda device, stream=stream: stream)
        function(torch.ones(3, 16), 5)
        assert [launched[2] for launched in machine.launches[-2:]] == [stream] * 2


def test_another_device_is_the_launchers_to_find(
    machine: Machine, played: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = repeated(launches_of(JITFunction(example), described=False))
    for _ in range(3):
        function(torch.ones(3, 16), 5)
    machine.device = 1
    function(torch.ones(3, 16), 5)
    assert len(played) == 1
    assert [launched[2] for launched in machine.launches] == [100] * 8
    assert machine.device == 1


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook"])
def test_hooks_of_triton_see_every_launch(
    machine: Machine, played: list[Tape], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    function = repeated(launches_of(JITFunction(example), described=False))
    for _ in range(3):
        function(torch.ones(3, 16), 5)
    calls: list[Any] = []

    def note(*about: Any) -> tuple[str, str]:
        calls.append(about)
        return "key", "hash"

    monkeypatch.setattr(knobs.runtime, hook, note)
    function(torch.ones(3, 16), 5)
    assert len(played) == 1
    assert calls or hook not in inspect.getsource(JITFunction.run)  # Triton 3.6 asks that one elsewhere
