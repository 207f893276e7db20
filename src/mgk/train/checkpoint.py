"""Checkpoints that survive a crash at any moment.

    RUN/checkpoints/step-00000500/model.safetensors   the weights
                                  state.pt            optimiser state and running sums, to resume
                                  checkpoint.json     step, scores, and the checksums of the other two
    RUN/last -> checkpoints/step-...                  the newest
    RUN/best -> checkpoints/step-...                  the best on the validation split

A folder is written under a temporary name, flushed and renamed. Then the links are replaced atomically, and folders
without a link are removed. So `last` always points to a complete checkpoint.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mgk.files import checksum, new_folder, point, write_json

FILES = ("model.safetensors", "state.pt")
TORCH_DISK = ("inline_container", "iostream error")  # parts of the message of torch.save if it cannot write


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at one step."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]
    """Values that `torch.load(weights_only=True)` can read: tensors, numbers, strings, lists and dictionaries."""
    facts: dict[str, Any]
    """Values for readers: scores and their step."""


def save(run: Path, checkpoint: Checkpoint, *, best: bool) -> None:
    """Write a checkpoint, make it the last (and the best), and remove those that are neither."""
    folder = run / "checkpoints" / f"step-{checkpoint.step:08d}"
    try:
        if not complete(folder):
            with new_folder(folder) as temporary:
                save_file(unique(checkpoint.weights), temporary / FILES[0])
                torch.save(checkpoint.state, temporary / FILES[1])
                files = {name: checksum(temporary / name) for name in FILES}
                facts = {"step": checkpoint.step, **checkpoint.facts, "files": files}
                write_json(temporary / "checkpoint.json", facts)
        point(run / "last", folder)
        if best:
            point(run / "best", folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # errors of three libraries for a full disk
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCH_DISK):
            raise
        before = run / "last"
        kept = (
            f"the checkpoint of step {read_facts(before)['step']} is kept" if before.exists() else "there is none yet"
        )
        raise CheckpointError(
            f"{folder}: cannot write the checkpoint ({getattr(error, 'strerror', None) or error}); {kept}; "
            "free disk space and continue with --resume"
        ) from error
    prune(run)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint; raise an error with advice if it is damaged."""
    facts = read_facts(folder)
    for name, expected in facts["files"].items():
        path = folder / name
        found = checksum(path) if path.exists() else None
        if found != expected:
            size = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
            raise CheckpointError(
                f"{path}: damaged (expected {expected['bytes']} bytes, SHA-256 {expected['sha256'][:12]}, found {size})"
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
    return "; start the run again in another --out"


def newest(run: Path) -> Path | None:
    """Return the checkpoint to resume from: the last, the best if the last was removed, or None."""
    return next((run / name for name in ("last", "best") if (run / name).exists()), None)


def prune(run: Path) -> None:
    """Remove the checkpoints that are neither the last nor the best."""
    kept = {(run / name).resolve() for name in ("last", "best") if (run / name).exists()}
    for folder in (run / "checkpoints").iterdir():
        if folder.resolve() not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def complete(folder: Path) -> bool:
    """Whether this step was written before: a run that is stopped right after an evaluation would write it twice."""
    try:
        return all(checksum(folder / name) == sums for name, sums in read_facts(folder)["files"].items())
    except (CheckpointError, OSError):
        return False


def unique(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the first name of each tensor: safetensors does not accept two names of one tensor (tied weights)."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        seen.setdefault(key, name)
    return {name: weights[name].contiguous() for name in seen.values()}
