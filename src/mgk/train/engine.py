"""The training loop.

A run is determined by its configuration. Its checkpoint holds all state; batches, dropout and learning rates are
functions of the step. So a run that was stopped at any moment resumes as if it had not been stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from mgk.files import read_json
from mgk.train import checkpoint, data
from mgk.train.config import Config
from mgk.train.fabric import launch, leave
from mgk.train.graph import Batch, to_device
from mgk.train.learner import Learner, find_non_finite, perplexity
from mgk.train.progress import Progress
from mgk.train.run import Run
from mgk.train.sample import sample_text, visible
from mgk.train.saving import Saver
from mgk.train.watch import Watch
from mgk.variants import LABELS

if TYPE_CHECKING:
    from lightning_fabric import Fabric


SPIKE = 3.0  # a loss is logged as a spike if it is this many times the mean of the log interval before


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

    @classmethod
    def read(cls, path: Path) -> Result:
        advice = "; remove it, and --resume evaluates the run again"
        try:
            return cls(**read_json(path, advice))
        except TypeError as error:
            raise ValueError(f"{path}: not the result of a run ({error}){advice}") from None


def train(
    settings: Config,
    out: str | Path,
    *,
    resume: bool = False,
    data_root: str | Path | None = None,
    quiet: bool = True,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Result:
    """Train a model, write the run to the folder `out`, and evaluate the best checkpoint on the test split.

    SIGTERM and Ctrl-C stop the run with a checkpoint; the result then has `finished=False`.

    Args:
        settings: configuration of the run; see `mgk.recipes`.
        out: folder of the run.
        resume: continue the run in `out` from its last checkpoint, or start it if there is none.
        data_root: folder of the prepared data sets; None is `mgk.data.root()`, or that of the run that is resumed.
        quiet: show no progress.
        adapt: changes the new model before it is trained, e.g. loads weights. It must do the same in every call that
            resumes the run; the configuration does not mention it.
    """
    fabric = launch(settings)
    result = run_with(fabric, settings, Path(out), resume, data_root, quiet, adapt)
    leave()
    return result


def run_with(
    fabric: Fabric, settings: Config, out: Path, resume: bool, data_root: str | Path | None, quiet: bool,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Result:  # fmt: skip
    """Do the work of `train` once the processes are connected."""
    reset_peak(fabric)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(Run(out, settings, resume=resume, writes=fabric.global_rank == 0))
        done = out / "result.json"
        if resume and done.exists():
            run.tidy_finished()
            return Result.read(done)
        title = "/".join(out.parts[-2:])
        root = data.root_of(out, data_root)
        source = data.Source(settings, root, fabric.global_rank, fabric.world_size, fabric.device.type == "cuda")
        if run.writes and not quiet:  # at once: the first step may take a while
            print(f"{title}: {described(settings)}, on {fabric.device}", file=sys.stderr, flush=True)
        learner = Learner(fabric, settings) if adapt is None else Learner(fabric, settings, adapt)
        fabric.barrier()  # every process has read the folder before one writes to it
        facts = {"data": source.facts, "seed": settings.seed, "processes": fabric.world_size}
        run.begin(facts | {"data_root": str(source.prepared.path.parent.resolve())})
        fabric.barrier()
        saver = stack.enter_context(Saver(fabric, run, learner))
        state = State.restore(run, saver)
        progress = Progress(title, settings.steps, state.step, quiet=quiet or not run.writes)
        with progress, Interrupt() as interrupt, Watch(out, fabric.global_rank, settings.hang_minutes) as watch:
            run.interrupted = lambda: interrupt.asked
            job = Job(fabric, settings, run, source, learner, saver, watch)
            state = loop(job, state, progress, interrupt)
        result = Result(
            str(out), state.step == settings.steps, state.step, learner.parameters, state.best_step, state.best_valid
        )
        if result.finished:
            saver.restore(checkpoint.folder_of(out, state.best_step))
            scores = learner.evaluate(source.evaluation(settings.data.test))
            run.log("test", state.step, **scores)
            show_sample(job, state.step, progress)
            times = [line["seconds_per_step"] for line in run.lines("train") if "seconds_per_step" in line]
            speed = statistics.median(times) if times else 0.0
            result = dataclasses.replace(result, test=scores, seconds_per_step=speed, peak_bytes=peak_bytes(fabric))
            run.finish(dataclasses.asdict(result))
            fabric.barrier()
    return result


@dataclass(frozen=True)
class Job:
    """The parts of a run under way."""

    fabric: Fabric
    config: Config
    run: Run
    source: data.Source
    learner: Learner
    saver: Saver
    watch: Watch


def loop(job: Job, state: State, progress: Progress, interrupt: Interrupt) -> State:
    """Train from the step of `state` to the last step, or until a signal."""
    c, run, learner, saver = job.config, job.run, job.learner, job.saver
    clock = Clock()
    for batch in job.source.training(state.step, c.steps):
        learner.update(state.step, batch)
        state.step += 1
        clock.count(batch)
        progress.advance(state.step)
        ended = state.step == c.steps
        evaluates = ended or state.step % c.eval_every == 0
        logs = evaluates or state.step % c.log_every == 0
        stopping = interrupt.agreed(job.fabric, logs)
        saves = saver.due(state.step, logs) or stopping or ended
        if logs or saves:
            check_finite(job, state)
        if (slow := job.watch.beat(state.step)) is not None:
            run.log("slow", state.step, seconds=slow, median=job.watch.median)
        if logs:
            log_training(job, state, clock, progress)
        best = False
        if evaluates:
            job.watch.rest()
            state.valid = learner.evaluate(job.source.evaluation(c.data.valid, c.eval_batches))
            run.log("valid", state.step, **state.valid)
            progress.show(state.step, **{f"valid {name}": value for name, value in score(state.valid).items()})
            if learner.device.type == "cpu" and not ended:
                show_sample(job, state.step, progress, tokens=60)
            best = state.keep_best()
        if saves or best or (evaluates and saver.with_evaluations):
            job.watch.rest()
            save(job, state, best=best)
        if logs or stopping:
            clock.restart()
        if stopping:
            break
    job.watch.rest()
    saver.wait()
    job.fabric.barrier()  # the last checkpoint is there for all processes
    return state


def log_training(job: Job, state: State, clock: Clock, progress: Progress) -> None:
    """Log the means since the last log line, and the examples of a step whose loss was far above those before."""
    numbers = job.learner.read()
    peak, at = numbers.pop("peak"), int(numbers.pop("peak_step"))
    speed = clock.seconds_per_step()
    shown = numbers if job.learner.classifies else numbers | {"perplexity": perplexity(numbers["loss"])}
    job.run.log("train", state.step, **shown, lr=job.learner.rate, seconds_per_step=speed)
    progress.show(state.step, **score(shown), **{"tokens/s": clock.tokens_per_second()})
    if state.loss is not None and peak > SPIKE * state.loss:
        job.run.log("spike", state.step, at=at, loss=peak, before=state.loss, examples=job.source.examples_of(at))
    state.loss = numbers["loss"]


def show_sample(job: Job, step: int, progress: Progress, tokens: int = 200) -> None:
    """Print and log a sample of a language model, unless nobody reads it or the weights are on several processes."""
    if progress.quiet or job.config.kind != "language" or job.fabric.world_size > 1:
        return
    text = sample_text(job.learner.model, job.source.prepared, tokens=tokens)
    if text is not None:
        job.run.log("sample", step, text=text)
        progress.note(f"sample of step {step:,}: {visible(text.strip())}")


def described(c: Config) -> str:
    """Return what is trained, in a few words."""
    heads = f"{c.model.heads} head{'s' if c.model.heads > 1 else ''}"
    return f"{c.recipe}, {LABELS[c.model.attention]} with {heads}, {c.steps:,} steps"


@dataclass
class State:
    """Progress of a run."""

    step: int = 0
    best: float = float("-inf")
    best_step: int = 0
    valid: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores of the last evaluation."""
    best_valid: dict[str, float] = dataclasses.field(default_factory=dict)
    loss: float | None = None
    """Mean of the last log interval."""

    @classmethod
    def restore(cls, run: Run, saver: Saver) -> State:
        """Load the last checkpoint of a run, if there is one."""
        place = checkpoint.find(run.folder)
        if place is None:
            run.rewind(0)
            return cls()
        found = saver.restore(place)
        if "progress" not in found:
            raise checkpoint.CheckpointError(
                f"{run.folder}: the checkpoint has no optimiser state, so the run cannot be resumed: convert it again "
                "with mgk convert --state, or train in another --out"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        state = cls(**{name: value for name, value in found["progress"].items() if name in names})
        run.rewind(state.step)
        if state.best_step and not checkpoint.folder_of(run.folder, state.best_step).exists():
            # Somebody has removed it, as the error for a damaged checkpoint advises. The next best takes its place.
            run.log("note", state.step, text=f"the best checkpoint, of step {state.best_step}, is gone")
            state.best, state.best_step, state.best_valid = float("-inf"), 0, {}
        return state

    def keep_best(self) -> bool:
        """Return whether the last evaluation is the best so far, and remember it; of equals, the first counts."""
        value = self.valid["accuracy"] if "accuracy" in self.valid else -self.valid["loss"]
        if not value > self.best:
            return False
        self.best, self.best_step, self.best_valid = value, self.step, self.valid
        return True


def save(job: Job, state: State, *, best: bool) -> None:
    """Write a checkpoint; raise an error if a value in it is not finite."""
    bad = job.learner.non_finite()
    if bad is not None:
        fail(job, state.step, state.step - 1, f"{bad} after the update, although its gradient was finite")
    progress = dataclasses.asdict(state)
    job.saver.save(state.step, progress, {"valid": state.valid, "best": state.best_valid}, best=best)


def check_finite(job: Job, state: State) -> None:
    """Raise an error if a gradient was not finite. The weights are still those that led to it."""
    learner = job.learner
    step = learner.failed_at()
    if step is None:
        return
    if learner.sharded:  # a search in one process would wait for the others
        fail(job, state.step, step, learner.non_finite() or "a gradient")
    learner.seed(step)
    learner.objective.train()
    with job.fabric.autocast():
        where = find_non_finite(learner.objective, to_device(job.source.batches[step], learner.device))
    fail(job, state.step, step, where)


def fail(job: Job, now: int, step: int, where: str) -> NoReturn:
    """Log the examples of a step that led to a value that is not finite, and raise an error with advice."""
    c, run = job.config, job.run
    run.log("non-finite", now, at=step, where=where, examples=job.source.examples_of(step))
    job.saver.wait()
    kept = checkpoint.find(run.folder)
    good = f"step {checkpoint.read_facts(kept)['step']} is kept in {kept}" if kept else "there was no checkpoint yet"
    clip = "" if c.optimiser.clip else ", clip gradients (--optimiser.clip 1)"
    exact = (
        "" if c.precision == "32-true" or job.learner.device.type == "cpu" else ", or compute in --precision 32-true"
    )
    eps = "" if c.optimiser.eps else ", or set --optimiser.eps above 0"
    raise TrainingError(
        f"step {step}: not finite: {where}; {good}. Train in another --out with a lower --optimiser.lr (now "
        f"{c.optimiser.lr:g}), warm up longer{clip}{exact}{eps}"
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
