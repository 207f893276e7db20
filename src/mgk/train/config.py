"""Configuration of a run: plain data, saved in its folder, enough to start the same run again."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mgk.models import MODELS as MODELS
from mgk.models import ModelConfig
from mgk.ops import arguments as check

ONECYCLE_START = 25  # the schedule starts at lr / 25
ONECYCLE_END = 1e4  # and ends at a 10,000th of that
T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """The data of a run."""

    name: str
    """Prepared data set, see `mgk data list`."""
    options: tuple[str, ...] = ()
    """Options it was prepared with, as NAME=VALUE, e.g. lengths=[16,128]."""
    batch: int = 32
    """Examples per update, over all processes and micro-batches."""
    bucket: bool = True
    """Put inputs of similar length into one batch, so that there is little padding."""
    pad_multiple: int = 256
    """Pad lengths to a multiple of this: few distinct lengths need few CUDA graphs."""
    pack: int = 0
    """Train without padding outside the attention, on a multiple of this number of tokens a batch; 0 keeps padding."""
    train: str = "train"
    """Split to train on."""
    valid: str = "dev"
    """Split that selects the best checkpoint."""
    test: str = "test"
    """Split on which the best checkpoint is evaluated, once, at the end."""
    valid_batch: int = 0
    """Examples per batch in evaluation; 0 is the same as in training."""

    def __post_init__(self) -> None:
        for name in ("batch", "pad_multiple"):
            check.check_count(name, getattr(self, name))
        for name in ("pack", "valid_batch"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class OptimiserConfig:
    """Adam, with a learning rate that depends on the step alone."""

    kind: Literal["adam", "adamw"] = "adamw"
    """adamw decouples weight decay from the gradient."""
    lr: float = 1e-4
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = 1e-6
    """Added to the denominator of the update."""
    weight_decay: float = 0.0
    """Weight decay."""
    decay: Literal["all", "matrices"] = "all"
    """Which weights decay; matrices: those of embeddings and linear layers, no norm, bias, shift, prior or variance."""
    clip: float = 0.0
    """Maximum norm of the gradient; 0 does not clip."""
    schedule: Literal["onecycle", "cosine", "constant"] = "onecycle"
    """onecycle: linear from lr/25 up, then down to almost 0. cosine: linear from 0 up, then a cosine to 0."""
    warmup: int = 0
    """Steps until the highest learning rate."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("lr", "eps", "weight_decay", "clip", "warmup"):
            check_number(name, getattr(self, name), 0)

    def learning_rate(self, step: int, steps: int) -> float:
        """Learning rate of update `step`, counted from 0. `onecycle` is torch's `OneCycleLR` with linear annealing."""
        if self.schedule == "onecycle":
            low, peak, last = self.lr / ONECYCLE_START, max(self.warmup - 1, 0), max(steps - 1, 1)
            if step < peak:
                return low + (self.lr - low) * step / peak
            down = (step - peak) / max(last - peak, 1)
            return self.lr + (low / ONECYCLE_END - self.lr) * min(down, 1.0)
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class SaveConfig:
    """When checkpoints are written, and which are kept besides the last and the best."""

    steps: int = 0
    """Steps between checkpoints. If this and `minutes` are 0, every evaluation writes one."""
    minutes: float = 0.0
    """Minutes between checkpoints; several processes check the time when they log."""
    newest: int = 1
    """Number of newest checkpoints to keep."""
    every: int = 0
    """Keep all checkpoints whose step is a multiple of this, too; 0 keeps no more."""

    def __post_init__(self) -> None:
        check.check_count("newest", self.newest)
        for name in ("steps", "minutes", "every"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    recipe: str
    """Name of the recipe that this configuration started from."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """The optimiser."""
    steps: int = 1000
    """Number of updates."""
    eval_every: int = 100
    """Steps between evaluations."""
    eval_batches: int = 0
    """Batches per evaluation during training; 0 is the full split."""
    save: SaveConfig = field(default_factory=SaveConfig)
    """Checkpoints. One is also written at the end, when the run is stopped, and for a new best validation score."""
    log_every: int = 50
    """Steps between log lines. The host waits for the GPU only then."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and dropout."""
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """Precision of the arithmetic; bf16-mixed keeps weights in float32. On a CPU bf16-mixed becomes 32-true."""
    accumulate: int = 1
    """Micro-batches into which each process splits its part of a batch: less memory, the same update."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model with torch.compile; auto: if there is one GPU. Combines with `graphs`."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Replay each step from a CUDA graph, one per batch shape; auto: if there is one GPU."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: auto is ddp if there are several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    workers: int = 2
    """Processes that prepare batches; 0 prepares them in the training process."""
    tensorboard: bool = False
    """Write TensorBoard events, too."""
    hang_minutes: float = 0.0
    """End a process that has made no progress for this long, so that torchrun starts it again; 0 waits for ever."""

    def __post_init__(self) -> None:
        if type(self.model) not in MODELS.values():
            raise TypeError(f"model: expected one of {', '.join(MODELS)}, got {type(self.model).__name__}")
        for name in ("steps", "eval_every", "log_every", "accumulate"):
            check.check_count(name, getattr(self, name))
        for name in ("seed", "workers", "eval_batches", "hang_minutes"):
            check_number(name, getattr(self, name), 0)
        check_literals(self)
        if self.data.pack and self.accumulate > 1:
            raise ValueError(
                f"accumulate: expected 1 with data.pack, whose batches have no rows to split, got {self.accumulate}"
            )
        if "em" in (self.model.prior, self.model.means) and self.accumulate > 1:
            raise ValueError(
                "accumulate: expected 1 if model.prior or model.means is em, whose M-step needs the full batch, "
                f"got {self.accumulate}"
            )
        if self.optimiser.warmup > self.steps:
            raise ValueError(
                f"optimiser.warmup: expected at most steps = {self.steps}, got {self.optimiser.warmup}; "
                "shorten the warm-up of a short run"
            )

    @property
    def kind(self) -> str:
        """Kind of the model: classifier, matcher, language or vision."""
        return next(name for name, type_ in MODELS.items() if type(self.model) is type_)


# Fields that may change when a run is resumed: they decide where and how fast it runs, not what it computes.
FREE = (
    "workers", "tensorboard", "log_every", "device", "strategy", "graphs", "compile", "accumulate", "hang_minutes",
    "save.steps", "save.minutes", "save.newest", "save.every",
)  # fmt: skip


def check_number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {check.describe(value)}")
    if not value >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_literals(config: object) -> None:
    """Check every field whose type is a Literal."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            check.check_choice(name, getattr(config, name), get_args(hint))


def to_dict(config: Config) -> dict[str, Any]:
    result = dataclasses.asdict(config)
    result["model"] = {"kind": config.kind, **result["model"]}
    return result


def from_dict(values: dict[str, Any]) -> Config:
    """Inverse of `to_dict`, also after JSON; an unknown, missing or mistyped field is an error."""
    values = dict(values)
    if isinstance(values.get("compile"), bool):  # runs of mgk 0.x before `auto`
        values["compile"] = "on" if values["compile"] else "off"
    model = values.get("model")
    if not isinstance(model, dict) or model.get("kind") not in MODELS:
        raise ValueError(f"model.kind: expected one of {', '.join(MODELS)}, got {check.describe(model)}")
    type_ = MODELS[model["kind"]]
    values["model"] = build(type_, {name: value for name, value in model.items() if name != "kind"}, "model.")
    return build(Config, values, "")


def dump(config: Config) -> str:
    return json.dumps(to_dict(config), indent=1) + "\n"


def read(path: Path) -> Config:
    try:
        return from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: expected the folder of a run, found no {path.name} in it") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a configuration: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def build(type_: type[T], values: object, where: str) -> T:
    """Build a dataclass from JSON values, checking every field."""
    if dataclasses.is_dataclass(values) and isinstance(values, type_):
        return values
    if not isinstance(values, dict):
        raise TypeError(f"{where.rstrip('.')}: expected an object, got {check.describe(values)}")
    hints = get_type_hints(type_)
    fields = {f.name: f for f in dataclasses.fields(type_)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ValueError(f"{where}{name}: no such field; there are {', '.join(fields)}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if name not in values and required:
            raise ValueError(f"{where}{name}: missing")
    return type_(**{name: convert(hints[name], value, f"{where}{name}") for name, value in values.items()})


def convert(hint: Any, value: Any, where: str) -> Any:
    """Convert lists to tuples and integers to floats where the type says so; anything else must match."""
    origin, options = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is Literal:
        return check.check_choice(where, value, options)
    if origin in (Union, types.UnionType):
        if any(dataclasses.is_dataclass(option) for option in options):
            return value  # the model, which `from_dict` has built
        if value is None and type(None) in options:
            return None
        return convert(next(option for option in options if option is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{where}: expected a list, got {check.describe(value)}")
        return tuple(convert(options[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{where}: expected {hint.__name__}, got {check.describe(value)}")
    return value


def flatten(config: Config) -> dict[str, Any]:
    """Every field by its dotted name, as on the command line."""

    def walk(values: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{where}{name}.")
            else:
                yield where + name, value

    return dict(walk(to_dict(config), ""))


def check_same(old: Config, new: Config, where: Path) -> None:
    """Raise an error if a run would be resumed with another configuration, except for the fields in FREE."""
    before, after = flatten(old), flatten(new)
    for name in dict.fromkeys((*before, *after)):
        if name not in FREE and before.get(name) != after.get(name):
            raise ValueError(
                f"{name}: the run in {where} was started with {before.get(name)!r}, got {after.get(name)!r}; "
                "resume it with the same value, or choose another --out"
            )


def replace(config: Config, **fields: Any) -> Config:
    """Return a copy with some fields changed; `__` stands for a dot: replace(config, model__heads=2)."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        group, _, rest = name.partition("__")
        if rest:
            nested.setdefault(group, {})[rest] = value
        else:
            flat[name] = value
    for group, changes in nested.items():
        flat[group] = dataclasses.replace(getattr(config, group), **changes)
    return dataclasses.replace(config, **flat)
