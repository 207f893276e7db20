"""What importing the library needs, and what naming an implementation means."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import mgk

OPTIONAL = ("lightning_fabric", "lightning", "rich", "safetensors", "matplotlib", "transformers", "triton")


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)


def without_optional(program: str) -> subprocess.CompletedProcess[str]:
    return run(f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\n{program}")


def test_the_core_needs_only_torch_and_numpy() -> None:
    done = without_optional(
        "import mgk, mgk.nn, mgk.ops, mgk.models, mgk.variants, mgk.data, mgk.tables\n"
        "assert 'torch.distributed.tensor' not in sys.modules"  # it takes a second
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["mgk.train", "mgk.recipes", "mgk.cli"])
def test_training_and_the_command_line_say_what_to_install(module: str) -> None:
    done = without_optional(f"import {module}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(": pip install 'mgk[train]'")


def test_public_names_exist() -> None:
    assert all(hasattr(mgk, name) for name in mgk.__all__)


def test_triton_by_name_raises_on_cpu_tensors() -> None:
    """Outside Triton's interpreter."""
    done = run(
        "import torch, mgk\n"
        "x = torch.randn(1, 1, 4, 16)\n"
        "try:\n"
        "    mgk.smgk_attention(x, x, torch.randn(1, 2, 16), x, impl='triton')\n"
        "except (ValueError, RuntimeError, ImportError) as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "impl" in done.stdout
    assert "triton" in done.stdout.lower()
    assert "cpu" in done.stdout.lower()
