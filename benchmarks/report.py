"""Write docs/performance.md and the table of gains in the README from the records in results/.

    python -m benchmarks.report            # after a record has changed
    python -m benchmarks.report --check    # exits with 1 if a page does not follow from the records

No number on these pages is typed by hand. B batch, H heads of softmax (a mixture has half), N positions, D width of a
head.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgk.files import write_text
from mgk.intervals import difference
from mgk.tables import Table

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- gains: written by `python -m benchmarks.report` -->", "<!-- end of gains -->"
METHODS = {"smgk soft": "sMGK", "smgk hard": "sMGK, hard E-step", "mgk soft": "MGK", "mgk hard": "MGK, hard E-step"}
SIZES = {"gpt2": "GPT-2 small", "350m": "350 million", "nano": "nano", "lra": "LRA text"}
TRAINED = {"plain": "softmax in plain PyTorch", "softmax": "softmax", "smgk": "sMGK", "mgk": "MGK"}
# (attention, N, heads) of the training steps in the README.
GAINS = {("smgk", 1024, "6"), ("smgk", 4096, "6"), ("smgk", 16384, "6"), ("smgk", 4096, "12")}
Row = dict[str, Any]


def load(name: str, results: Path) -> Row:
    """Read a record."""
    found: Row = json.loads((results / f"{name}.json").read_text())
    return found


def machine(record: Row) -> str:
    """Return where a record was made, in short: "H200, torch 2.11.0, Triton 3.6.0"."""
    made = record["environment"]
    versions = made.get("versions", made)
    if gpu := made.get("gpu") or ("NVIDIA" in made["device"] and made["device"]):
        words = [gpu.removeprefix("NVIDIA "), f"torch {versions['torch']}", f"Triton {versions['triton']}"]
    else:
        words = [f"{made['threads']} cores of an {made['device']}", f"torch {versions['torch']}"]
    return ", ".join(word.partition("+")[0] for word in words)


def provenance(record: Row) -> str:
    """Return the sentence that follows a table: machine, commit, date and command."""
    made = record["environment"]
    when = f", {made['time'][:10]}" if "time" in made else ""
    command = re.sub(" --output [^ ]+", "", " ".join(made.get("command", ())))
    return f"Measured on: {machine(record)}; commit {made['commit']}{when}" + (f", `{command}`." if command else ".")


def steps(record: Row) -> Iterator[tuple[Row, Row, Row]]:
    """Yield (row, its times, the row of the baseline) of every model in the training record that was timed."""
    for group in record["groups"].values():
        base = next((row for row in group["rows"] if row["method"] == "plain" and "steps" in row), None)
        for row in group["rows"]:
            if base and "steps" in row:
                yield row, row["steps"], base


def trained(row: Row) -> str:
    """Name the model of a row of the training record: "sMGK, 6 heads"."""
    attention, _, heads = str(row["method"]).partition(":")
    name = TRAINED.get(attention, attention)
    return f"{name}, {heads.replace(':hard', ' (hard E-step)')} heads" if heads else name


def training(record: Row) -> str:
    """The table of whole training steps."""
    header = ["model", "N", "ms per step", "speed", "of the GPU's peak", "memory", "million weights", "first step"]
    body = [
        [
            f"{SIZES.get(row['size'], row['size'])}, {trained(row)}", f"{row['length']:,}",
            f"{times['milliseconds']:.1f}", f"{times['speed']:.2f}x", f"{times['utilisation']:.0%}",
            f"{row['memory']:.2f}x", f"{row['parameters'] / 1e6:.0f}", f"{row['first_step_seconds']:.0f} s",
        ]
        for row, times, _ in steps(record)
    ]  # fmt: skip
    return Table(header, body).markdown() + "\n" + provenance(record)


def shape(values: list[Any]) -> str:
    batch, heads, length, width, causal = values
    return f"{batch}, {heads}, {length:,}, {width}{' causal' if causal else ''}"


def kernels(record: Row) -> str:
    """The table of attention alone on a GPU, and under it that of one query with a long cache, if it was measured."""
    rows = [row for row in record["operators"] if "speedup" in row and row["method"] in METHODS]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        times = f"{row['speedup']['train']:.2f} ({row['speedup']['forward']:.2f})"
        cells.setdefault(shape(row["shape"]), {})[row["method"]] = times
    body = [[name, *(found.get(method, "-") for method in METHODS)] for name, found in cells.items()]
    if "decode" in record:
        speed = record["decode"]["speedup"]
        batch, heads, length, width, _ = record["decode"]["shape"]
        name = f"{batch}, {heads}, one query, cache {length:,}, {width}"
        body.append([name, *(f"{speed[method]:.2f}" for method in METHODS)])
    memory = [row["memory"] for row in rows]
    return "\n".join(
        [
            Table(["B, H, N, D", *METHODS.values()], body).markdown(),
            f"Peak memory of forward and backward beyond the inputs: {min(memory):.2f} to {max(memory):.2f} times "
            "that of the best softmax backend.\n",
            provenance(record),
        ]
    )


def generation(record: Row) -> list[tuple[str, int, int, int, float, float]]:
    """Return (model, its heads, batch, cache, tokens per second, ratio to softmax), each with its fastest cache."""
    case = record["case"]
    baseline = "llama" if any(row["method"] == "llama" for row in record["rows"]) else "softmax"
    best: dict[tuple[str, int, int], float] = {}
    for row in record["rows"]:
        if "tokens_per_second" in row:
            point = row["method"], row.get("batch", case.get("batch", 1)), row.get("length", case.get("cache", 0))
            best[point] = max(best.get(point, 0.0), row["tokens_per_second"])
    return [
        (method, case["heads"] // (1 if method in ("llama", "softmax") else 2), batch, length, rate, rate / base)
        for (method, batch, length), rate in best.items()
        if (base := best.get((baseline, batch, length)))
    ]


def generating(record: Row) -> str:
    """The table of generated tokens per second."""
    body = [
        [f"{method}, {heads} heads", str(batch), f"{length:,}", f"{rate:,.0f}", f"{ratio:.2f}x"]
        for method, heads, batch, length, rate, ratio in generation(record)
    ]
    case = record["case"]
    about = f"Models of {case['layers']} layers, softmax with {case['heads']} heads of width {case['width']}."
    table = Table(["model", "batch", "cached positions", "tokens/s", "speed"], body).markdown()
    return f"{table}\n{about} {provenance(record)}"


def on_cpu(record: Row) -> str:
    """The table of attention alone on a CPU."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in record["rows"]:
        if row["method"] in METHODS:
            case = row["case"]
            name = shape([case[key] for key in ("batch", "heads", "length", "width", "is_causal")])
            cells.setdefault((name, row["direction"]), {})[row["method"]] = f"{row['speedup']:.2f}"
    body = [[name, direction, *(found.get(m, "-") for m in METHODS)] for (name, direction), found in cells.items()]
    table = Table(["B, H, N, D", "direction", *METHODS.values()], body, left=(0, 1)).markdown()
    load = f" The machine's load was {record['environment']['load']}." if "load" in record["environment"] else ""
    return f"{table}\n{provenance(record)}{load}"


def growing(record: Row) -> str:
    """The figure and the table of time against length, if it was measured."""
    names = {"flash": "FlashAttention, 16 heads", "cudnn": "cuDNN, 16", "mgk": "MGK, 8", "smgk": "sMGK, 8"}
    if "growth" not in record:
        return "Not measured in this record."
    body = [[f"{int(n):,}", *(f"{times[name]:.1f}" for name in names)] for n, times in record["growth"].items()]
    return "![Milliseconds against the length of the sequence](growth.png)\n\n" + Table(
        ["N", *names.values()], body, left=()
    ).markdown() + "\n" + provenance(record)  # fmt: skip


def scores(task: str, row: str, results: Path) -> list[float]:
    """Return the test scores of a row of the study, one per seed."""
    return [json.loads(path.read_text())["test"] for path in sorted((results / "cells" / task).glob(f"{row}-s*.json"))]


def gains(results: Path) -> str:
    """The table of gains in the README."""
    header = ["what is measured", "mixture keys", "softmax", "result", "machine, versions and baseline"]
    rows = [*_models(results), *_kernels(results), *_cpu(results), *_quality(results)]
    return Table(header, rows, left=(0, 4)).markdown()


def _ratio(value: float) -> str:
    return f"{value:.2f}x, {'faster' if value > 1.03 else 'slower' if value < 0.97 else 'as fast'}"


def _models(results: Path) -> Iterator[list[str]]:
    """Whole models: training steps of GPT-2 small, and generated tokens with the longest cache."""
    record = load("training-cuda", results)
    for row, times, base in steps(record):
        attention, _, heads = row["method"].partition(":")
        if row["size"] == "gpt2" and (attention, row["length"], heads) in GAINS:
            what = f"training step of GPT-2 small, N = {row['length']:,}" + ", **equal heads**" * (heads == "12")
            ours, theirs = times["milliseconds"], base["steps"]["milliseconds"]
            where = f"{machine(record)}; plain PyTorch with `torch.compile`"
            yield [what, f"{ours:.1f} ms, {heads} heads", f"{theirs:.1f} ms, 12 heads", _ratio(theirs / ours), where]
    record = load("generate-cuda", results)
    found = generation(record)
    longest = max(point[3] for point in found)
    for method, heads, batch, length, rate, ratio in found:
        if method == "sMGK soft" and length == longest:
            what = f"tokens per second, batch {batch}, {length:,} tokens in the cache"
            theirs, where = f"{rate / ratio:,.0f}, {record['case']['heads']} heads", f"{machine(record)}; `generate()`"
            yield [what, f"{rate:,.0f}, {heads} heads", theirs, _ratio(ratio), where]


def _kernels(results: Path) -> Iterator[list[str]]:
    """Attention alone on a GPU, forward and backward."""
    record = load("bench-cuda", results)
    where = f"{machine(record)}; the fastest softmax kernel in PyTorch"
    for row in record["operators"]:
        _, heads, length, width, causal = row["shape"]
        if (
            "speedup" in row
            and row["method"] in ("smgk soft", "mgk soft")
            and (width, causal) in ((64, False), (128, True))
        ):
            what = f"attention alone, {METHODS[row['method']]}, N = {length:,}, D = {width}"
            speed, ours = row["speedup"]["train"], row["milliseconds"]["train"]
            yield [
                what,
                f"{ours:.2f} ms, {heads // 2} heads",
                f"{ours * speed:.2f} ms, {heads} heads",
                _ratio(speed),
                where,
            ]


def _cpu(results: Path) -> Iterator[list[str]]:
    """Attention alone on a CPU, forward and backward."""
    record = load("bench-cpu", results)
    where = f"{machine(record)}; PyTorch's softmax attention"
    for row in record["rows"]:
        case, ours, speed = row["case"], row["milliseconds"], row["speedup"]
        if case["name"] in ("lra-1024", "short-16") and (row["method"], row["direction"]) == (
            "smgk soft",
            "forward+backward",
        ):
            what = f"attention alone on a CPU, sMGK, N = {case['length']:,}, D = {case['width']}"
            theirs = f"{ours * speed:.2f} ms, {case['heads']} heads"
            yield [what, f"{ours:.2f} ms, {row['heads']} heads", theirs, _ratio(speed), where]


def _quality(results: Path) -> Iterator[list[str]]:
    """Test scores of sMGK with 4 heads and softmax with 8, of the longest trainings there are."""
    for task, what in (
        ("enwik8", "test bits per byte, enwik8 (lower is better)"),
        ("text", "test accuracy in %, LRA text"),
    ):
        ours, theirs = (scores(task, row, results) for row in ("smgk-h4", "softmax-h8"))
        record = json.loads((results / "cells" / task / "smgk-h4-s0.json").read_text())
        gpu, where = record["gpu"].removeprefix("NVIDIA "), f"{record['parameters'] / 1e6:.1f} million weights"
        mean, base = statistics.mean(ours), statistics.mean(theirs)
        result = f"{100 * (mean / base - 1):+.1f}%, one seed"
        if found := difference(ours, theirs):
            result = f"{found.mean:+.1f} points ({found.low:+.1f} to {found.high:+.1f})"
        where = f"{gpu}, torch {record['versions']['torch']}; {where}, {record['steps']:,} steps, same training"
        yield [what, f"{mean:.4g}, 4 heads", f"{base:.4g}, 8 heads", result, where]


PAGE = """# Performance

This page is written by `python -m benchmarks.report` from the records in `results/`; do not edit it. Every table names
its machine, versions and commit. [Measure your own machine](#measure-your-own-machine) before you decide.

**What was asked**: is a model with mixture keys and half the heads faster than the same model with softmax and all
heads?

**What holds.** Attention alone is faster with sMGK at half the heads, on a GPU and on a CPU, except for very short
sequences. A whole training step gains less, because most of a step is not attention; the gain grows with the length.

**What does not.** With *equal* heads sMGK is slower than softmax: a component is not free. MGK (a projection per
component) gains little at head width 64 and loses at 128. Short sequences that are called one by one from Python wait
for Python, not for the GPU. Speed says nothing about quality: see [results](results.md).

## Whole training steps on a GPU

Forward, backward, clipping and AdamW in bfloat16, {tokens:,} tokens per step, random tokens. The baseline of each
length is a GPT-2 in plain PyTorch with `scaled_dot_product_attention` and `torch.compile`. Speed and memory are
relative to it.

{training}

## Attention alone on a GPU

Time of the fastest softmax backend of PyTorch at `H` heads divided by the time of mixture keys at `H/2` heads: forward
and backward, in brackets forward alone. Above 1, mixture keys are faster. bfloat16, replayed from CUDA graphs.

{kernels}

The records of later Triton versions and other cases are in [kernels](kernels.md).

## Time against length

Forward and backward of 32,768 tokens in sequences of length N, in milliseconds; heads of width 64.

{growth}

## Generation on a GPU

Tokens per second of `generate()`, each model with its fastest cache.

{generation}

## Attention alone on a CPU

As above: PyTorch's softmax attention at `H` heads divided by mixture keys at `H/2`, float32.

{cpu}

## Measure your own machine

```sh
mgk bench
```

It compares sMGK and MGK at half the heads with PyTorch at all heads, on the GPU if there is one. It checks every result
against float64 before it is timed. `mgk bench --plan` prints which kernels you get. The tables above come from a
checkout:

<!-- not run: needs an H200 -->
```sh
python -m benchmarks.training --budget 600
python -m benchmarks.attention --device cuda
python -m benchmarks.attention --device cpu --rounds 9
python -m benchmarks.generate --budget 600
python -m benchmarks.report
```
"""


def performance(results: Path) -> str:
    """Return docs/performance.md."""
    record, attention = load("training-cuda", results), load("bench-cuda", results)
    return PAGE.format(
        tokens=record["tokens"],
        training=training(record),
        kernels=kernels(attention),
        growth=growing(attention),
        generation=generating(load("generate-cuda", results)),
        cpu=on_cpu(load("bench-cpu", results)),
    )


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Return the text that each page must have, by its path."""
    readme = root / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    results = root / "results"
    return {
        readme: f"{before}{BEGIN}\n\n{gains(results)}\n{END}{after}",
        root / "docs" / "performance.md": performance(results),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages differ")
    options = parser.parse_args(arguments)
    differ = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in differ:
        print(f"{path.relative_to(ROOT)} {'does not follow from results/' if options.check else 'written'}")
    if not options.check:
        for path, text in pages().items():
            write_text(path, text)
    return int(options.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
