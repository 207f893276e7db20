"""Records: one small JSON per finished cell, all that the tables are made from."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.reproduce.grid import TASKS, Cell, Metric, Row
from experiments.reproduce.inside import inside
from mgk.files import read_lines, write_text
from mgk.train.config import check_same, from_dict, read, to_dict
from mgk.train.evaluate import evaluate, flops

POINTS = 100  # of a curve
SLIDING = "sliding by one"  # as mgk.train.evaluate calls the paper's perplexity
REQUIRED = (
    "recipe", "attention", "heads", "option", "seed", "metric", "dev", "test", "steps", "parameters", "flops",
    "configuration", "curve", "seconds_per_step", "jobs", "peak_bytes", "gpu", "versions", "commit", "data",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A finished cell."""

    cell: Cell
    values: dict[str, Any]

    @property
    def row(self) -> Row:
        return self.cell.row

    @property
    def test(self) -> float:
        return float(self.values["test"])

    def curve(self, event: str, quantity: str) -> tuple[list[float], list[float]]:
        """Steps and values of "train" or "valid"."""
        lines = self.values["curve"].get(event, {})
        return lines.get("step", []), lines.get(quantity, [])


def path_of(results: Path, cell: Cell) -> Path:
    return results / f"{cell.name}.json"


def command(cell: Cell) -> str:
    """What computes this cell again, anywhere: also where its run is, finished, which would not be run again."""
    return f"python -m experiments.reproduce all --cells {cell.name} --results again/cells --runs again/runs"


def score(metric: Metric, numbers: dict[str, float]) -> float:
    """A loss or an accuracy in the unit of the tables: percent, perplexity, or bits per byte."""
    if metric == "accuracy":
        return 100 * numbers["accuracy"]
    return math.exp(numbers["loss"]) if metric == "perplexity" else numbers["loss"] / math.log(2)


def make(cell: Cell, run: Path, *, jobs: int, data_root: Path | None = None) -> dict[str, Any]:
    """What the finished run in the folder `run` came to; commit and GPU are those of every start of it."""
    task, config = TASKS[cell.task], read(run / "config.json")
    result = json.loads((run / "result.json").read_text())
    starts = json.loads((run / "run.json").read_text())["starts"]
    log, last = read_lines(run / "log.jsonl"), starts[-1]
    if len({start["data"]["digest"] for start in starts}) > 1:
        raise ValueError(f"{run}: went on with other data than it was begun with; remove it, and it is trained again")
    gpus, commits = (list(dict.fromkeys(start[name] for start in starts)) for name in ("gpu", "commit"))
    record: dict[str, Any] = {
        "recipe": cell.task, "attention": cell.row.attention, "heads": cell.row.heads, "option": cell.row.option,
        "seed": cell.seed, "metric": task.metric,
        "dev": score(task.metric, result["valid"]), "test": score(task.metric, result["test"]),
        "best_step": result["best_step"], "steps": result["step"], "parameters": result["parameters"],
        "flops": flops(config.model), "seconds_per_step": result["seconds_per_step"], "jobs": jobs,
        "peak_bytes": result["peak_bytes"], "gpu": ", ".join(map(str, gpus)) if any(gpus) else None,
        "versions": {"python": last["python"], **last["versions"]},
        "commit": ", ".join(commits), "data": last["data"], "starts": len(starts), "command": command(cell),
    }  # fmt: skip
    if task.sliding and last["gpu"] is not None:  # half a minute on a GPU, days without
        add(
            record,
            "test_sliding",
            lambda: score(task.metric, evaluate(run, sliding=True, batch=1024, data_root=data_root)[SLIDING]),
        )
    first = cell.seed == 0 and not cell.row.option  # one look at each row is enough for the eye
    add(record, "inside", lambda: inside(run, data_root, maps=first))
    record["curve"] = {event: curve([line for line in log if line["event"] == event]) for event in ("train", "valid")}
    record["configuration"] = to_dict(config)
    return record


def add(record: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
    """What is measured beside the score: if it fails, the training was not in vain, and the record says why."""
    try:
        record[name] = measure()
    except Exception as error:
        record |= {name: None, f"{name}_error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def curve(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """At most POINTS lines of a log, the last always among them, to five digits."""
    stride = max(1, -(-len(lines) // POINTS))
    kept = lines[::-1][::stride][::-1]
    names = [name for name in ("step", "loss", "accuracy") if kept and name in kept[0]]
    return {name: [float(f"{line[name]:.5g}") if name != "step" else line[name] for line in kept] for name in names}


def write(results: Path, cell: Cell, values: dict[str, Any]) -> Path:
    """In one step: a record is whole or not there. A line for each field, so that a difference can be read."""
    path = path_of(results, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def load(path: Path, results: Path) -> Record:
    """A record; one that is damaged, or not what its name says, is an error."""
    try:
        values = json.loads(path.read_text())
        cell = Cell.parse(path.relative_to(results).with_suffix("").as_posix())
    except ValueError as error:
        raise ValueError(f"{path}: not a record ({error}); remove it, and it is computed again") from None
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise ValueError(f"{path}: not a record (no {', '.join(missing)}); remove it, and it is computed again")
    said = Cell(values["recipe"], Row(values["attention"], values["heads"], values["option"]), values["seed"])
    if said != cell:
        raise ValueError(f"{path}: holds the record of {said.name}; its name must be that of its content")
    return Record(cell, values)


def wrong(results: Path, cell: Cell) -> str | None:
    """Why the record of a cell cannot stand for it as the grid is now; None if it can."""
    path = path_of(results, cell)
    try:
        complaints = stale([load(path, results)])
    except ValueError as error:
        return str(error)
    again = "remove it, and it is computed again"
    return f"{path}: of another configuration ({complaints[0]}); {again}" if complaints else None


def read_all(results: Path) -> list[Record]:
    """Every record, in the order of names. Files that begin with a dot were being written."""
    paths = sorted(path for path in results.glob("*/*.json") if not path.name.startswith("."))
    return [load(path, results) for path in paths]


def stale(records: Sequence[Record]) -> list[str]:
    """Records of another configuration than the grid has now, or of other data than most of their task."""
    complaints = []
    digests: dict[str, Counter[str]] = {}
    for record in records:
        digests.setdefault(record.cell.task, Counter())[record.values["data"]["digest"]] += 1
    for record in records:
        where, digest = f"{record.cell.name}.json", record.values["data"]["digest"]
        usual = digests[record.cell.task].most_common(1)[0][0]
        if digest != usual:
            complaints.append(f"{where}: data: expected those of most of the task, {usual[:12]}, got {digest[:12]}")
        try:
            check_same(from_dict(record.values["configuration"]), record.cell.config, Path(where))
        except (ValueError, TypeError) as error:
            complaints.append(str(error))
    return complaints
