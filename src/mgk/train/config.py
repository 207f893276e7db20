"""What a run is made from: plain data, written beside the run, enough to start the same run again."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mgk.models import MODELS as MODELS
from mgk.models import ModelConfig
from mgk.ops import arguments as check

T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    name: str
    """Prepared data set, see `mgk data list`."""
    options: tuple[str, ...] = ()
    """Options it was prepared with, as NAME=VALUE, e.g. lengths=[16,128]."""
    batch: int = 32
    """Examples of one update, over all processes and micro-batches together."""
    bucket: bool = True
    """Put inputs of like length into one batch, so that short ones do not pay for long ones."""
    pad_multiple: int = 256
    """Lengths are padded to a multiple of this: few distinct lengths, so that CUDA graphs are used again."""
    pack: int = 0
    """Train without padding outside the attention, with batches of a multiple of so many tokens; 0 keeps padding."""
    train: str = "train"
    """Split to learn from."""
    valid: str = "dev"
    """Split that decides which checkpoint is best."""
    test: str = "test"
    """Split that the best checkpoint is measured on, once, at the end."""
    valid_batch: int = 0
    """Examples of a batch in evaluation; 0 is as many as in training."""

    def __post_init__(self) -> None:
        for name in ("batch", "pad_multiple"):
            check.check_count(name, getattr(self, name))
        for name in ("pack", "valid_batch"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class OptimiserConfig:
    """How the weights move: Adam, and a learning rate that is a function of the step alone."""

    kind: Literal["adam", "adamw"] = "adamw"
    """adamw decays weights apart from the gradient."""
    lr: float = 1e-4
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean of gradients and of their squares."""
    eps: float = 1e-6
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float = 0.0
    """Largest norm of the whole gradient; 0 does not clip."""
    schedule: Literal["onecycle", "cosine", "constant"] = "onecycle"
    """onecycle: linear from lr/25 up and down to about 0. cosine: linear from 0 up, then a cosine to 0."""
    warmup: int = 0
    """Steps to the highest learning rate."""

    def __post_init__(self) -> None:
        check.check_choice("kind", self.kind, ("adam", "adamw"))
        check.check_choice("schedule", self.schedule, ("onecycle", "cosine", "constant"))
        for name in ("lr", "eps", "weight_decay", "clip", "warmup"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Config:
    """One run."""

    recipe: str
    """Name of the recipe this run began as."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """The optimiser."""
    steps: int = 1000
    """Updates of the weights."""
    eval_every: int = 100
    """Steps between two evaluations, each with a checkpoint."""
    eval_batches: int = 0
    """Batches of an evaluation during training; 0 is the whole split."""
    log_every: int = 50
    """Steps between two lines of the log; only then does the host wait for the GPU."""
    seed: int = 0
    """Of the initial weights, the order of the data and dropout."""
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """Of the arithmetic; bf16-mixed keeps weights in float32. On a CPU bf16-mixed becomes 32-true."""
    accumulate: int = 1
    """Micro-batches that each process cuts its part of a batch into: less memory, the same update."""
    compile: bool = False
    """Run the model through torch.compile."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step from a CUDA graph per padded length; auto: on one GPU."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: auto is ddp where there are several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    workers: int = 2
    """Processes that make batches; 0 makes them in the training process."""
    tensorboard: bool = False
    """Write TensorBoard events beside the log."""

    def __post_init__(self) -> None:
        if type(self.model) not in MODELS.values():
            raise TypeError(f"model: expected one of {', '.join(MODELS)}, got {type(self.model).__name__}")
        for name in ("steps", "eval_every", "log_every", "accumulate"):
            check.check_count(name, getattr(self, name))
        for name in ("seed", "workers", "eval_batches"):
            check_number(name, getattr(self, name), 0)
        check.check_choice("precision", self.precision, ("32-true", "bf16-mixed"))
        check.check_choice("graphs", self.graphs, ("auto", "on", "off"))
        check.check_choice("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        check.check_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.data.pack and self.accumulate > 1:
            raise ValueError(
                f"accumulate: expected 1 where data.pack leaves a batch no rows to cut, got {self.accumulate}"
            )
        if "em" in (self.model.prior, self.model.means) and self.accumulate > 1:
            raise ValueError(
                "accumulate: expected 1 where model.prior or model.means is em, whose M-step is of a whole batch, "
                f"got {self.accumulate}"
            )
        if self.optimiser.warmup > self.steps:
            raise ValueError(
                f"optimiser.warmup: expected at most steps = {self.steps}, got {self.optimiser.warmup}; "
                "a short run needs a short warm-up too"
            )

    @property
    def kind(self) -> str:
        """The model's name in the file: classifier, matcher, language or vision."""
        return next(name for name, type_ in MODELS.items() if type(self.model) is type_)


# What may differ when a run is continued: where and how fast it runs, not what it computes.
FREE = ("workers", "tensorboard", "log_every", "device", "strategy", "graphs", "compile", "accumulate")


def check_number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {check.describe(value)}")
    if not value >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def to_dict(config: Config) -> dict[str, Any]:
    result = dataclasses.asdict(config)
    result["model"] = {"kind": config.kind, **result["model"]}
    return result


def from_dict(values: dict[str, Any]) -> Config:
    """The configuration of `to_dict`, from JSON too; an unknown, missing or mistyped field is an error."""
    values = dict(values)
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
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not a configuration: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def build(type_: type[T], values: object, where: str) -> T:
    """A dataclass from what JSON can hold, field by field, strictly."""
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
    """JSON has lists for tuples and one kind of number; nothing else is converted."""
    origin, options = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is Literal:
        return check.check_choice(where, value, options)
    if origin in (Union, types.UnionType):
        if any(dataclasses.is_dataclass(option) for option in options):
            return value  # the model: `from_dict` has built it
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
    """Every field by its dotted name, as the command line has it."""

    def walk(values: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{where}{name}.")
            else:
                yield where + name, value

    return dict(walk(to_dict(config), ""))


def check_same(old: Config, new: Config, where: Path) -> None:
    """A run is continued as it was begun: anything else would be neither the one run nor the other."""
    before, after = flatten(old), flatten(new)
    for name in dict.fromkeys((*before, *after)):
        if name not in FREE and before.get(name) != after.get(name):
            raise ValueError(
                f"{name}: the run in {where} was begun with {before.get(name)!r}, got {after.get(name)!r}; "
                "continue it as it was, or choose another --out"
            )


def replace(config: Config, **fields: Any) -> Config:
    """A copy with some fields changed, by dotted name with `__` for the dot: replace(config, model__heads=2)."""
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
