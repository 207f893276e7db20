"""A run small enough to be run many times: one layer on short ListOps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mgk.data
from mgk.recipes import recipe
from mgk.train import Config, replace

LISTOPS: dict[str, Any] = {"sizes": (300, 40, 40), "lengths": (6, 30), "depth": 3, "arguments": 4}
OPTIONS = tuple(f"{name}={list(v) if isinstance(v, tuple) else v}" for name, v in LISTOPS.items())


def prepare(root: Path) -> Path:
    mgk.data.prepare("listops", root=root, **LISTOPS)
    return root


def tiny(**changes: Any) -> Config:
    small: dict[str, Any] = {
        "model__layers": 1,
        "model__width": 16,
        "model__hidden": 16,
        "model__heads": 2,
        "model__head_dim": 8,
        "model__max_length": 32,
        "model__classifier_hidden": 16,
        "data__options": OPTIONS,
        "data__batch": 8,
        "data__pad_multiple": 16,
        "optimiser__warmup": 2,
        "optimiser__lr": 1e-2,
        "steps": 12,
        "eval_every": 4,
        "log_every": 2,
        "workers": 0,
        "device": "cpu",
    }
    return replace(recipe("lra-listops"), **(small | changes))


def log(run: Path, event: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def losses(run: Path, event: str = "train") -> list[float]:
    return [line["loss"] for line in log(run, event)]


def weights(run: Path) -> bytes:
    return (run / "last" / "model.safetensors").read_bytes()
