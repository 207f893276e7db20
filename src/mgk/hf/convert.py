"""A run of `mgk train` as a folder of Transformers, and back, without loss.

    FOLDER/config.json, model.safetensors, tokenizer.json, README.md     what Transformers reads, and the model card
           mgk_run/config.json, run.json, log.jsonl, result.json, ...    the record of the run, to go back

A weight is called in the one what it is called in the other, after "mgk.".
"""
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Transformers is typed in part.

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from mgk.data import DataError
from mgk.files import write_text
from mgk.hf.card import model_card
from mgk.hf.config import MGKConfig
from mgk.hf.models import (
    MGKForCausalLM,
    MGKForDocumentMatching,
    MGKForImageClassification,
    MGKForSequenceClassification,
    MGKPreTrainedModel,
)
from mgk.hf.tokenizer import tokenizer_of
from mgk.train import checkpoint, load_model
from mgk.train import config as run_config
from mgk.train.config import Config, DataConfig
from mgk.train.data import load as load_data

RECORD = "mgk_run"
RECORDED = ("config.json", "run.json", "log.jsonl", "result.json")
CLASSES: dict[str, type[MGKPreTrainedModel]] = {
    "classifier": MGKForSequenceClassification,
    "matcher": MGKForDocumentMatching,
    "language": MGKForCausalLM,
    "vision": MGKForImageClassification,
}


def from_run(run: str | Path, which: str = "best") -> MGKPreTrainedModel:
    """The model of a run, in evaluation mode."""
    inner, settings = load_model(run, which)
    model = CLASSES[settings.kind](MGKConfig.from_model(settings.model, pad_token_id=_padding(settings)))
    model.mgk = inner
    model.eval()
    return model


def run_to_hf(
    run: str | Path, out: str | Path, *, which: str = "best", state: bool = False, data_root: str | Path | None = None
) -> Path:
    """Write a run as a folder of Transformers, with its tokenizer, a model card and the record of the run.

    Args:
        run: folder of the run.
        out: folder to write, new or empty.
        which: checkpoint, "best" or "last".
        state: the optimiser's state too (twice the size of the weights), so that after `hf_to_run` the run can go on.
        data_root: where prepared data sets are. A text's tokenizer is made from its set; without the set, none is
            written.
    """
    run, out = Path(run), empty(out)
    model = from_run(run, which)
    settings = run_config.read(run / "config.json")
    save_with_card(model, out, settings, data_root, _record(run))
    kept = out / RECORD
    kept.mkdir()
    for name in RECORDED:
        if (run / name).exists():
            shutil.copyfile(run / name, kept / name)
    facts = checkpoint.read_facts(run / which)
    (kept / "checkpoint.json").write_text(json.dumps(facts | {"which": which}, indent=1) + "\n")
    if state:
        shutil.copyfile(run / which / "state.pt", kept / "state.pt")
    return out


def save_with_card(
    model: MGKPreTrainedModel,
    out: Path,
    settings: Config | None = None,
    data_root: str | Path | None = None,
    record: dict[str, Any] | None = None,
) -> None:
    """`save_pretrained`, the card and, if the data of `settings` is at hand, the tokenizer."""
    model.save_pretrained(out)
    try:
        tokenizer = None if settings is None else tokenizer_of(load_data(settings, data_root))
    except DataError:
        tokenizer = None
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    write_text(out / "README.md", model_card(model.config, model.num_parameters(), record))


def hf_to_run(folder: str | Path, out: str | Path, *, data: str = "") -> Path:
    """Write a folder of Transformers as a run, for `mgk eval`, `mgk explore` and, if it has the state, `--resume`.

    Args:
        folder: of a model of `mgk.hf`.
        out: folder to write, new or empty.
        data: name of the data set, for a model that does not come from a run.
    """
    folder, out = Path(folder), empty(out)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected the folder of a run or of a model, found no config.json in it")
    model = load(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.mgk.state_dict().items()}
    kept = folder / RECORD
    facts: dict[str, Any] = {"step": 0}
    if (kept / "config.json").exists():
        settings = dataclasses.replace(run_config.read(kept / "config.json"), model=model.config.to_model())
        facts = json.loads((kept / "checkpoint.json").read_text())
    elif data:
        settings = Config("converted", model.config.to_model(), DataConfig(data))
    else:
        raise ValueError(f"data: expected the name of a data set, since {folder} does not come from a run, got none")
    saved = kept / "state.pt"
    state = torch.load(saved, map_location="cpu", weights_only=True) if saved.exists() else {}
    out.mkdir(parents=True, exist_ok=True)
    for name in RECORDED[1:]:
        if (kept / name).exists():
            shutil.copyfile(kept / name, out / name)
    write_text(out / "config.json", run_config.dump(settings))
    scores: dict[str, Any] = {name: facts[name] for name in ("valid", "best", "best_step") if name in facts}
    checkpoint.save(out, checkpoint.Checkpoint(facts["step"], weights, state, scores), best=True)
    return out


def load(folder: str | Path) -> MGKPreTrainedModel:
    """The model of a folder of Transformers, whichever task it is for."""
    given = MGKConfig.get_config_dict(folder)[0].get("model_type")
    if given != MGKConfig.model_type:
        raise ValueError(f"{folder}: expected a model with model_type {MGKConfig.model_type!r}, got {given!r}")
    config = MGKConfig.from_pretrained(folder)
    found: MGKPreTrainedModel = CLASSES[config.kind].from_pretrained(folder)
    return found


def most_positions(config: Any) -> int | None:
    """How long a text can be; None if positions are no table. Models of Transformers have one, or rotary positions."""
    rotary = getattr(config, "rope_parameters", None) is not None
    learned = getattr(config, "positions", "rotary" if rotary else "learned") == "learned"
    return getattr(config, "max_position_embeddings", None) if learned else None


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, and not one of Transformers; both have a config.json."""
    try:
        return "recipe" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False


def empty(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder, found files in it")
    return folder


def _padding(settings: Config) -> int | None:
    return None if settings.kind in ("language", "vision") else 0


def _record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"config": json.loads((run / "config.json").read_text())}
    if (run / "result.json").exists():
        found["result"] = json.loads((run / "result.json").read_text())
    if (run / "run.json").exists():
        found |= json.loads((run / "run.json").read_text())
    return found
