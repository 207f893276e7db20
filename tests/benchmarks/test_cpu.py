"""The memory gauge reads what a call holds at its peak, and no more."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.cpu import CASES, Cpu, cpu_model

MIB = 2**20
SLACK = 4 * MIB  # two huge pages, and what Python does on the side


def fill(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MIB // 4)


def in_turn() -> None:
    fill(48)
    fill(48)


def together() -> tuple[torch.Tensor, torch.Tensor]:
    return fill(48), fill(48)


@pytest.mark.skipif(sys.platform != "linux", reason="the gauge reads /proc")
def test_peak_counts_what_is_held_at_once() -> None:
    gauge, held = Cpu().peak_bytes, fill(64)  # what was there before does not count
    for call, expected in ((in_turn, 48), (together, 96)):
        peak = gauge(call)
        assert peak is not None
        assert abs(peak - expected * MIB) < SLACK
    assert held.numel() == 16 * MIB


def test_the_record_names_the_machine_and_its_load() -> None:
    record = Cpu().describe()
    assert record["device"] == cpu_model() != ""
    assert record["threads"] == torch.get_num_threads()
    assert "load" in record


def test_cases_are_those_the_claims_are_about() -> None:
    shapes = {(case.length, case.width) for case in CASES.values()}
    assert shapes == {(1024, 32), (2048, 32), (4096, 32), (256, 16), (2048, 64)}
    assert CASES["wikitext"].is_causal
