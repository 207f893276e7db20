"""The part of a model card that says how heads were merged, and what that changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mgk.hf.card import plain
from mgk.tables import Table

PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModel": "feature-extraction",
}
METHODS = {
    "merge": "The heads were merged in pairs: one mixture-key head with two keys per position replaces two heads.",
    "drop": "Every second head was dropped.",
    "pool": "Every two key and value heads were replaced by their mean (grouped queries).",
}


def halved_card(report: dict[str, Any], auto: str) -> str:
    """Return the model card of a converted Transformers model.

    Args:
        report: the report of `mgk convert --heads-to-mixtures`.
        auto: the Auto class that loads the model.
    """
    pipeline = [f"pipeline_tag: {PIPELINES[auto]}"] if auto in PIPELINES else []
    name = str(report["model"])
    base = [] if Path(name).is_absolute() or len(Path(name).parts) > 2 else [f"base_model: {plain(name)}"]
    lines = ["---", "library_name: transformers", *pipeline, *base, "tags:", "- mgk", "- mixture-keys", "---", ""]
    lines += [
        f"# {plain(Path(name).name)}, {report['heads'][1]} heads", section(report),
        "```python", "import mgk.hf  # pip install 'mgk[hf]'", f"from transformers import {auto}", "",
        f'model = {auto}.from_pretrained("this folder or its name on the hub")', "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def section(report: dict[str, Any]) -> str:
    """Return the figures of a conversion as a section of a model card."""
    rows = [
        ["query heads of a layer", *_counts(report["heads"])],
        ["value heads of a layer", *_counts(report["key_value_heads"])],
        ["parameters", *_counts(report["parameters"])],
        ["numbers cached per token", *_counts(report["cache"])],
        *([f"loss, {name}", f"{report['loss']['before']:.4f}", f"{value:.4f}"] for name, value in _after(report)),
    ]
    lines = ["", "## Conversion of the heads", "", f"{METHODS[report['method']]} Converted with `mgk convert`.", ""]
    lines += [Table(["", "before", "after"], rows).markdown()]
    lines += [f"The loss is the {report['objective']}, on data that was not used for calibration and tuning."]
    if report["method"] == "merge":
        least, most = min(report["affinity"]), max(report["affinity"])
        lines += [f"The similarity of the merged pairs, 1 for equal heads, is {least:.2f} to {most:.2f} by layer."]
    return "\n".join([*lines, "", ""])


def _counts(pair: list[int] | tuple[int, int]) -> list[str]:
    return [f"{count:,}" for count in pair]


def _after(report: dict[str, Any]) -> list[tuple[str, float]]:
    names = {"merged": "not tuned", "tuned": f"after {report['steps']:,} steps of tuning"}
    return [(names[name], value) for name, value in report["loss"].items() if name in names]
