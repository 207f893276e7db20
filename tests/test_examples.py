"""Every example runs, for a few steps, and does what it says."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

EXAMPLES = Path(__file__).parent.parent / "examples"
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_finetune_classifier() -> None:
    assert example("finetune_classifier").main(steps=25) > 0.9


def test_train_and_generate(capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = example("train_and_generate")
    text = module.main(steps=4)
    assert text.startswith("The Licens")
    assert "cache:" in capsys.readouterr().out


def test_convert_softmax() -> None:
    losses = example("convert_softmax").main(steps=60)
    assert losses["merge"] < losses["drop"]
    assert all(math.isfinite(loss) for loss in losses.values())


def test_operator_alone() -> None:
    assert example("operator_alone").main(steps=120) < 1.0 < math.log(11)  # log 11: what guessing costs


def test_vision() -> None:
    found = example("vision").main(steps=3)
    assert set(found) == {"softmax", "smgk"}


def test_export_model() -> None:
    assert example("export_model").main(("mlk",)) == 3


def test_tensor_parallel() -> None:
    """On four processes in tests/parallel; here on one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert example("tensor_parallel").main(steps=2) < 5.0
    finally:
        dist.destroy_process_group()
