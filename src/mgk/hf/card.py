"""The model card (README.md) of a converted run, written from the run's own record."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from mgk.hf.config import MGKConfig
from mgk.hf.models import CLASSES
from mgk.tables import Table
from mgk.variants import LABELS, MIXTURES

OWN = "text"  # the data set of users' own files


def model_card(config: MGKConfig, parameters: int, record: dict[str, Any] | None = None) -> str:
    """Return the text of a model card.

    Args:
        config: the model's configuration.
        parameters: the number of its parameters.
        record: the record of a run, with any of "config" (of `mgk train`), "result" and "starts".
    """
    task, record = CLASSES[config.kind], record or {}
    settings, result = record.get("config"), record.get("result")
    data = settings["data"]["name"] if settings else ""
    mixture = f", {config.components} components each" if config.attention in MIXTURES else ""
    lines = [
        "---", "library_name: transformers", f"pipeline_tag: {task.pipeline}", "tags:", "- mgk",
        "- mixture-keys", *([f"datasets:\n- {json.dumps(data)}"] if data not in ("", OWN) else []), "---", "",
        f"# {plain(settings['recipe']) if settings else config.kind}, {config.attention}, {config.heads} heads", "",
        f"A transformer with {LABELS[config.attention]} attention: {config.layers} layers of width {config.width}, "
        f"{config.heads} heads of width {config.head_dim or config.width // config.heads}{mixture}; "
        f"{parameters:,} parameters.", "",
    ]  # fmt: skip
    if result and settings:
        splits = [split for split in ("valid", "test") if result.get(split)]
        rows = [[split, *(f"{value:.4f}" for value in result[split].values())] for split in splits]
        lines += [
            Table(["split", *map(plain, result["test"])], rows).markdown(),
            f"The checkpoint of step {result['best_step']:,d} of {settings['steps']:,d}, best on validation.", "",
        ]  # fmt: skip
    if settings:
        o = settings["optimiser"]
        lines += [
            f"Trained on {'a text that its author prepared' if data == OWN else plain(data)} with {plain(o['kind'])} "
            f"(learning rate {o['lr']:g}, {plain(o['schedule'])}), batches of {settings['data']['batch']:d}, "
            f"seed {settings['seed']:d}; the full record is in `mgk_run/`.",
            "",
        ]
    if record.get("starts"):
        start = record["starts"][-1]
        versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
        told = [plain(value) for value in (versions, start["commit"], start["gpu"] or start["machine"])]
        lines += ["Trained with {}, commit {}, on {}.".format(*told), ""]
    lines += [
        "```python", "import mgk.hf  # pip install 'mgk[hf]'", f"from transformers import {task.auto}", "",
        f'model = {task.auto}.from_pretrained("this folder or its name on the hub")', "```", "",
        "Without the import, `trust_remote_code=True` loads `modeling_mgk.py`, which imports `mgk.hf`; mgk must be "
        "installed either way.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def plain(text: object) -> str:
    """Return a text on one line, without meaning as Markdown or HTML: records may come from strangers."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return re.sub(r"([\\`*_\[\]#|!~])", r"\\\1", html.escape(line, quote=False))
