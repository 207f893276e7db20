"""A first use of an installed package: python .ci/smoke.py [commands]. Needs no test library.

Without arguments it needs torch and numpy alone. With `commands` it tries the command line too, which needs mgk[train].
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

import torch

import mgk
from mgk.nn import MixtureAttention

WIDTH, LENGTH = 16, 50


def operators() -> None:
    """Every implementation that this machine has gives the result of the reference."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, LENGTH, WIDTH)
    shift = torch.randn(2, 2, WIDTH, requires_grad=True)
    expected = mgk.smgk_attention(query, key, shift, value, impl="reference")
    for impl in ("auto", "blockwise", *(("native",) if native() else ())):
        found = mgk.smgk_attention(query, key, shift, value, impl=impl)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert shift.grad is not None


def native() -> bool:
    """Whether the package has its compiled CPU kernels."""
    return any("_native_" in path.name for path in resources.files("mgk.ops.native").iterdir())


def module() -> None:
    attention = MixtureAttention(embed_dim=64, num_heads=2, head_dim=WIDTH, causal=True)
    x = torch.randn(2, LENGTH, 64)
    assert attention(x, x, x)[0].shape == x.shape


def commands() -> None:
    """The command line prepares data, trains on it, evaluates the run and draws its page."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"Line {number} of a text that is easy to learn.\n" for number in range(1000)))
        small = "--model.layers 1 --model.width 16 --model.hidden 16 --model.max-length 32 --steps 4 --workers 0"
        for words in (
            "--version",
            "data prepare text text.txt --data-root data",
            f"train lm --data.name text --data-root data {small} --device cpu --out run",
            "eval run --device cpu",
            "explore run --out page.html",
        ):
            subprocess.run([sys.executable, "-m", "mgk", *words.split()], check=True, cwd=folder)
        assert (Path(folder) / "page.html").stat().st_size > 10_000


def main(words: list[str]) -> None:
    assert metadata.version("mgk") == mgk.__version__
    operators()
    module()
    if "commands" in words:
        commands()
    print(f"mgk {mgk.__version__} in {Path(mgk.__file__).parent}: works, native kernels: {'yes' if native() else 'no'}")


if __name__ == "__main__":
    main(sys.argv[1:])
