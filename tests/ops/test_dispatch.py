"""Which implementation, kernels and tiles a call gets, for every kind of GPU, without one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from mgk.ops import dispatch, tiles
from mgk.ops.dispatch import ALL, FITTING, OVERFLOWING, Call, Launch, Plan, plan
from mgk.ops.tiles import Tile

T4, A100, RTX4090, H100, B200, RTX5090 = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
AMD = None
LONG: dict[str, Any] = {"queries": 4096, "keys": 4096, "width": 64, "value_width": 64}


def launches(chosen: Plan) -> list[Launch]:
    return [*chosen.forward, *chosen.query, *chosen.key]


def passes(call: Call) -> list[tuple[Any, ...]]:
    chosen = plan(call)
    return [chosen.forward, chosen.query, chosen.key]


@pytest.mark.parametrize("family", ["shifted", "projected"])
def test_every_call_that_the_checks_accept_has_a_plan(family: str) -> None:
    """All widths, lengths, components and features, on all GPUs; a generic launch always has a tile."""
    sizes = product((1, 16, 17, 32, 33, 64, 65, 128, 129, 256), (1, 64, 100, 256), (1, 2, 3, 4, 9), (1, 17, 256, 257))
    gpus = (A100, RTX4090, H100, B200, RTX5090, AMD)
    flags = list(product(dispatch.TRITON_DTYPES, gpus, (False, True), (False, True)))
    for number, (width, value_width, components, length) in enumerate(sizes):
        for dtype, capability, hard, masked in flags[number % 5 :: 5]:
            call = Call(
                family=family, dtype=dtype, capability=capability, hip=capability is AMD, gluon=capability == H100,
                queries=length, keys=length, width=width, value_width=value_width, components=components, hard=hard,
                masked=masked, variances=masked and family == "projected",
            )  # fmt: skip
            if dispatch.no_tile(family, dtype, max(width, value_width), components, capability, capability is AMD):
                assert (family, dtype, call.block_width) == ("projected", "float32", 256) or components == 9, call
                assert plan(call).implementation == "reference", call
                continue
            chosen = plan(call)
            assert chosen.implementation == "triton"
            assert launches(chosen)
            limit = tiles.shared_memory(capability, capability is AMD)
            for kind in () if chosen.short else dispatch.PASSES:
                for each in getattr(chosen, kind):
                    assert (each.tile is None) == each.kernels.startswith("hopper"), call
                    assert each.tile is None or tiles.shared_bytes(kind, each.tile, call.shape) <= limit, call
            for step in (chosen.forward, chosen.query, chosen.key):
                heads = [each.heads for each in step]
                if heads and not chosen.short and not (family == "projected" and hard):
                    assert heads in ([ALL], [FITTING, OVERFLOWING]), call  # every head is computed once


def test_one_component_of_width_64_is_not_short() -> None:
    """There is no tile for it: such a call raised KeyError on every GPU."""
    call = Call(family="shifted", queries=200, keys=200, width=64, value_width=64, components=1, capability=A100)
    assert not plan(call).short
    assert plan(Call(family="shifted", queries=200, keys=200, width=32, value_width=32, components=1)).short


def test_an_a100_gets_the_generic_kernels() -> None:
    call = Call(family="shifted", capability=A100, gluon=True, **(LONG | {"width": 128, "value_width": 128}))
    chosen = plan(call)
    assert {each.kernels for each in launches(chosen)} == {"generic"}
    assert chosen.key[0].tile == Tile(64, 64, 8, 3, 255)


def test_tiles_follow_the_gpu() -> None:
    """The table on a Hopper GPU; smaller tiles where a program has less shared memory."""
    call = Call(family="projected", **(LONG | {"width": 128, "value_width": 128}))
    chosen = {gpu: [each[0].tile for each in passes(replace(call, capability=gpu))] for gpu in (A100, RTX4090, H100)}
    assert chosen[H100] == [dispatch.TILES["projected", kind, 128] for kind in dispatch.PASSES]
    assert chosen[A100] != chosen[H100]
    for small, large in zip(chosen[RTX4090], chosen[A100], strict=True):
        assert small.queries * small.keys * small.stages <= large.queries * large.keys * large.stages
    assert tiles.shared_memory((8, 6)) == tiles.shared_memory((12, 1)) == 99 * 1024  # also GPUs not yet known


def test_what_cannot_fit_is_an_error_that_says_so() -> None:
    call = Call(family="projected", dtype="float32", capability=RTX4090, components=8, **(LONG | {"width": 256}))
    with pytest.raises(ValueError, match="no tile for 8 components of width 256 in float32 fits into 101,376 bytes"):
        plan(call, "triton")
    assert plan(call).implementation == "reference"
    assert (
        plan(call).reason == "no tile for 8 components of width 256 in float32 fits into 101,376 bytes of shared memory"
    )


def test_heads_that_would_overflow_get_smaller_inner_tiles() -> None:
    chosen: Any = plan(Call(family="shifted", capability=H100, **LONG))
    for fast, rest, inner, outer in (
        (*chosen.forward, "keys", "queries"), (*chosen.query, "keys", "queries"), (*chosen.key, "queries", "keys")
    ):  # fmt: skip
        assert getattr(rest.tile, inner) == getattr(fast.tile, inner) // 2
        assert getattr(rest.tile, outer) == getattr(fast.tile, outer)  # sums per outer block are shared


def test_a_gpu_without_bfloat16_says_so() -> None:
    name, reason = dispatch.implementation("auto", "cuda", "bfloat16", 64, True, T4)
    assert (name, reason) == ("reference", "compute capability 7.5 has no bfloat16, which needs 8.0")
    assert dispatch.implementation("auto", "cuda", "float16", 64, True, T4)[0] == "triton"
    assert not dispatch.takes_packed("auto", "cuda", "bfloat16", 64, True, T4)
    assert plan(Call(family="shifted", capability=T4, **LONG)).implementation == "reference"


@pytest.mark.parametrize("reason", [{}, {"gluon": False}, {"masked": True}, {"aligned": False}, {"components": 9}])
def test_hopper_kernels_need_hopper_and_a_plain_call(reason: dict[str, Any]) -> None:
    call = replace(Call(family="shifted", capability=H100, gluon=True, **LONG), **reason)
    assert ("hopper" in {each.kernels for each in launches(plan(call))}) == (not reason)


@pytest.mark.parametrize(("family", "dtype", "taken"), [
    ("shifted", "bfloat16", True), ("shifted", "float16", False), ("projected", "bfloat16", False)
])  # fmt: skip
def test_hopper_kernels_for_wide_heads_know_shifted_keys_in_bfloat16(family: str, dtype: str, taken: bool) -> None:
    call = Call(family=family, dtype=dtype, capability=H100, gluon=True, **(LONG | {"width": 192, "value_width": 256}))
    assert all(
        (step[0].kernels == "hopper") == taken for step in (plan(call).forward, plan(call).query, plan(call).key)
    )


@pytest.mark.parametrize(
    ("device", "dtype", "width", "triton", "expected", "says"),
    [
        ("cpu", "float32", 256, False, "native", "CPU"),
        ("cpu", "float32", 512, False, "blockwise", "wider than 256"),
        ("cpu", "float8_e5m2", 64, False, "blockwise", "float8_e5m2"),
        ("cuda", "bfloat16", 64, True, "triton", "CUDA"),
        ("cuda", "bfloat16", 64, False, "reference", "not installed"),
        ("cuda", "float64", 64, True, "reference", "float64"),
        ("cuda", "bfloat16", 257, True, "reference", "wider than 256"),
        ("mps", "float32", 64, True, "reference", "mps"),
    ],
)
def test_auto_says_why(device: str, dtype: str, width: int, triton: bool, expected: str, says: str) -> None:
    name, reason = dispatch.implementation("auto", device, dtype, width, triton)
    assert name == expected
    assert says in reason
    assert dispatch.implementation("blockwise", device, dtype, width, triton)[0] == "blockwise"  # a name is a name


def test_a_few_queries_without_gradients_are_decoded() -> None:
    call = Call(family="shifted", **(LONG | {"queries": 1}))
    assert not plan(call).decode
    assert plan(replace(call, needs_grad=False)).decode
    assert not plan(replace(call, needs_grad=False, queries=17)).decode


def test_a_plan_reads_as_text() -> None:
    text = " ".join(line for _, line in dispatch.describe(Call(family="shifted", capability=H100, gluon=True, **LONG)))
    assert "hopper kernel, heads on the fast path" in text
    assert "generic kernel, heads that would overflow" in text
