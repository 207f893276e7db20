"""Which code, machine and versions made a number: written with every result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("mgk", "torch", "numpy", "safetensors", "lightning-fabric", "lightning", "triton")


def commit() -> str:
    """The commit this code comes from: what MGK_COMMIT says, for copies of a tree, or the checkout's, "+" if the tree
    differs from it; else "unknown".
    """
    if told := os.environ.get("MGK_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "machine": platform.machine(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
    }


def command() -> list[str]:
    """The command line, without the folder that the program lies in."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", module.name.removesuffix(".__main__")] if module else [Path(sys.argv[0]).name]
    return [*program, *sys.argv[1:]]
