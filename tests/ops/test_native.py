"""The native kernels: what only the operator takes, threads, memory, and the library itself."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mgk
from mgk.ops import api, native
from mgk.ops.native import build, library
from mgk.ops.native.operators import attention, attention_backward
from tests.ops.common import VARIANTS, Case, attend, gradients

built = pytest.mark.skipif(bool(native.MISSING), reason="no native library")


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    """Otherwise all tests of the native kernels would be left out without a word."""
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler")
    assert not native.MISSING


# --- Threads and memory -----------------------------------------------------------------------------------------------


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_with_any_number_of_threads(variant: str) -> None:
    """Also where the key gradients of a head are sums over several work items."""
    case = Case(variant, B=1, H=2, Nq=700, Nk=530, D=16, Dv=8, variance=None, masked=True, is_causal=True)
    inputs, before, found = case.inputs(torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            output = attend(inputs, "native", **case.options())
            found.append({"output": output, **gradients(output, inputs)})
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name in found[0]:
            assert torch.equal(found[0][name], other[name]), name


LEAK = """
import re, torch, mgk
torch.set_num_threads(2)
query, key, value, shift = (torch.randn(size, requires_grad=True) for size in ((2, 2, 20, 8),) * 3 + ((2, 2, 8),))

def call():
    mgk.smgk_attention(query, key, shift, value, impl="native").sum().backward()

def kilobytes():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

for _ in range(500):
    call()
before = kilobytes()
for _ in range(9500):
    call()
print(kilobytes() - before)
"""


@built
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux has it")
def test_ten_thousand_calls_keep_no_memory() -> None:
    """A call that lost 128 bytes would lose 1.2 MB."""
    done = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000


FORK = """
import os, torch, mgk
torch.set_num_threads(2)
inputs = [torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 200, 8)]
expected = mgk.smgk_attention(*inputs, impl="native")
child = os.fork()
if not child:
    os._exit(0 if torch.equal(mgk.smgk_attention(*inputs, impl="native"), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@built
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """As a worker of a data loader; it would wait for ever for threads that fork does not copy."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "0\n", done.stderr


@built
def test_results_have_the_layout_of_a_projection() -> None:
    """Heads inside positions, so that joining the heads for the next projection copies nothing."""
    query, key, value = (torch.randn(2, 9, 3, 4).transpose(1, 2) for _ in range(3))
    output = mgk.smgk_attention(query, key, torch.randn(3, 2, 4), value, impl="native")
    assert output.transpose(1, 2).is_contiguous()


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_operator_passes_the_checks_of_torch(variant: str) -> None:
    inputs = Case(variant, variance="tensor").inputs()
    x = [inputs.get(name) for name in ("query", "key", "shift", "value", "log_prior", "variance")]
    mask = torch.ones(2, 7, dtype=torch.bool)
    arguments = (*x, mask, None, 1.0, False, True, 0, 0.1, torch.tensor(3))
    torch.library.opcheck(attention.op, arguments)
    output, _, rows = attention(*arguments)
    wanted = sum(1 << i for i, each in enumerate(x) if each is not None)
    plain = [None if each is None else each.detach() for each in x]
    backward = (torch.randn_like(output), None, *plain, mask, None, output.detach(), rows, wanted, *arguments[8:])
    torch.library.opcheck(attention_backward.op, backward)


# --- The library ------------------------------------------------------------------------------------------------------


def test_a_library_that_does_not_fit_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other sources, one that is broken, and one whose calls have another layout."""
    missing = tmp_path / "_native_new.so"
    assert "not built" in library.load(missing)[1]
    (tmp_path / "_native_old.so").write_bytes(b"")
    assert "older than its sources" in library.load(missing)[1]
    missing.write_bytes(b"nothing")
    assert "cannot be loaded" in library.load(missing)[1]
    if not native.MISSING:
        monkeypatch.setattr(library, "CALL", SimpleNamespace(size=8))
        assert "bytes, not 8" in library.load(build.library_path())[1]


def test_without_the_library_auto_warns_once_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Case().inputs(torch.float32)
    monkeypatch.setattr(native, "MISSING", "nobody built it")
    api.warn_slow.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        output = attend(inputs, "auto")
        attend(inputs, "auto")
    assert ["without its native kernels" in str(each.message) for each in warned] == [True]
    assert torch.equal(output, attend(inputs, "blockwise"))
    with pytest.raises(RuntimeError, match="impl: 'native' needs its compiled library, but nobody built it"):
        attend(inputs, "native")


def test_heads_that_are_too_wide_are_an_error_by_name() -> None:
    wide = torch.randn(1, 1, 2, 257)
    if not native.MISSING:
        with pytest.raises(ValueError, match="impl: no native kernels for heads wider than 256; use 'blockwise'"):
            mgk.smgk_attention(wide, wide, wide[0], wide, impl="native")


def test_a_package_without_a_compiler_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built all the same, unless MGK_NATIVE requires the library; a wheel with one is for one platform."""

    def fail() -> Path:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(build, "build", build.library_path)
    assert build.for_package("") == build.for_package("require") == (build.library_path(), "")
    assert build.for_package("skip") == (None, "MGK_NATIVE is skip")
    monkeypatch.setattr(build, "build", fail)
    assert build.for_package("") == (None, "no compiler")
    with pytest.raises(build.BuildError, match="no compiler"):
        build.for_package("require")
    with pytest.raises(ValueError, match="MGK_NATIVE: expected require or skip, got 'no'"):
        build.for_package("no")
    assert build.wheel_tag().startswith("py3-none-")
    assert not build.wheel_tag().endswith("any")


def test_compiler_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="looked for no-such-compiler"):
        build.find_compiler()
