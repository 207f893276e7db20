"""Which code made a number: written with every result."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


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
