"""Tokens per second of `generate()` from a long cache: mixtures at half the heads against softmax at all of them.

`python -m benchmarks.generate`. All are language models of `mgk.hf` of one shape, with initial weights and a cache of
random keys and values: what a step costs does not depend on them. Each goes two roads through Transformers'
`generate()`, greedily: "dynamic", step by step from Python, and "static" (`cache_implementation="static"`), whose steps
are one CUDA graph. Softmax without a mask also has a choice of SDPA kernels. The speed of a model is that of its best
road, softmax included.

The time of a token is the difference between generating many and few, over their number, so that whatever comes once
does not count. Nothing is timed before both roads agreed with the model without a cache.

B batch, H heads, M components, N positions in the cache, C its room, D width of a head.
"""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgk.environment import environment
from mgk.files import write_json
from mgk.hf import MGKCache, MGKConfig, MGKForCausalLM
from mgk.hf.cache import stack_of
from mgk.nn import KeyValueCache

METHODS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "sMGK soft": {"attention": "smgk"},
    "sMGK hard": {"attention": "smgk", "e_step": "hard"},
    "MGK soft": {"attention": "mgk"},
}
BASELINE = "softmax"
ROADS = {"dynamic": None, "dynamic, cuDNN": SDPBackend.CUDNN_ATTENTION, "static": None}
CHECKED = (3, 24, 6)  # batch, prompt and steps that are compared before anything is timed
WRONG = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest logit: a few roundings in each of some layers


@dataclass(frozen=True)
class Case:
    """`heads` are those of softmax; a mixture has half of them."""

    batch: int = 16
    cache: int = 32768
    heads: int = 16
    width: int = 64
    layers: int = 12
    vocabulary: int = 32000
    few: int = 16
    many: int = 80
    rounds: int = 3


TINY = Case(batch=2, cache=40, heads=4, width=8, layers=2, vocabulary=50, few=4, many=8, rounds=1)


def make(method: str, case: Case, device: str) -> Any:
    torch.manual_seed(0)
    inner = case.heads * case.width
    fields: dict[str, Any] = {
        "heads": case.heads if method == BASELINE else case.heads // 2, "head_dim": case.width, "width": inner,
        "hidden": 4 * inner, "layers": case.layers, "vocabulary": case.vocabulary, "cutoffs": (), "norm": "pre",
        "positions": "sinusoidal", "activation": "gelu",
    }  # fmt: skip
    model: Any = MGKForCausalLM(MGKConfig(kind="language", **METHODS[method], **fields))
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def new_cache(model: Any, road: str, batch: int, room: int) -> MGKCache:
    """As `generate()` makes it, with its room reserved on both roads."""
    if road == "static":
        return MGKCache(model.mgk.new_cache(batch), room)
    return MGKCache(model.mgk.new_cache(batch, room))


def fill(cache: MGKCache, model: Any, length: int) -> None:
    attention = model.mgk.encoder.stack.layers[0].attention
    components = (attention.num_components,) if attention.variant == "mgk" else ()
    for layer in stack_of(cache).layers:
        shape = (layer.batch_size, attention.num_heads)
        key, value = (
            torch.randn(*shape, *extra, length, attention.head_dim, device=model.device, dtype=model.dtype)
            for extra in (components, ())
        )
        assert isinstance(layer, KeyValueCache)  # of softmax, MGK and sMGK
        layer.append(key, value)


@torch.no_grad()
def check(model: Any, road: str) -> float:
    """The largest error of stepwise logits, in units of the largest logit without a cache; raises if it is wrong."""
    batch, prompt, steps = CHECKED
    tokens = torch.randint(1, model.config.vocabulary, (batch, prompt + steps), device=model.device)
    expected = model(tokens).logits[:, prompt - 1 :]
    cache = new_cache(model, road, batch, prompt + steps)
    found = [model(tokens[:, :prompt], past_key_values=cache, logits_to_keep=1).logits]
    for place in range(prompt, prompt + steps):
        mask = torch.ones_like(tokens[:, : place + 1])
        found.append(model(tokens[:, place : place + 1], attention_mask=mask, past_key_values=cache).logits)
    error = float((torch.cat(found, 1) - expected).abs().max() / expected.abs().max())
    if not error <= WRONG[model.dtype]:
        raise RuntimeError(f"{road}: logits are off by {error:.1e} of the largest; a wrong result is not timed")
    return error


def seconds(model: Any, cache: MGKCache, tokens: torch.Tensor, new: int) -> float:
    """Of one `generate()` of so many tokens, after which the cache is what it was."""
    length = cache.get_seq_length()
    sync = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, max_new_tokens=new, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    sync()
    passed = time.perf_counter() - start
    if out.shape[1] != tokens.shape[1] + new:
        raise RuntimeError(f"expected {new} tokens, got {out.shape[1] - tokens.shape[1]}")
    cache.crop(length - cache.get_seq_length())
    return passed


def measure(method: str, road: str, case: Case, device: str) -> dict[str, Any]:
    model = make(method, case, device)
    backend = ROADS[road]
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        error = check(model, road)
        cache = new_cache(model, road, case.batch, case.cache + case.many)
        fill(cache, model, case.cache)
        held = cache.bytes
        tokens = torch.randint(1, case.vocabulary, (case.batch, case.cache + 1), device=device)
        seconds(model, cache, tokens, case.few)  # compiles kernels
        times = []
        for _ in range(case.rounds):
            few, many = (seconds(model, cache, tokens, new) for new in (case.few, case.many))
            times.append((many - few) / (case.many - case.few))
    step = statistics.median(times)
    return {
        "method": method,
        "heads": model.config.heads,
        "road": road,
        "tokens_per_second": case.batch / step,
        "milliseconds": 1000 * step,
        "lowest": 1000 * min(times),
        "highest": 1000 * max(times),
        "cache_bytes": held,
        "cache_bytes_per_second": held / step,
        "parameters": model.num_parameters(),
        "error": error,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each method by its best road, beside softmax by its best."""
    timed = sorted((row for row in rows if "failed" not in row), key=lambda row: float(row["tokens_per_second"]))
    best = {row["method"]: row for row in timed}  # the last of each name is its fastest
    if BASELINE not in best:
        return {}
    base = best[BASELINE]
    return {
        name: {
            "road": row["road"],
            "speedup": row["tokens_per_second"] / base["tokens_per_second"],
            "cache": row["cache_bytes"] / base["cache_bytes"],
        }
        for name, row in best.items()
    }


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = summary(rows)
    yield "| model | heads | road | ms a step | tokens/s | cache GiB | TB/s |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        if "failed" in row:
            yield f"| {row['method']} | | {row['road']} | {row['failed']} | | | |"
            continue
        yield (
            f"| {row['method']} | {row['heads']} | {row['road']} | {row['milliseconds']:.2f} "
            f"| {row['tokens_per_second']:.0f} | {row['cache_bytes'] / 2**30:.2f} "
            f"| {row['cache_bytes_per_second'] / 1e12:.2f} |"
        )
    for name, each in found.items():
        yield f"{name} ({each['road']}): {each['speedup']:.2f}x the tokens/s of softmax, {each['cache']:.2f}x its cache"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="results/generate-cuda.json")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU, to see that it runs")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = TINY if chosen.tiny else Case()
    if chosen.layers:
        case = Case(**{**vars(case), "layers": chosen.layers})
    transformers.utils.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    facts = environment()
    facts["versions"]["transformers"] = transformers.__version__
    result: dict[str, Any] = {"environment": facts, "case": vars(case), "rows": rows}
    path = Path(chosen.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    for method in chosen.methods:
        for road, backend in ROADS.items():
            if backend is not None and (method != BASELINE or device == "cpu"):
                continue
            try:
                rows.append(measure(method, road, case, device))
            except RuntimeError as reason:  # of a road or a kernel that there is not; the others go on
                rows.append({"method": method, "road": road, "failed": str(reason).splitlines()[0]})
            print(rows[-1], flush=True)
            result["summary"] = summary(rows)
            write_json(path, result)  # what is measured stays, whatever comes next
            if device == "cuda":
                torch.cuda.empty_cache()
    print("\n".join(lines(rows)))
    return result


if __name__ == "__main__":
    main()
