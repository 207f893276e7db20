"""Softmax attention as others compute it: the backends of SDPA, FlashAttention-4, and FlexAttention.

An anchor takes a problem and its inputs and returns a function that attends, and the tensors to differentiate by.
What does not support a problem raises an error there, or in its first call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.problems import Problem
from mgk.ops.measure import BACKENDS, BASELINE, WrongResultError, attend_densely, last, relative_error

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when FlashAttention-4 is imported

Inputs = dict[str, Tensor]
Contender = tuple[Callable[[], Tensor], Inputs]
CHECKED = 64  # queries of the last head


def sdpa(backend: SDPBackend, problem: Problem, inputs: Inputs) -> Contender:
    if problem.window is not None:
        return windowed_flash(backend, problem, inputs)
    mask = problem.mask(inputs["query"].device.type)
    options: dict[str, Any] = {"is_causal": problem.is_causal, "dropout_p": problem.dropout}
    options["enable_gqa"] = problem.kv_heads is not None
    if mask is not None:
        options["attn_mask"] = mask[:, None, None, :]

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend()
        except RuntimeError as error:  # it says that there is no kernel, and the warnings say why
            said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            why = [text for text in said if "not used because" not in text and "disabled" not in text]
            raise NotImplementedError(" ".join(why) or str(error)) from error
    return attend, inputs


def windowed_flash(backend: SDPBackend, problem: Problem, inputs: Inputs) -> Contender:
    """FlashAttention-2 of PyTorch, which SDPA cannot ask for a window."""
    if backend != SDPBackend.FLASH_ATTENTION:
        raise NotImplementedError("no window")
    left = (problem.window or 0) - 1

    def attend() -> Tensor:
        q, k, v = (inputs[name].transpose(1, 2) for name in ("query", "key", "value"))
        length = problem.length
        output: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, problem.dropout, True, False, window_size_left=left,
            window_size_right=0,
        )[0]  # fmt: skip
        return output.transpose(1, 2)

    return attend, inputs


def flash4(problem: Problem, inputs: Inputs) -> Contender:
    """FlashAttention-4, from the package flash-attn-4. A padded batch is packed beforehand."""
    if problem.dropout:
        raise NotImplementedError("FlashAttention-4 has no dropout")
    package = import_module("flash_attn.cute")
    mask = problem.mask(inputs["query"].device.type)
    window = {} if problem.window is None else {"window_size": (problem.window - 1, 0)}
    if mask is None:  # (B,N,H,D) is a view of our layout
        return lambda: package.flash_attn_func(
            *(tensor.transpose(1, 2) for tensor in inputs.values()), causal=problem.is_causal, **window
        )[0].transpose(1, 2), inputs
    packed = {name: tensor.detach().transpose(1, 2)[mask].requires_grad_() for name, tensor in inputs.items()}
    ends = torch.nn.functional.pad(problem.lengths.cumsum(0), (1, 0)).to(mask.device, torch.int32)
    longest = int(problem.lengths.max())
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: package.flash_attn_varlen_func(*packed.values(), **lengths, causal=problem.is_causal)[0], packed


def flex(backend: str, problem: Problem, inputs: Inputs) -> Contender:
    if problem.dropout:
        raise NotImplementedError("FlexAttention has no dropout")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"enable_gqa": problem.kv_heads is not None, "kernel_options": {"BACKEND": backend}}
    options["block_mask"] = block_mask(problem, inputs["query"].device.type)
    return lambda: compiled(inputs["query"], inputs["key"], inputs["value"], **options), inputs


def block_mask(problem: Problem, device: str) -> BlockMask | None:
    """Which blocks FlexAttention visits; no problem is both causal and padded."""
    lengths, width = problem.lengths.to(device), problem.window or 0

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def windowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < width)

    def padded(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i < lengths[b]) & (j < lengths[b])

    if not (problem.is_causal or problem.padded):
        return None
    rule, batch = (padded, problem.batch) if problem.padded else (windowed if problem.window else causal, None)
    return create_block_mask(rule, batch, None, problem.length, problem.length, device=device)


ANCHORS: dict[str, Callable[[Problem, Inputs], Contender]] = {
    **{name: partial(sdpa, backend) for name, backend in BACKENDS.items()},
    "fa4": flash4,
    "flex": partial(flex, "TRITON"),
    "flex flash": partial(flex, "FLASH"),
}


def check(problem: Problem, inputs: Inputs, output: Tensor) -> None:
    """Raise unless the last queries of the last head agree with float64. Dropout and packing are not checked."""
    if problem.dropout or problem.padded:
        return
    exact = {name: last(name, tensor, CHECKED).double() for name, tensor in inputs.items()}
    expected = attend_densely(BASELINE, exact, is_causal=problem.is_causal, window=problem.window)
    error = relative_error(last("output", output, CHECKED), expected)
    limit = 32 * torch.finfo(torch.bfloat16 if problem.tf32 else output.dtype).eps
    if not error <= limit:
        raise WrongResultError(f"an error of {error:.1e} relative to the largest entry, over {limit:.1e}")
