"""Tokens per second of `generate()`, prefill included: our models with half the heads, softmax with all of them.

`python -m benchmarks.generate --budget 300`. The baseline is a Llama of Transformers of the same width, depth, heads
and vocabulary, with its dynamic cache and with its static cache, whose steps Transformers compiles. Ours have a static
cache, whose steps are one CUDA graph, compiled or not. Weights are random, prompts are random tokens, and every token
is the most probable one. Models are compared by their fastest ways. `--tiny` runs toy sizes on a CPU.

One call of `generate()` gives all numbers of a round: the host waits for the device after the prefill, after a few
steps and after the last one. Before anything is timed, decoding must agree with the model without a cache.

B batch, H heads, N positions of the prompt, D width of a head.
"""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mgk.environment import environment
from mgk.files import write_json
from mgk.hf import MGKConfig, MGKForCausalLM
from mgk.tables import Table

METHODS: dict[str, dict[str, Any]] = {
    "llama": {},
    "sMGK soft": {"attention": "smgk"},
    "softmax": {"attention": "softmax"},
    "sMGK hard": {"attention": "smgk", "e_step": "hard"},
    "MGK soft": {"attention": "mgk"},
}
BASELINE = "llama"
STATIC: dict[str, Any] = {"cache_implementation": "static"}
WAYS: dict[str, list[str]] = {"llama": ["static", "dynamic"]}  # of the others: compiled and static
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": STATIC,
    "compiled": STATIC | {"compile_config": transformers.CompileConfig()},
}
POINTS = ((16, 8192), (1, 1024), (16, 32768), (1, 32768), (128, 1024), (16, 1024), (1, 8192), (128, 8192), (128, 32768))
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # error allowed, relative to the largest logit


@dataclass(frozen=True)
class Case:
    """Sizes of the models. Softmax uses all `heads`, a mixture half of them."""

    heads: int = 16
    width: int = 64
    layers: int = 12
    vocabulary: int = 32000
    few: int = 8
    many: int = 72
    rounds: int = 3


TINY = Case(heads=4, width=8, layers=2, vocabulary=50, few=3, many=6, rounds=1)


def make(method: str, case: Case, device: str) -> Any:
    """Build the language model of a method."""
    torch.manual_seed(0)
    inner = case.heads * case.width
    fields: dict[str, Any]
    if method == BASELINE:
        fields = {
            "hidden_size": inner, "num_hidden_layers": case.layers, "num_attention_heads": case.heads,
            "intermediate_size": 8 * inner // 3, "vocab_size": case.vocabulary, "max_position_embeddings": 65536,
            "tie_word_embeddings": True, "attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    else:
        fields = METHODS[method] | {
            "heads": case.heads if method == "softmax" else case.heads // 2, "head_dim": case.width, "width": inner,
            "hidden": 4 * inner, "layers": case.layers, "vocabulary": case.vocabulary, "cutoffs": (), "norm": "pre",
            "positions": "sinusoidal", "activation": "gelu", "output_bias": False,
        }  # fmt: skip
        model = MGKForCausalLM(MGKConfig(kind="language", **fields))
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


class Marks(transformers.StoppingCriteria):
    """Notes the time after some numbers of new tokens, when the device has computed them."""

    def __init__(self, prompt: int, wanted: tuple[int, ...]) -> None:
        self.prompt, self.wanted, self.times = prompt, wanted, {0: 0.0}

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        new = input_ids.shape[1] - self.prompt
        if new in self.wanted:
            synchronise(input_ids)
            self.times[new] = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def synchronise(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


@torch.no_grad()
def check(model: Any, way: str) -> float:
    """Return the largest error of the logits of `generate()` against those of a call without a cache, relative to the
    largest logit; raise if that is more than rounding.
    """
    prompt = torch.randint(1, model.config.vocab_size, (3, 24), device=model.device)
    options = call(OPTIONS[way], prompt, 6)
    found = model.generate(prompt, output_logits=True, return_dict_in_generate=True, **options)
    wanted = model(found.sequences).logits[:, prompt.shape[1] - 1 : -1].float()
    error = float((torch.stack(found.logits, 1).float() - wanted).abs().max() / wanted.abs().max())
    if not error <= LIMITS[model.dtype]:
        raise RuntimeError(f"{way}: logits have a relative error of {error:.1e}; a wrong result is not timed")
    return error


def call(options: dict[str, Any], prompt: Tensor, new: int) -> dict[str, Any]:
    mask = torch.ones_like(prompt)
    return options | {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def measure(model: Any, way: str, batch: int, length: int, case: Case) -> dict[str, Any]:
    """Time `generate()` in one way, from a prompt of this length."""
    prompt = torch.randint(1, case.vocabulary, (batch, length), device=model.device)
    rounds = []
    for number in range(case.rounds + 1):
        marks = Marks(length, (1, case.few, case.many))
        synchronise(prompt)
        start = time.perf_counter()
        out = model.generate(prompt, stopping_criteria=[marks], **call(OPTIONS[way], prompt, case.many))
        if out.shape[1] != length + case.many:
            raise RuntimeError(f"expected {case.many} tokens, got {out.shape[1] - length}")
        times = marks.times
        if number == 0:
            first = times[case.many] - start  # compiles and captures
            continue
        step = (times[case.many] - times[case.few]) / (case.many - case.few)
        rounds.append((step, times[1] - start))
    step, prefill = (statistics.median(each) for each in zip(*rounds, strict=True))
    return {
        "milliseconds": 1000 * step,
        "prefill_milliseconds": 1000 * prefill,
        "first_call_seconds": first,
        "tokens_per_second": batch / step,
        "tokens_per_second_with_prefill": batch * case.many / (prefill + step * (case.many - 1)),
    }


def rated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the ratio of tokens per second to the fastest way of the baseline at the same batch and length."""
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["method"] == BASELINE and "failed" not in row:
            point = row["batch"], row["length"]
            best[point] = max(best.get(point, 0.0), row["tokens_per_second"])
    for row in rows:
        if (row["batch"], row["length"]) in best and "failed" not in row:
            row["speed"] = row["tokens_per_second"] / best[row["batch"], row["length"]]
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = []
    for row in rows:
        line = [row["method"], row["way"], str(row["batch"]), str(row["length"])]
        if "failed" in row:
            lines.append([*line, row["failed"][:50], "", "", ""])
            continue
        numbers = [f"{row['milliseconds']:.2f}", f"{row['tokens_per_second']:.0f}"]
        numbers += [f"{row['speed']:.2f}" if "speed" in row else "", f"{row['prefill_milliseconds']:.1f}"]
        lines.append(line + numbers)
    header = ["model", "cache", "batch", "prompt", "ms/step", "tokens/s", "speed", "prefill ms"]
    return Table(header, lines).markdown()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/generate-cuda.json"))
    parser.add_argument("--tiny", action="store_true", help="sizes small enough for a CPU, to see that it runs")
    parser.add_argument("--methods", nargs="*", default=list(METHODS)[:2], choices=list(METHODS))
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no measurement starts")
    chosen = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case, points = (TINY, ((2, 20),)) if chosen.tiny else (Case(), POINTS)
    transformers.utils.logging.set_verbosity_error()
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    errors: dict[tuple[str, str], float] = {}
    models = {name: make(name, case, device) for name in chosen.methods}
    facts = environment()
    facts["versions"]["transformers"] = transformers.__version__
    result: dict[str, Any] = {"environment": facts, "case": vars(case), "rows": rows}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for batch, length in points:
        for method, model in models.items():
            for way in WAYS.get(method, ["compiled", "static"]):
                if time.monotonic() - start > chosen.budget:
                    continue
                row: dict[str, Any] = {"method": method, "way": way, "batch": batch, "length": length}
                try:
                    if (method, way) not in errors:
                        errors[method, way] = check(model, way)
                    row |= {"error": errors[method, way]} | measure(model, way, batch, length, case)
                except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as reason:  # e.g. out of memory
                    row["failed"] = str(reason).splitlines()[0]
                rows.append(row)
                print(row, flush=True)
                rated(rows)
                write_json(chosen.output, result)  # keep what is measured if something fails later
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
    print(report(rows))
    return result


if __name__ == "__main__":
    main()
