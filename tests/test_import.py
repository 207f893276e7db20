"""What importing the library costs, and what asking for an implementation by name means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mgk

TRITON = Path(mgk.ops.__path__[0], "triton", "__init__.py")


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)


def test_import_loads_no_optional_library() -> None:
    done = run("import sys, mgk; print(*{name.split('.')[0] for name in sys.modules})")
    assert done.returncode == 0, done.stderr
    assert not {
        "triton",
        "transformers",
        "matplotlib",
        "fla",
        "datasets",
        "tyro",
        "rich",
        "lightning",
        "lightning_fabric",
        "safetensors",
    } & set(done.stdout.split())


def test_the_core_needs_only_torch_and_numpy() -> None:
    """Without the packages of the extra `train`: the others import, training and the CLI say what to install."""
    hidden = "import sys\nfor name in ('lightning_fabric', 'lightning', 'tyro', 'rich', 'safetensors', 'matplotlib', "
    hidden += "'transformers', 'triton'): sys.modules[name] = None\n"
    done = run(hidden + "import mgk, mgk.nn, mgk.models, mgk.ops, mgk.variants, mgk.data, mgk.environment, mgk.tables")
    assert done.returncode == 0, done.stderr
    for module, message in {
        "mgk.train": "mgk.train needs lightning-fabric and safetensors; install with: pip install 'mgk[train]'",
        "mgk.recipes": "mgk.train needs lightning-fabric and safetensors; install with: pip install 'mgk[train]'",
        "mgk.cli": "the command line needs tyro and rich; install with: pip install 'mgk[train]'",
    }.items():
        done = run(hidden + f"import {module}")
        assert done.stderr.splitlines()[-1] == f"ImportError: {message}"


def test_public_names_exist() -> None:
    assert all(hasattr(mgk, name) for name in mgk.__all__)


@pytest.mark.skipif(not TRITON.exists(), reason="the Triton implementation is not there yet")
def test_triton_by_name_never_falls_back() -> None:
    """On CPU tensors, outside its interpreter, it raises an error that says so."""
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
