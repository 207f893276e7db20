"""Checkpoints that survive a crash at any moment.

    RUN/checkpoints/step-00000500/model.safetensors   the weights
                                  state.pt            optimiser state and running sums, to resume
                                  checkpoint.json     step, scores, step of the best checkpoint, checksums of the files
    RUN/last -> checkpoints/step-...                  the newest
    RUN/best -> checkpoints/step-...                  the best on the validation split

A checkpoint is written under a temporary name, flushed to disk and renamed. That one rename decides everything: the
last checkpoint is the one with the highest step, and it says which one is the best. The links are for people. They are
replaced after the rename, then other checkpoints are removed; `recover` does both again after a crash.

Runs of several processes with sharded weights have a folder `sharded` in place of the first file: see sharded.py.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mgk.files import checksum, new_folder, point, read_json, remove_folder, seal, tidy, write_json

WEIGHTS, STATE, FACTS, SHARDED = "model.safetensors", "state.pt", "checkpoint.json", "sharded"
FOLDER = re.compile(r"step-(\d{8,})")
TORCH_DISK = ("inline_container", "iostream error")  # parts of the message of torch.save if it cannot write
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read."""


class DiskFullError(CheckpointError):
    """There is no space for a checkpoint. Nothing is lost: it can be written later."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at one step."""

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]
    """Values that `torch.load(weights_only=True)` can read: tensors, numbers, strings, lists and dictionaries."""
    facts: dict[str, Any]
    """Values for readers: scores and their step."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay on disk, besides the last and the best."""

    newest: int = 1
    """Number of newest checkpoints."""
    every: int = 0
    """All whose step is a multiple of this; 0 is none."""


def save(run: Path, checkpoint: Checkpoint, *, best: bool, keep: Keep | None = None) -> None:
    """Write a checkpoint, make it the last (and the best), and remove those that need not be kept."""

    def fill(folder: Path) -> dict[str, Any]:
        save_file(unique(checkpoint.weights), folder / WEIGHTS)
        torch.save(checkpoint.state, folder / STATE)
        os.chmod(folder / WEIGHTS, (folder / STATE).stat().st_mode)  # safetensors lets only the owner read it
        return {}

    write(run, checkpoint.step, fill, checkpoint.facts, best=best, keep=keep)


def write(
    run: Path,
    step: int,
    fill: Callable[[Path], dict[str, Any]],
    facts: dict[str, Any],
    *,
    best: bool,
    keep: Keep | None = None,
) -> None:
    """Write the checkpoint of a step, whose files `fill(folder)` writes; it returns the checksums that it knows."""
    folder = folder_of(run, step)
    before = find(run)
    best_step = step if best else read_facts(before).get("best_step") if before else None
    try:
        with new_folder(folder) as temporary:
            known = fill(temporary)
            paths = sorted(path for path in temporary.rglob("*") if path.is_file())
            names = [path.relative_to(temporary).as_posix() for path in paths]
            files = {name: known.get(name) or checksum(temporary / name) for name in names}
            content = json.loads(json.dumps({"step": step, **facts, "best_step": best_step, "files": files}))
            write_json(temporary / FACTS, content | {"sha256": seal(content)})
        switch(run, keep or Keep())
    except (OSError, RuntimeError, SafetensorError) as error:  # errors of three libraries for a full disk
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCH_DISK):
            raise
        number = getattr(error, "errno", None)
        full = DiskFullError if number is None or number in FULL else CheckpointError
        kept = f"the checkpoint of step {steps(run)[-1]} is kept" if steps(run) else "there is none yet"
        raise full(
            f"{folder}: cannot write the checkpoint ({getattr(error, 'strerror', None) or error}); {kept}; "
            "free disk space and continue with --resume"
        ) from error


def switch(run: Path, keep: Keep) -> None:
    """Make the links point to the last and the best checkpoint, and remove those that need not be kept."""
    chosen = {name: folder for name in ("last", "best") if (folder := find(run, name)) is not None}
    for name, folder in chosen.items():
        if folder == run / name:  # a copy without the folder of checkpoints
            continue
        if (run / name).is_dir() and not (run / name).is_symlink():  # a copy in place of the link
            remove_folder(run / name)
        point(run / name, folder)
    known = steps(run)
    kept = {folder.name for folder in chosen.values()} | {folder_of(run, step).name for step in known[-keep.newest :]}
    for step in known:
        folder = folder_of(run, step)
        if folder.name not in kept and not (keep.every and step % keep.every == 0):
            remove_folder(folder)


def recover(run: Path, keep: Keep) -> None:
    """Finish or undo what a killed process was doing. Only the process that holds the lock of the run may call it."""
    tidy(run)
    tidy(run / "checkpoints")
    if find(run) is not None:
        switch(run, keep)


def steps(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order."""
    folder = run / "checkpoints"
    names = [FOLDER.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name[1]) for name in names if name)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def find(run: Path, which: str = "last") -> Path | None:
    """Return the folder of the last or the best checkpoint of a run; None if there is none."""
    known = steps(run)
    if not known:  # a copy may have only the folder itself
        return run / which if (run / which / FACTS).exists() else None
    last = folder_of(run, known[-1])
    if which == "last":
        return last
    facts = read_facts(last)
    if "best_step" not in facts:
        return run / which if (run / which).exists() else None
    best = facts["best_step"]
    return folder_of(run, best) if best in known else None


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint; raise an error with advice if it is damaged."""
    facts = verify(folder)
    if (folder / SHARDED).exists():
        from mgk.train.sharded import read_whole

        weights, state = nested(read_whole(folder / SHARDED))
    else:
        weights, state = read_weights(folder), {}
    return Checkpoint(facts["step"], weights, state | read_state(folder), facts)


def verify(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Compare the files of a checkpoint, or every `parts`-th of them, with their checksums; return its facts."""
    facts = read_facts(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    used = {name for name in present if name in (WEIGHTS, STATE) or name.startswith(f"{SHARDED}/")}
    for name in sorted(used | facts["files"].keys())[part::parts]:
        path, expected = folder / name, facts["files"].get(name)
        if name not in present:
            raise CheckpointError(f"{path}: damaged (expected a file of this folder, found none){advice(folder)}")
        if checksum(path) != expected:
            raise CheckpointError(
                f"{path}: damaged ({path.stat().st_size} bytes, whose checksum is not that in {FACTS}){advice(folder)}"
            )
    return facts


def read_weights(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        told = " ".join(str(error).split())
        raise CheckpointError(f"{folder / WEIGHTS}: not the weights of a model ({told}){advice(folder)}") from None


def read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        # PyTorch's own message proposes to load it unsafely.
        raise CheckpointError(
            f"{path}: not a state that mgk has written ({type(error).__name__}){advice(folder)}"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a dictionary, got {type(state).__name__}{advice(folder)}")
    return state


def read_facts(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    try:
        facts = read_json(path, advice(folder))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(facts.get("step"), int) or not isinstance(facts.get("files"), dict):
        raise CheckpointError(f"{path}: expected the fields step and files{advice(folder)}")
    # Runs of earlier checkouts have no checksum of the facts, and no text among them (tests/fixtures/v0.1.0).
    if any(isinstance(value, str) for value in facts.values()) and facts.pop("sha256", None) != seal(facts):
        raise CheckpointError(f"{path}: damaged (its own checksum differs){advice(folder)}")
    return facts


def advice(folder: Path) -> str:
    """Return how to continue without a damaged checkpoint."""
    folder = folder.resolve()
    run = folder.parent.parent
    others = [step for step in steps(run) if folder_of(run, step).name != folder.name]
    if others:
        return f"; remove {folder} to continue from step {others[-1]}"
    return "; start the run again in another --out"


def unique(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep the first name of each tensor: safetensors does not accept two names of one tensor (tied weights)."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        seen.setdefault(key, name)
    return {name: weights[name].contiguous() for name in seen.values()}


def nested(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the tensors of `Learner.tensors` into weights by name, and optimiser state by name and key."""
    weights: dict[str, Tensor] = {}
    optimiser: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "weights":
            weights[rest] = tensor
        else:
            parameter, _, key = rest.rpartition(".")
            optimiser.setdefault(parameter, {})[key] = tensor
    return weights, {"optimiser": optimiser}
