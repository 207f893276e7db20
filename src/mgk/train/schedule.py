"""The learning rate as a function of the step alone: nothing to save, nothing to get out of step on resuming."""

from __future__ import annotations

import math

from mgk.train.config import OptimiserConfig

START = 25  # onecycle begins at lr / 25
END = 1e4  # and ends at a 10,000th of that


def learning_rate(config: OptimiserConfig, step: int, steps: int) -> float:
    """Of update `step` of `steps`, counted from 0. `onecycle` is `torch.optim.lr_scheduler.OneCycleLR`, linear."""
    if config.schedule == "onecycle":
        low, peak, last = config.lr / START, max(config.warmup - 1, 0), max(steps - 1, 1)
        if step < peak:
            return low + (config.lr - low) * step / peak
        down = (step - peak) / max(last - peak, 1)
        return config.lr + (low / END - config.lr) * min(down, 1.0)
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
