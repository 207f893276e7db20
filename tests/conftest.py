"""One hypothesis profile for all tests: the same examples on every machine, and no clock."""

import os

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # before anything imports triton: what it decorates is compiled or interpreted for good
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns if nobody says

from hypothesis import settings

from tests.processes import quick_context

settings.register_profile("repeatable", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would import for longer than it works. Where they start is pinned down by a test of each caller without."""
    context = quick_context()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
