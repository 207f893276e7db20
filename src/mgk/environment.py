"""Code version, machine and package versions, recorded with every result; and the check for optional packages."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("mgk", "torch", "numpy", "safetensors", "lightning-fabric", "lightning", "triton")
OPTIONAL = {  # packages of the extra `train`, and the modules of which one must be there
    "lightning-fabric": ("lightning_fabric", "lightning"),
    "safetensors": ("safetensors",),
    "rich": ("rich",),
}


def require(user: str, *packages: str) -> None:
    """Raise an ImportError that names the missing ones of some packages of the extra `train`, and how to install them.

    Args:
        user: what needs them, for the message.
        packages: keys of `OPTIONAL`.
    """
    missing = [name for name in packages if not any(map(importlib.util.find_spec, OPTIONAL[name]))]
    if missing:
        raise ImportError(f"{user} needs {' and '.join(missing)}; install with: pip install 'mgk[train]'")


def commit() -> str:
    """Return the commit of this code: $MGK_COMMIT if set (for copies without .git), else that of the checkout.

    A "+" marks uncommitted changes. If this file is not part of a checkout the result is "unknown": a virtual
    environment may lie in the checkout of another project.
    """
    if given := os.environ.get("MGK_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict[str, Any]:
    """Time, command line, versions, commit and machine of this process."""
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
    """The command line, without the folder of the program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", module.name.removesuffix(".__main__")] if module else [Path(sys.argv[0]).name]
    return [*program, *sys.argv[1:]]
