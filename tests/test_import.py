"""The public names exist, and an implementation that is named is used or raises an error."""

from __future__ import annotations

import os
import subprocess
import sys

import mgk


def test_public_names_exist() -> None:
    assert all(hasattr(mgk, name) for name in mgk.__all__)


def test_triton_by_name_raises_on_cpu_tensors() -> None:
    """Outside Triton's interpreter."""
    program = (
        "import torch, mgk\n"
        "x = torch.randn(1, 1, 4, 16)\n"
        "try:\n"
        "    mgk.smgk_attention(x, x, torch.randn(1, 2, 16), x, impl='triton')\n"
        "except (ValueError, RuntimeError, ImportError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "impl" in done.stdout
    assert "triton" in done.stdout.lower()
    assert "cpu" in done.stdout.lower()
