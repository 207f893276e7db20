"""Convert a run of `mgk train` to a folder that Transformers can load, and back, without loss.

    FOLDER/config.json, model.safetensors, tokenizer.json, README.md     what Transformers reads, and the model card
           mgk_run/config.json, run.json, log.jsonl, result.json, ...    the record of the run, to convert back
           mgk_sums.json                                                 checksums of all of these but the card

A weight has the same name in both, with the prefix "mgk." in the folder.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import pickle
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mgk.data import DataError
from mgk.files import new_folder, read_json, write_json, write_text
from mgk.hf.card import model_card
from mgk.hf.config import MGKConfig
from mgk.hf.models import CLASSES, MGKPreTrainedModel
from mgk.hf.tokenizer import image_processing, tokenizer_of
from mgk.merge.sums import WRITTEN, check_sums, write_sums
from mgk.ops.arguments import describe
from mgk.train import checkpoint, load_model
from mgk.train import config as run_config
from mgk.train.config import Config, DataConfig
from mgk.train.data import load as load_data
from mgk.train.data import root_of

RECORD = "mgk_run"
RECORDED = ("config.json", "run.json", "log.jsonl", "result.json")
SUMMED = (*WRITTEN, "preprocessor_config.json", "tokenizer*", "special_tokens_map.json", f"{RECORD}/*")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def from_run(run: str | Path, which: str = "best") -> MGKPreTrainedModel:
    """Load the "best" or "last" checkpoint of a run as a Transformers model, in evaluation mode."""
    inner, settings = load_model(run, which)
    padding = None if settings.kind in ("language", "vision") else 0
    if settings.kind not in CLASSES:
        raise ValueError(f"{run}: expected a run of a {' or '.join(CLASSES)} model, got one of {settings.kind}")
    model = CLASSES[settings.kind](MGKConfig.from_model(settings.model, pad_token_id=padding))
    model.mgk = inner
    model.eval()
    return model


def run_to_hf(
    run: str | Path, out: str | Path, *, which: str = "best", state: bool = False, data_root: str | Path | None = None
) -> Path:
    """Convert a run to a folder that Transformers can load, with its tokenizer, a model card and the run's record.

    Args:
        run: folder of the run.
        out: folder to write, new or empty.
        which: checkpoint, "best" or "last".
        state: include the optimiser's state (twice the size of the weights), so that the run can be resumed after
            `hf_to_run`.
        data_root: folder of the prepared data sets. The tokenizer is built from the run's data set; if that is not
            prepared, no tokenizer is written.
    """
    run, out = Path(run), empty(out)
    model = from_run(run, which)
    settings = run_config.read(run / "config.json")
    names = ("config.json", "run.json", "result.json")
    config, starts, result = (read_json(run / name) if (run / name).exists() else None for name in names)
    record = {"config": config, "result": result, **(starts or {})}
    facts = checkpoint.read_facts(run / which)
    with writing(out) as unfinished:
        try:
            save_with_card(model, unfinished, settings, root_of(run, data_root), record)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{run}: expected the run.json and result.json of mgk train, got others: {error!r}"
            ) from error
        kept = unfinished / RECORD
        _copy(RECORDED, run, kept)
        if starts is not None:  # paths of this machine stay here
            shown = [{name: value for name, value in each.items() if name != "data_root"} for each in starts["starts"]]
            write_json(kept / "run.json", starts | {"starts": shown})
        write_json(kept / "checkpoint.json", facts | {"which": which})
        if state:
            shutil.copyfile(run / which / "state.pt", kept / "state.pt")
        write_sums(unfinished, SUMMED)
    return out


def save_with_card(
    model: Any, out: Path, settings: Config, data_root: str | Path | None, record: dict[str, Any] | None = None
) -> None:
    """Save a model with its card and, if the data set of `settings` is prepared, its tokenizer or image processor."""
    model.save_pretrained(out)
    try:
        prepared = load_data(settings, data_root)
    except DataError:
        prepared = None
    tokenizer = None if prepared is None else tokenizer_of(prepared)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    elif prepared is not None:
        write_json(out / "preprocessor_config.json", image_processing(prepared))
    write_text(out / "README.md", model_card(model.config, model.num_parameters(), record))


def hf_to_run(folder: str | Path, out: str | Path, *, data: str = "") -> Path:
    """Convert a folder of a Transformers model to a run, for `mgk eval`, `mgk explore` and `mgk train --resume`.

    `--resume` needs a folder that was written with `state=True`.

    Args:
        folder: folder of a model of `mgk.hf`.
        out: folder to write, new or empty.
        data: name of the data set, for a model that does not come from a run.
    """
    folder, out = Path(folder), empty(out)
    check_model(folder)
    check_sums(folder, deep=True)
    given = MGKConfig.get_config_dict(folder)[0].get("model_type")
    if given != MGKConfig.model_type:
        raise ValueError(f"{folder}: expected a model with model_type {MGKConfig.model_type!r}, got {given!r}")
    model: MGKPreTrainedModel = CLASSES[MGKConfig.from_pretrained(folder).kind].from_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.mgk.state_dict().items()}
    kept = folder / RECORD
    facts: dict[str, Any] = {"step": 0}
    if (kept / "config.json").exists():
        settings = dataclasses.replace(run_config.read(kept / "config.json"), model=model.config.to_model())
        facts = read_json(kept / "checkpoint.json")
    elif data:
        settings = Config("converted", model.config.to_model(), DataConfig(data))
    else:
        raise ValueError(f"data: expected the name of a data set, since {folder} does not come from a run, got none")
    state = _state(kept / "state.pt")
    if not isinstance(facts, dict) or type(facts.get("step")) is not int:
        raise ValueError(f"{kept / 'checkpoint.json'}: expected the step of a checkpoint, got none")
    scores: dict[str, Any] = {name: facts[name] for name in ("valid", "best", "best_step") if name in facts}
    with writing(out) as unfinished:
        _copy(RECORDED[1:], kept, unfinished)
        write_text(unfinished / "config.json", run_config.dump(settings))
        checkpoint.save(unfinished, checkpoint.Checkpoint(facts["step"], weights, state, scores), best=True)
    return out


def _state(path: Path) -> dict[str, Any]:
    """Read an optimiser's state, from tensors and plain values only; {} if there is none."""
    if not path.exists():
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: damaged, or not the state of a run ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: expected the state of a run, got {describe(state)}")
    return state


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` once it is complete; a full disk is one line and leaves nothing."""
    try:
        with new_folder(out) as unfinished:
            yield unfinished
    except (OSError, SafetensorError, checkpoint.CheckpointError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        cause = error.__cause__ or error  # a CheckpointError advises to resume, which does not apply here
        told = " ".join(str(getattr(cause, "strerror", None) or cause).split())
        raise OSError(f"{out}: cannot be written ({told}); nothing was left there; free disk space") from None


def most_positions(config: Any) -> int | None:
    """Return the longest text that a model can read, or None if its positions are not learned."""
    rotary = getattr(config, "rope_parameters", None) is not None
    learned = getattr(config, "positions", "rotary" if rotary else "learned") == "learned"
    return getattr(config, "max_position_embeddings", None) if learned else None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of `mgk train`, not a Transformers model; both have a config.json."""
    try:
        return "recipe" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False


def check_model(folder: Path) -> None:
    """Check that a folder has a config.json."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: expected the folder of a run or of a model, found no config.json in it")


def empty(folder: str | Path) -> Path:
    """Check that a folder to write is new or empty, and return its path."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder, found files in it")
    return folder


def _copy(names: Sequence[str], source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
