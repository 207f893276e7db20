"""Learning rates depend on the step alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from mgk.train import OptimiserConfig


def test_onecycle_is_torchs() -> None:
    steps, warmup = 50, 10
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter])
    wanted = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 1e-2, total_steps=steps, pct_start=warmup / steps, anneal_strategy="linear", cycle_momentum=False
    )
    config = OptimiserConfig(lr=1e-2, warmup=warmup)
    for step in range(steps):
        assert config.learning_rate(step, steps) == pytest.approx(wanted.get_last_lr()[0], rel=1e-9)
        optimiser.step()
        wanted.step() if step < steps - 1 else None


def test_cosine_rises_linearly_then_falls_to_zero() -> None:
    config = OptimiserConfig(lr=2.0, schedule="cosine", warmup=4)
    rates = [config.learning_rate(step, 20) for step in range(21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[12] == pytest.approx(1.0)
    assert rates[20] == pytest.approx(0.0, abs=1e-15)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (0, 3)])
def test_the_edges_are_finite_and_never_above_the_peak(schedule: str, warmup: int, steps: int) -> None:
    config = OptimiserConfig(lr=1.0, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
    assert all(0 <= config.learning_rate(step, steps) <= 1 for step in range(steps))
