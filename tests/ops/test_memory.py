"""The CPU implementations at the sizes they are for: blocks of the real size, and memory linear in N."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.common import E_STEPS, IMPLS, VARIANTS, Case, assert_same, attend

GIB = 1 << 30

# The high-water mark of this process alone: ru_maxrss starts from that of the process that started it.
PROGRAM = """
import re, torch, mgk

def kilobytes(field):
    return int(re.search(field + ":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

def run(n):
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    before = kilobytes("VmRSS")
    mgk.VARIANT_attention(*leaves, is_causal=True, impl="IMPL").sum().backward()
    return kilobytes("VmHWM") - before

run(64)
print(run(16_384) * 1024)
"""
SHAPES = {
    "mgk": "[(1, 1, n, 16), (1, 1, 2, n, 16), (1, 1, n, 16), (1, 2, n)]",
    "smgk": "[(1, 1, n, 16), (1, 1, n, 16), (1, 2, 16), (1, 1, n, 16), (1, 2, n)]",
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory that Linux keeps")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_forward_and_backward_of_16384_fit_in_two_gib(impl: str, variant: str) -> None:
    """The matrix of weights alone would be 1 GiB, its gradient and the scores of each component as much again.

    Causal, because it is the same blocks in half the time.
    """
    program = PROGRAM.replace("SHAPES", SHAPES[variant]).replace("VARIANT", variant).replace("IMPL", impl)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * GIB


@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_what_is_saved_for_backward_is_linear_in_n(impl: str, variant: str, e_step: str) -> None:
    def saved(length: int) -> int:
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        case = Case(variant, B=1, H=1, Nq=length, Nk=length, e_step=e_step, variance="tensor")
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            attend(case.inputs(torch.float32), impl, **case.options())
        return total

    assert 0 < saved(1024) <= 2 * saved(512)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_blocks_of_the_real_size_agree_with_the_reference(
    impl: str, variant: str, e_step: str, is_causal: bool
) -> None:
    """Two and a bit blocks of keys, several of queries, none of them full at the end."""
    case = Case(variant, B=2, H=1, M=2, Nq=291, Nk=1061, D=5, masked=True, e_step=e_step, is_causal=is_causal)
    inputs, options = case.inputs(), case.options()
    assert_same(attend(inputs, impl, **options), attend(inputs, "reference", **options), inputs)
