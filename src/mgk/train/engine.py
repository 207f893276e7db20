"""The training loop.

A run is determined by its configuration. Its checkpoint holds all state; batches, dropout and learning rates are
functions of the step. So a run that was stopped at any moment resumes as if it had not been stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import signal
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch

from mgk.files import write_json
from mgk.train import checkpoint, data
from mgk.train.config import Config
from mgk.train.fabric import launch, leave
from mgk.train.graph import Batch, to_device
from mgk.train.learner import Learner, find_non_finite, perplexity
from mgk.train.progress import Progress
from mgk.train.run import Run

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class TrainingError(RuntimeError):
    """A value of a run is not finite."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    run: str
    finished: bool
    """False if it was told to stop; it can be resumed."""
    step: int
    parameters: int
    best_step: int = 0
    valid: dict[str, float] = dataclasses.field(default_factory=dict)
    test: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds_per_step: float = 0.0
    """Median over the log lines, without evaluations."""
    peak_bytes: int = 0
    """Peak GPU memory, or on a CPU the peak memory of the process."""


def train(
    settings: Config, out: str | Path, *, resume: bool = False, data_root: str | Path | None = None, quiet: bool = True
) -> Result:
    """Train a model, write the run to the folder `out`, and evaluate the best checkpoint on the test split.

    SIGTERM and Ctrl-C stop the run with a checkpoint; the result then has `finished=False`.

    Args:
        settings: configuration of the run; see `mgk.recipes`.
        out: folder of the run.
        resume: continue the run in `out` from its last checkpoint, or start it if there is none.
        data_root: folder of the prepared data sets; None is `mgk.data.root()`.
        quiet: show no progress.
    """
    fabric = launch(settings)
    result = run_with(fabric, settings, Path(out), resume, data_root, quiet)
    leave()
    return result


def run_with(
    fabric: Fabric, settings: Config, out: Path, resume: bool, data_root: str | Path | None, quiet: bool
) -> Result:
    """Do the work of `train` once the processes are connected."""
    reset_peak(fabric)
    run = Run(out, settings, resume=resume, writes=fabric.global_rank == 0)
    done = out / "result.json"
    if resume and done.exists():
        return Result(**json.loads(done.read_text()))
    source = data.Source(settings, data_root, fabric.global_rank, fabric.world_size, fabric.device.type == "cuda")
    learner = Learner(fabric, settings)
    fabric.barrier()  # every process has read the folder before one writes to it
    run.begin({"data": source.facts, "seed": settings.seed, "processes": fabric.world_size})
    fabric.barrier()
    state = State.restore(run, learner)
    title = "/".join(out.parts[-2:])
    progress = Progress(title, settings.steps, state.step, quiet=quiet or not run.writes)
    with progress, Interrupt() as interrupt:
        state = loop(fabric, settings, run, source, learner, state, progress, interrupt)
    result = Result(
        str(out), state.step == settings.steps, state.step, learner.parameters, state.best_step, state.best_valid
    )
    if result.finished:
        learner.load(checkpoint.load(out / "best").weights)
        scores = learner.evaluate(source.evaluation(settings.data.test))
        run.log("test", state.step, **scores)
        speed = statistics.median(state.speeds) if state.speeds else 0.0
        result = dataclasses.replace(result, test=scores, seconds_per_step=speed, peak_bytes=peak_bytes(fabric))
        if run.writes:
            write_json(done, dataclasses.asdict(result))
        fabric.barrier()
    run.close()
    return result


def loop(
    fabric: Fabric, c: Config, run: Run, source: data.Source, learner: Learner, state: State, progress: Progress,
    interrupt: Interrupt,
) -> State:  # fmt: skip
    """Train from the step of `state` to the last step, or until a signal."""
    clock = Clock()
    for batch in source.training(state.step, c.steps):
        learner.update(state.step, batch)
        state.step += 1
        clock.count(batch)
        progress.advance(state.step)
        ended = state.step == c.steps
        evaluates = ended or state.step % c.eval_every == 0
        logs = evaluates or state.step % c.log_every == 0
        stopping = interrupt.agreed(fabric, logs)
        if logs or stopping:
            check_finite(fabric, run, source, learner)
        if logs:
            numbers = learner.read()
            state.speeds.append(clock.seconds_per_step())
            shown = numbers if learner.classifies else numbers | {"perplexity": perplexity(numbers["loss"])}
            run.log("train", state.step, **shown, lr=learner.rate, seconds_per_step=state.speeds[-1])
            progress.show(state.step, **score(shown), **{"tokens/s": clock.tokens_per_second()})
        if evaluates:
            state.valid = learner.evaluate(source.evaluation(c.data.valid, c.eval_batches))
            run.log("valid", state.step, **state.valid)
            progress.show(state.step, **{f"valid {name}": value for name, value in score(state.valid).items()})
            state.keep_best()
        if evaluates or stopping:
            save(run, learner, state, best=state.best_step == state.step)
        if logs or stopping:
            clock.restart()
        if stopping:
            break
    return state


@dataclass
class State:
    """Progress of a run."""

    step: int = 0
    best: float = float("-inf")
    best_step: int = 0
    valid: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores of the last evaluation."""
    best_valid: dict[str, float] = dataclasses.field(default_factory=dict)
    speeds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def restore(cls, run: Run, learner: Learner) -> State:
        """Load the last checkpoint of a run, if there is one."""
        found = run.restore()
        if found is None:
            return cls()
        if "progress" not in found.state:
            raise checkpoint.CheckpointError(
                f"{run.folder}: the checkpoint has no optimiser state, so the run cannot be resumed: convert it again "
                "with mgk convert --state, or train in another --out"
            )
        learner.load(found.weights, found.state)
        return cls(**found.state["progress"])

    def keep_best(self) -> None:
        value = self.valid["accuracy"] if "accuracy" in self.valid else -self.valid["loss"]
        if value > self.best:
            self.best, self.best_step, self.best_valid = value, self.step, self.valid


def save(run: Run, learner: Learner, state: State, *, best: bool) -> None:
    progress = dataclasses.asdict(state)
    content = checkpoint.Checkpoint(
        state.step,
        learner.weights(),
        learner.state() | {"progress": progress},
        {"valid": state.valid, "best": state.best_valid, "best_step": state.best_step},
    )
    if run.writes:
        checkpoint.save(run.folder, content, best=best)
    learner.fabric.barrier()  # no process reads a link while it changes


def check_finite(fabric: Fabric, run: Run, source: data.Source, learner: Learner) -> None:
    """Raise an error if a gradient was not finite. The weights are still those that led to it."""
    step = learner.failed_at()
    if step is None:
        return
    learner.seed(step)
    learner.objective.train()
    with fabric.autocast():
        where = find_non_finite(learner.objective, to_device(source.batches[step], learner.device))
    kept = checkpoint.newest(run.folder)
    good = f"step {checkpoint.read_facts(kept)['step']} is kept in {kept}" if kept else "there was no checkpoint yet"
    c = learner.config
    clip = "" if c.optimiser.clip else ", clip gradients (--optimiser.clip 1)"
    exact = "" if c.precision == "32-true" or learner.device.type == "cpu" else ", or compute in --precision 32-true"
    raise TrainingError(
        f"step {step}: not finite: {where}; {good}. Lower --optimiser.lr (now {c.optimiser.lr:g}), warm up longer"
        f"{clip}{exact}"
    )


def score(numbers: dict[str, float]) -> dict[str, float]:
    """Select the numbers for the progress display."""
    return {name: numbers[name] for name in ("loss", "accuracy", "perplexity") if name in numbers}


def reset_peak(fabric: Fabric) -> None:
    """Reset the peak memory to that of this run, where the system allows it."""
    if fabric.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(fabric.device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(fabric: Fabric) -> int:
    if fabric.device.type == "cuda":
        return torch.cuda.max_memory_allocated(fabric.device)
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Time per step and tokens per second since the last restart, when the device had finished all work."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start, self.steps, self.tokens = time.perf_counter(), 0, 0

    def count(self, batch: Batch) -> None:
        real = batch.get("mask", batch.get("tokens", batch.get("label")))
        assert real is not None  # every batch has one of these
        self.steps += 1
        self.tokens += int(real.sum()) if real.dtype == torch.bool else real.numel()

    def seconds_per_step(self) -> float:
        return (time.perf_counter() - self.start) / max(self.steps, 1)

    def tokens_per_second(self) -> float:
        return self.tokens / max(time.perf_counter() - self.start, 1e-9)


class Interrupt:
    """SIGTERM and the first Ctrl-C ask the loop to stop after the current step; a second Ctrl-C stops immediately."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def agreed(self, fabric: Fabric, logs: bool) -> bool:
        """Return whether to stop. All processes must stop together: they exchange this when they log."""
        if fabric.world_size == 1:
            return self.asked
        if not logs:
            return False
        asked = torch.tensor(float(self.asked), device=fabric.device)
        return bool(fabric.all_reduce(asked, reduce_op="sum"))
