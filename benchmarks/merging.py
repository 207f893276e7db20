"""Halve the heads of models that this project trained, in three ways: `python -m benchmarks.merging`.

For a language model on bytes of Wikipedia and a classifier of reviews, both softmax, or for the run of `--run`:

1. Train it with `mgk.train`, or use the run in `--runs`.
2. Merge its heads in pairs into heads with mixture keys ("merge"), drop every second one ("drop"), or replace every two
   heads of keys and values by their mean, which makes grouped queries ("pool").
3. Fine-tune for a tenth of the steps: the three smaller models, and the original, so that the gain from more training
   is not attributed to merging. The learning rate of each is chosen on the validation set.
4. Evaluate all on the test set, before and after fine-tuning.

On a CPU in a minute: python -m benchmarks.merging --models enwik8 --steps 100 100 --rates 1e-3 --windows 16 128
                        --set model__layers=2 model__width=64 model__hidden=128 model__max_length=128 data__batch=8
A trained model, such as the study's with 124 M weights: python -m benchmarks.merging --run runs/lm-small
"""
# mypy: disallow-untyped-calls=False
# Transformers is typed in part.

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.environment import environment
from mgk.files import write_json
from mgk.hf.batches import Texts, texts_of_run
from mgk.hf.convert import from_run
from mgk.merge.merge import METHODS, merge_heads
from mgk.merge.tuning import finetune, outputs
from mgk.recipes import recipe
from mgk.train import config as run_config
from mgk.train import replace, train
from mgk.train.config import Config

SHARE = 10  # training steps of the original per step of fine-tuning
RATES = (3e-4, 1e-3, 3e-3)
CALIBRATION = {"enwik8": (128, 256), "imdb": (8, 1024)}  # windows and their length
VALID = 60  # batches


def settings_of(name: str, steps: int) -> Config:
    """Return the recipe with all heads and few steps, a tenth of them for warm-up."""
    base = recipe("enwik8")
    if name == "imdb":  # a quarter of the length and a higher learning rate: trained in seconds
        base = replace(recipe("lra-text"), model__max_length=1024, optimiser__lr=5e-4)
    part = max(1, steps // 10)
    base = replace(base, steps=steps, optimiser__warmup=part, eval_every=part, eval_batches=VALID, data__valid_batch=96)
    return replace(base, model__attention="softmax", model__heads=8)


@torch.no_grad()
def score(model: Any, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Return the mean loss and, for a classifier, the accuracy."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in batches:
        found = outputs(model, batch)
        labels = batch["labels"] if "labels" in batch else batch["shift_labels"]
        loss += float(found.loss) * labels.numel()
        count += labels.numel()
        if labels.dim() == 1:
            right += int((found.logits.argmax(-1).cpu() == labels).sum())
    return {"loss": loss / count} | ({"accuracy": right / count} if labels.dim() == 1 else {})


def tuned(model: Any, texts: Texts, steps: int, rates: tuple[float, ...]) -> tuple[Any, float]:
    """Fine-tune with every learning rate and return the best model on the validation set, with its rate."""
    found = []
    for lr in rates:
        torch.manual_seed(0)
        each = copy.deepcopy(model)
        finetune(each, texts.training(), steps=steps, lr=lr)
        found.append((score(each, texts.valid())["loss"], lr, each))
    _, lr, best = min(found, key=lambda item: item[0])
    return best, lr


def study(
    run: Path, data_root: str | None = None, rates: tuple[float, ...] = RATES,
    calibration: tuple[int, int] | None = None, tuning_steps: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Halve, fine-tune and evaluate the model of a run.

    Args:
        run: folder of the run.
        data_root: folder of its prepared data.
        rates: learning rates of the fine-tuning to choose from.
        calibration: windows to merge on, and their length.
        tuning_steps: steps of fine-tuning, at most a tenth of the run's; a tenth if not given.
    """
    settings = run_config.read(run / "config.json")
    windows = calibration or CALIBRATION.get(settings.data.name, (32, 256))
    texts = texts_of_run(settings, data_root, *windows, VALID)
    assert texts.test is not None
    model: Any = from_run(run)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    most = settings.steps // SHARE
    steps = most if tuning_steps is None else tuning_steps
    if not 0 < steps <= most:
        raise ValueError(f"--tuning-steps: expected 1 to {most}, a tenth of the run's, got {steps}")
    rows = []
    for method in ("original", *METHODS):
        heads = settings.model.heads
        row: dict[str, Any] = {
            "method": method,
            "heads": heads,
            "key_value_heads": settings.model.num_kv_heads or heads,
        }
        small = model
        if method != "original":
            small, report = merge_heads(model, texts.calibration(), method=method)
            row |= {"heads": report.heads[1], "key_value_heads": report.key_value_heads[1]}
            row |= {"affinity": report.affinity, "cache_per_token": report.cache[1]}
            full_cache = report.cache[0]
        row |= {"parameters": small.num_parameters(), "at_once": score(small, texts.test())}
        best, row["lr"] = tuned(small, texts, steps, rates)
        row["tuned"] = score(best, texts.test())
        rows.append(row)
        print(row, flush=True)
    rows[0]["cache_per_token"] = full_cache
    return {"data": settings.data.name, "steps": settings.steps, "tuning_steps": steps, "rows": rows}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the summary of a study, line by line."""
    base = found["rows"][0]["at_once"]
    yield f"{found['data']}: {found['steps']} steps, then {found['tuning_steps']} of fine-tuning"
    for row in found["rows"]:
        loss = row["tuned"]["loss"]
        text = f"  {row['method']:<9}{row['heads']}/{row['key_value_heads']} heads"
        text += f"  loss {row['at_once']['loss']:.4f} -> {loss:.4f}"
        text += f" ({100 * (loss / base['loss'] - 1):+.2f}% of the original)"
        if "accuracy" in base:
            points = 100 * (row["tuned"]["accuracy"] - base["accuracy"])
            text += (
                f"  accuracy {row['at_once']['accuracy']:.4f} -> {row['tuned']['accuracy']:.4f} ({points:+.2f} points)"
            )
        yield text + f"  cache {row['cache_per_token']} numbers per token, {row['parameters']:,} parameters"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.merging", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/merging.json"))
    parser.add_argument(
        "--runs", default="runs/merging", help="folder of the original models, enwik8 and imdb; trained if missing"
    )
    parser.add_argument("--run", type=Path, help="study this run instead: a softmax model with an even number of heads")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of the fine-tuning")
    parser.add_argument("--windows", type=int, nargs=2, help="windows of the calibration text, and their length")
    parser.add_argument(
        "--tuning-steps", type=int, help="at most a tenth of the steps of training, which is the default"
    )
    parser.add_argument("--models", nargs="*", default=["enwik8", "imdb"], choices=["enwik8", "imdb"])
    parser.add_argument("--steps", type=int, nargs=2, default=[2000, 6000], help="training steps of the two originals")
    parser.add_argument("--set", nargs="*", default=[], help="further fields of the configuration, NAME=JSON")
    parser.add_argument("--data-root", default=None)
    chosen = parser.parse_args(arguments)
    fields = {name: json.loads(value) for name, value in (each.split("=", 1) for each in chosen.set)}
    result: dict[str, Any] = {"environment": environment(), "studies": []}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"rates": tuple(chosen.rates), "tuning_steps": chosen.tuning_steps}
    options["calibration"] = tuple(chosen.windows) if chosen.windows else None
    sizes = dict(zip(("enwik8", "imdb"), chosen.steps, strict=True))
    for name in [chosen.run] if chosen.run else chosen.models:
        start, run = time.perf_counter(), Path(chosen.runs, name)
        if chosen.run:
            run = chosen.run
        else:
            settings = replace(settings_of(name, sizes[name]), **fields)
            train(settings, run, resume=True, data_root=chosen.data_root)
        trained = time.perf_counter() - start
        found = study(run, chosen.data_root, **options)
        result["studies"].append(found | {"seconds": [trained, time.perf_counter() - start - trained]})
        write_json(chosen.output, result)
        print("\n".join(lines(found)), flush=True)
    return result


if __name__ == "__main__":
    main()
