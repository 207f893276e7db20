"""The model card of a run: what it is, how it did, how to use it, all from the run's own record."""

from __future__ import annotations

from typing import Any

from mgk.hf.config import MGKConfig

TASKS = {
    "language": ("text-generation", "AutoModelForCausalLM"),
    "classifier": ("text-classification", "AutoModelForSequenceClassification"),
    "matcher": ("text-classification", "AutoModelForNextSentencePrediction"),
    "vision": ("image-classification", "AutoModelForImageClassification"),
}
NAMES = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "mgk": "mixtures of Gaussian keys (MGK)",
    "smgk": "mixtures of shifted Gaussian keys (sMGK)",
    "mlk": "mixtures of linear keys (MLK)",
    "smlk": "mixtures of shifted linear keys (sMLK)",
}


def model_card(config: MGKConfig, parameters: int, record: dict[str, Any] | None = None) -> str:
    """README.md of a model.

    Args:
        config: of the model.
        parameters: how many it has.
        record: of the run: "config" (of `mgk train`), "result" and "starts", as far as there are any.
    """
    task, auto = TASKS[config.kind]
    record = record or {}
    settings, result = record.get("config"), record.get("result")
    mixture = f", {config.components} components each" if config.attention not in ("softmax", "linear") else ""
    lines = [
        "---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", "- mgk", "- mixture-keys",
        *([f"datasets:\n- {settings['data']['name']}"] if settings else []), "---", "",
        f"# {settings['recipe'] if settings else config.kind}, {config.attention}, {config.heads} heads", "",
        f"A transformer with {NAMES[config.attention]}: {config.layers} layers of width {config.width}, "
        f"{config.heads} heads of width {config.head_dim or config.width // config.heads}{mixture}; "
        f"{parameters:,} parameters.", "",
    ]  # fmt: skip
    if result and settings:
        lines += ["| split | " + " | ".join(result["test"]) + " |", "| --- " * (len(result["test"]) + 1) + "|"]
        lines += [
            f"| {split} | " + " | ".join(f"{value:.4f}" for value in result[split].values()) + " |"
            for split in ("valid", "test")
            if result.get(split)
        ]
        lines += ["", f"The checkpoint of step {result['best_step']} of {settings['steps']}, best on validation.", ""]
    if settings:
        o = settings["optimiser"]
        lines += [
            f"Trained on `{settings['data']['name']}` with {o['kind']} (learning rate {o['lr']}, {o['schedule']}), "
            f"batches of {settings['data']['batch']}, seed {settings['seed']}; the whole record is in `mgk_run/`.",
            "",
        ]
    if record.get("starts"):
        start = record["starts"][-1]
        versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
        lines += [f"Made with {versions}, commit {start['commit']}, on {start['gpu'] or start['machine']}.", ""]
    lines += [
        "```python", "import mgk.hf  # pip install 'mgk[hf]'", f"from transformers import {auto}", "",
        f'model = {auto}.from_pretrained("this folder or its name on the hub")', "```", "",
    ]  # fmt: skip
    return "\n".join(lines)
