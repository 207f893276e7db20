"""Tokens per second of `generate()` from a long cache: mixtures with half the heads, softmax with all of them.

`python -m benchmarks.generate`. All are language models of `mgk.hf` of one size, with initial weights and a cache of
random keys and values; the cost of a step does not depend on their values. Each generates greedily through
Transformers' `generate()` in two modes: "dynamic", step by step from Python, and "static"
(`cache_implementation="static"`), whose steps are one CUDA graph. Softmax also runs with cuDNN's SDPA kernel. Models,
softmax included, are compared by their fastest modes.

The time of a token is the difference between generating many and few tokens, divided by the difference in number, so
that one-time costs do not count. Nothing is timed before both modes agree with the model without a cache.

B batch, H heads, M components, N positions in the cache, C its capacity, D width of a head.
"""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
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
from mgk.tables import Table

METHODS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "sMGK soft": {"attention": "smgk"},
    "sMGK hard": {"attention": "smgk", "e_step": "hard"},
    "MGK soft": {"attention": "mgk"},
}
BASELINE = "softmax"
MODES = {"dynamic": None, "dynamic, cuDNN": SDPBackend.CUDNN_ATTENTION, "static": None}
CHECKED = (3, 24, 6)  # batch, prompt length and steps of the check
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # error allowed, relative to the largest logit


@dataclass(frozen=True)
class Case:
    """Sizes of the models and of the measurement. Softmax uses all `heads`, a mixture half of them."""

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
    """Build the language model of a method."""
    torch.manual_seed(0)
    inner = case.heads * case.width
    fields: dict[str, Any] = {
        "heads": case.heads if method == BASELINE else case.heads // 2, "head_dim": case.width, "width": inner,
        "hidden": 4 * inner, "layers": case.layers, "vocabulary": case.vocabulary, "cutoffs": (), "norm": "pre",
        "positions": "sinusoidal", "activation": "gelu",
    }  # fmt: skip
    model: Any = MGKForCausalLM(MGKConfig(kind="language", **METHODS[method], **fields))
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def new_cache(model: Any, mode: str, batch: int, capacity: int) -> MGKCache:
    """Create a cache as `generate()` does, but with memory reserved in both modes."""
    if mode == "static":
        return MGKCache(model.mgk.new_cache(batch), capacity)
    return MGKCache(model.mgk.new_cache(batch, capacity))


def fill(cache: MGKCache, model: Any, length: int) -> None:
    """Append random keys and values to every layer."""
    attention = model.mgk.encoder.stack.layers[0].attention
    components = (attention.num_components,) if attention.variant == "mgk" else ()
    for layer in stack_of(cache).layers:
        shape = (layer.batch_size, attention.num_heads)
        key, value = (
            torch.randn(*shape, *extra, length, attention.head_dim, device=model.device, dtype=model.dtype)
            for extra in (components, ())
        )
        assert isinstance(layer, KeyValueCache)  # softmax, MGK and sMGK have this kind
        layer.append(key, value)


@torch.no_grad()
def check(model: Any, mode: str) -> float:
    """Return the largest error of stepwise logits, relative to the largest logit; raise if it is too large."""
    batch, prompt, steps = CHECKED
    tokens = torch.randint(1, model.config.vocabulary, (batch, prompt + steps), device=model.device)
    expected = model(tokens).logits[:, prompt - 1 :]
    cache = new_cache(model, mode, batch, prompt + steps)
    found = [model(tokens[:, :prompt], past_key_values=cache, logits_to_keep=1).logits]
    for position in range(prompt, prompt + steps):
        mask = torch.ones_like(tokens[:, : position + 1])
        found.append(model(tokens[:, position : position + 1], attention_mask=mask, past_key_values=cache).logits)
    error = float((torch.cat(found, 1) - expected).abs().max() / expected.abs().max())
    if not error <= LIMITS[model.dtype]:
        raise RuntimeError(f"{mode}: logits have a relative error of {error:.1e}; a wrong result is not timed")
    return error


def seconds(model: Any, cache: MGKCache, tokens: torch.Tensor, new: int) -> float:
    """Return the time that `generate()` takes for `new` tokens, and crop the cache to its length before."""
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


def measure(method: str, mode: str, case: Case, device: str) -> dict[str, Any]:
    """Check and time one method in one mode."""
    model = make(method, case, device)
    backend = MODES[mode]
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        error = check(model, mode)
        cache = new_cache(model, mode, case.batch, case.cache + case.many)
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
        "mode": mode,
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
    """Compare the fastest mode of each method with the fastest mode of softmax."""
    timed = sorted((row for row in rows if "failed" not in row), key=lambda row: float(row["tokens_per_second"]))
    best = {row["method"]: row for row in timed}  # the last of each name is its fastest
    if BASELINE not in best:
        return {}
    base = best[BASELINE]
    return {
        name: {
            "mode": row["mode"],
            "speedup": row["tokens_per_second"] / base["tokens_per_second"],
            "cache": row["cache_bytes"] / base["cache_bytes"],
        }
        for name, row in best.items()
    }


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table of all measurements and a line for each method."""
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["method"], "", row["mode"], row["failed"], "", "", ""])
            continue
        numbers = [f"{row['milliseconds']:.2f}", f"{row['tokens_per_second']:.0f}"]
        numbers += [f"{row['cache_bytes'] / 2**30:.2f}", f"{row['cache_bytes_per_second'] / 1e12:.2f}"]
        lines.append([row["method"], str(row["heads"]), row["mode"], *numbers])
    table = Table(["model", "heads", "mode", "ms/step", "tokens/s", "cache GiB", "TB/s"], lines).markdown()
    return table + "\n".join(
        f"{name} ({each['mode']}): {each['speedup']:.2f}x the tokens/s of softmax, {each['cache']:.2f}x its cache"
        for name, each in summary(rows).items()
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/generate-cuda.json"))
    parser.add_argument("--tiny", action="store_true", help="sizes small enough for a CPU, to see that it runs")
    parser.add_argument("--layers", type=int, default=0, help="layers of the models; 12 if not given")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = TINY if chosen.tiny else Case()
    if chosen.layers:
        case = dataclasses.replace(case, layers=chosen.layers)
    transformers.utils.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    facts = environment()
    facts["versions"]["transformers"] = transformers.__version__
    result: dict[str, Any] = {"environment": facts, "case": vars(case), "rows": rows}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for method in chosen.methods:
        for mode, backend in MODES.items():
            if backend is not None and (method != BASELINE or device == "cpu"):
                continue
            try:
                rows.append(measure(method, mode, case, device))
            except RuntimeError as reason:  # e.g. a kernel that is missing; continue with the others
                rows.append({"method": method, "mode": mode, "failed": str(reason).splitlines()[0]})
            print(rows[-1], flush=True)
            result["summary"] = summary(rows)
            write_json(chosen.output, result)  # keep what is measured if something fails later
            if device == "cuda":
                torch.cuda.empty_cache()
    print(report(rows))
    return result


if __name__ == "__main__":
    main()
