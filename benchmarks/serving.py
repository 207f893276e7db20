"""One decoding step of a server: grouped queries against long caches, contiguous and in pages, on a GPU.

Softmax has 16 query heads and 4 heads of keys and values, mixtures half of both. A result is compared with float64
before it is timed. Besides the time: tokens per second, and the share of the memory's bandwidth at which the cache is
read.

B rows, H query heads, G heads of keys and values, N positions of each row, P pages, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mgk
from benchmarks import operators
from benchmarks.operators import LIMITS
from benchmarks.problems import CACHE as CACHE
from benchmarks.problems import Problem
from mgk.ops import cost, measure
from mgk.ops.measure import BACKENDS, BASELINE, Method, WrongResultError
from mgk.ops.options import Options, Pages

METHODS = (Method("smgk"), Method("mgk"))
PAGE = 64
ROUNDINGS = 8  # of the dtype, which the error of a result may have relative to its largest entry


def measure_serving(problem: Problem = CACHE) -> dict[str, Any]:
    """Time one query per row against caches of `problem.length` positions."""
    calls: dict[str, tuple[Method, Callable[[], object]]] = {}
    failed: dict[str, str] = {}
    with torch.no_grad():
        for method in (BASELINE, *METHODS):
            inputs = {name: tensor.detach() for name, tensor in operators.inputs_of(problem, method).items()}
            inputs["query"] = inputs["query"][:, :, -1:].contiguous()
            for name, call in ways(method, inputs).items():
                try:
                    check(problem, method, inputs, call())
                    calls[name] = method, measure.capture(call)
                except Exception as reason:  # whatever it raises, it is not timed
                    failed[name] = operators.explain(reason)
        times = measure.in_turns({name: call for name, (_, call) in calls.items()})
    best = min((times[name] for name, (method, _) in calls.items() if method == BASELINE), default=float("nan"))
    rows = {
        name: {
            "milliseconds": milliseconds,
            "tokens per second": 1e3 * problem.batch / milliseconds,
            "share of bandwidth": cache_bytes(problem, calls[name][0]) / (milliseconds / 1e3) / LIMITS["bytes"],
            "speedup over the best softmax": best / milliseconds,
        }
        for name, milliseconds in times.items()
    }
    return {"problem": problem.label, "page": PAGE, "dtype": problem.dtype, "rows": rows, "failed": failed}


def ways(method: Method, inputs: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """How a step can be computed: from a contiguous cache, and from pages in random order."""
    if method != BASELINE:
        operator: Any = getattr(mgk, f"{method.operator}_attention")
        return {
            method.name: partial(operator, **inputs, is_causal=True),
            f"{method.name}, pages": partial(from_pages, method, *in_pages(inputs), inputs),
        }

    def sdpa(backend: Any) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(inputs["query"], inputs["key"], inputs["value"], enable_gqa=True)

    found: dict[str, Callable[[], Tensor]] = {
        f"softmax, sdpa {name}": partial(sdpa, backend) for name, backend in BACKENDS.items()
    }
    return found | {"softmax, pages": partial(softmax_from_pages, *in_pages(inputs), inputs["query"])}


def in_pages(inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Pages]:
    """The keys and values in pages (P,G,[M,]page,D) in random order."""
    batch, length = len(inputs["query"]), inputs["value"].shape[2]
    count, device = -(-length // PAGE), inputs["query"].device
    table = torch.randperm(batch * count, device=device).view(batch, count)
    pools = {}
    for name in ("key", "value"):
        padded = torch.nn.functional.pad(inputs[name], (0, 0, 0, count * PAGE - length))
        split = padded.view(*padded.shape[:-2], count, PAGE, -1).movedim(-3, 1)  # (B,count,G,[M,]page,D)
        pools[name] = split.new_empty(batch * count, *split.shape[2:])
        pools[name][table.flatten()] = split.flatten(0, 1)
    used = torch.full((batch,), length, dtype=torch.int32, device=device)
    return pools, Pages(table.int(), used, length)


def from_pages(method: Method, pools: dict[str, Tensor], pages: Pages, inputs: dict[str, Tensor]) -> Tensor:
    operator: Any = getattr(mgk, f"{method.operator}_varlen_attention")
    rows = len(inputs["query"])
    own = inputs | {name: pool.movedim(-2, 1) for name, pool in pools.items()} | {"query": inputs["query"][:, :, 0]}
    starts = torch.arange(rows + 1, dtype=torch.int32, device=inputs["query"].device)
    output: Tensor = operator(
        **own, cu_seq_q=starts, max_q=1, max_k=pages.max_k, seqused_k=pages.used, block_table=pages.table,
        is_causal=True,
    )  # fmt: skip
    return output[:, :, None]


def softmax_from_pages(pools: dict[str, Tensor], pages: Pages, query: Tensor) -> Tensor:
    """Softmax by our decoding kernel, so that both are read in the same way."""
    from mgk.ops import triton

    options, key = Options(None, query.shape[-1] ** 0.5), pools["key"][:, :, None]
    return triton.attend_to_cache(query, key, None, pools["value"], options, pages, softmax=True)[0]


def check(problem: Problem, method: Method, inputs: dict[str, Tensor], output: Tensor) -> None:
    """Raise unless the last head of the last row agrees with float64."""
    exact = {name: measure.last(name, tensor, 1).double() for name, tensor in inputs.items()}
    expected = measure.attend_densely(method, exact, is_causal=True)
    error = measure.relative_error(measure.last("output", output, 1), expected)
    limit = ROUNDINGS * torch.finfo(output.dtype).eps
    if output.shape != inputs["query"].shape or not error <= limit:
        raise WrongResultError(f"an error of {error:.1e} relative to the largest entry, over {limit:.1e}")


def cache_bytes(problem: Problem, method: Method) -> int:
    """Bytes of keys and values that a step reads."""
    share = 1 if method == BASELINE else 2
    d = cost.Dimensions(
        variant="softmax" if method == BASELINE else method.operator, heads=problem.heads // share, queries=1,
        keys=problem.length, batch=problem.batch, head_dim=problem.width, components=method.components,
        kv_heads=(problem.kv_heads or problem.heads) // share,
    )  # fmt: skip
    return cost.cache_bytes(d, problem.torch_dtype.itemsize)
