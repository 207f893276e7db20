"""Checkpoints that survive a crash at any moment.

    RUN/checkpoints/step-00000500/model.safetensors   the weights, for anyone
                                  state.pt            optimiser and running sums, to continue
                                  checkpoint.json     step, scores, and the sums of the other two
    RUN/last -> checkpoints/step-...                  the newest
    RUN/best -> checkpoints/step-...                  the best on the validation split

A folder is filled under another name, flushed and renamed; then the links are moved, each in one step; then what no
link points to is removed. So `last` always leads to a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mgk.files import new_folder, point, write_json

FILES = ("model.safetensors", "state.pt")
TORCH_DISK = ("inline_container", "iostream error")  # in what torch.save says where it cannot write


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run is at one step."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]
    """What `torch.load(weights_only=True)` may read: tensors, numbers, strings, lists and dictionaries."""
    facts: dict[str, Any]
    """What people read: scores, the step they are of."""


def save(run: Path, checkpoint: Checkpoint, *, best: bool) -> None:
    """Write a checkpoint, make it the last (and the best), and remove what is neither."""
    folder = run / "checkpoints" / f"step-{checkpoint.step:08d}"
    try:
        if not whole(folder):
            with new_folder(folder) as temporary:
                save_file(unique(checkpoint.weights), temporary / FILES[0])
                torch.save(checkpoint.state, temporary / FILES[1])
                sums = {name: digest(temporary / name) for name in FILES}
                facts = {"step": checkpoint.step, **checkpoint.facts, "files": sums}
                write_json(temporary / "checkpoint.json", facts)
        point(run / "last", folder)
        if best:
            point(run / "best", folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # three libraries, three names of a full disk
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCH_DISK):
            raise
        before = run / "last"
        kept = f"the checkpoint of step {read_facts(before)['step']} is whole" if before.exists() else "none was before"
        raise CheckpointError(
            f"{folder}: cannot write the checkpoint ({getattr(error, 'strerror', None) or error}); {kept}; "
            "make room and continue with --resume"
        ) from error
    prune(run)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint back; a damaged one is an error that says what to do."""
    facts = read_facts(folder)
    for name, expected in facts["files"].items():
        path = folder / name
        found = digest(path) if path.exists() else None
        if found != expected:
            size = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
            raise CheckpointError(
                f"{path}: damaged (expected {expected['bytes']} bytes with sum {expected['sha256'][:12]}, found {size})"
                + advice(folder)
            )
    state = torch.load(folder / FILES[1], map_location="cpu", weights_only=True)
    return Checkpoint(facts["step"], load_file(folder / FILES[0]), state, facts)


def read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoint.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}){advice(folder)}") from None
    return facts


def advice(folder: Path) -> str:
    other = folder.parent / ("best" if folder.name == "last" else "last")
    if other.exists() and other.resolve() != folder.resolve():
        return f"; remove {folder} to continue from {other}"
    return "; it was damaged after it was written: start the run again in another --out"


def newest(run: Path) -> Path | None:
    """Where to continue: the last checkpoint, the best if someone removed the last, none in a run not begun."""
    return next((run / name for name in ("last", "best") if (run / name).exists()), None)


def prune(run: Path) -> None:
    kept = {(run / name).resolve() for name in ("last", "best") if (run / name).exists()}
    for folder in (run / "checkpoints").iterdir():
        if folder.resolve() not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def whole(folder: Path) -> bool:
    """Whether this very step has been written before: stopped right after an evaluation, a run would write it again."""
    try:
        return all(digest(folder / name) == sums for name, sums in read_facts(folder)["files"].items())
    except (CheckpointError, OSError):
        return False


def digest(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def unique(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without second names of one tensor (tied weights), which safetensors refuses; the first name stays."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        seen.setdefault(place, name)
    return {name: weights[name].contiguous() for name in seen.values()}
