"""Whether the Hopper kernels can be trusted with the installed Triton.

Gluon, which they are written in, is experimental and changes between versions. They are written for the versions in
`dispatch.GLUON_VERSIONS`. With a newer one the first call of each family compares one small call with the generic
kernels, once per process; a difference or an error is reported once, and the generic kernels are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
from torch import Tensor

from mgk.ops import dispatch
from mgk.ops.options import Options, Visibility
from mgk.ops.triton.primitives import INTERPRETED

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
TOLERANCE = 2**-5  # of the largest entry; both sides round to bfloat16 in a different order, 2^-8 each time
LOADED, REASON = False, "Triton's interpreter does not run Gluon"
if not INTERPRETED.value:
    try:
        from mgk.ops.triton import hopper_backward, hopper_projected, hopper_short, hopper_variances  # noqa: F401

        LOADED = dispatch.GLUON_VERSIONS[0] <= VERSION
        REASON = ""
    except (ImportError, AttributeError, TypeError) as error:  # whatever a newer Gluon no longer has
        REASON = f"{type(error).__name__}: {error}"

forced: bool | None = None


@contextmanager
def force(gluon: bool) -> Iterator[None]:
    """Use the Hopper kernels, or the generic ones, whatever is known of this Triton."""
    global forced
    before, forced = forced, gluon
    try:
        yield
    finally:
        forced = before


def trusted(family: str, short: bool, device: torch.device) -> bool:
    """Whether calls of a family may use the Hopper kernels."""
    if forced is not None:
        return forced
    if dispatch.GLUON_VERSIONS[-1] >= VERSION:
        return LOADED
    if torch.cuda.is_current_stream_capturing():
        return False  # nothing can be compared while a graph is recorded
    return agrees(family, short, device)


@cache
def agrees(family: str, short: bool, device: torch.device) -> bool:
    """Whether one small call gives what the generic kernels give. Says why not."""
    reason = REASON
    if LOADED:
        try:
            with force(True):
                found = small_call(family, short, device)
            with force(False):
                expected = small_call(family, short, device)
            reason = difference(found, expected)
        except Exception as error:  # of Triton's compiler or of the driver
            reason = f"{type(error).__name__}: {error}"
    if reason:
        known = ", ".join(".".join(map(str, each)) for each in dispatch.GLUON_VERSIONS)
        warnings.warn(
            f"mgk: the kernels for Hopper GPUs are off for {family} keys, the generic ones are slower. Triton "
            f"{triton.__version__} is newer than those they were written for ({known}), and a check of them failed: "
            f"{reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return not reason


def small_call(family: str, short: bool, device: torch.device) -> list[Tensor]:
    """Output and gradients of two heads with numbers of unit size."""
    from mgk.ops.triton import mgk_attention, smgk_attention  # which import this module

    length, width = (128, 16) if short else (256, 64)
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_()

    with torch.enable_grad():
        query, value = make(1, 2, length, width), make(1, 2, length, width)
        variance: float | Tensor = width**0.5
        if family == "shared":
            variance = torch.linspace(4, 12, 4, device=device).view(2, 2)
        options = Options(None, variance, Visibility(is_causal=True))
        if family != "projected":
            key, shift = make(1, 2, length, width), make(2, 2, width, dtype=torch.float32)
            inputs = [query, key, shift, value]
            output, _ = smgk_attention(query, key, shift, value, options)
        else:
            key = make(1, 2, 2, length, width)
            inputs = [query, key, value]
            output, _ = mgk_attention(query, key, value, options)
        return [output.detach(), *torch.autograd.grad(output, inputs, make(*output.shape).detach())]


def difference(found: list[Tensor], expected: list[Tensor]) -> str:
    """What differs by more than rounding, or nothing."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = float((one.float() - other.float()).abs().max() / other.float().abs().max())
        if not error <= TOLERANCE:
            name = "the output" if place == 0 else f"gradient {place}"
            return f"{name} of a small call differs by {error:.3g} of its largest entry"
    return ""
