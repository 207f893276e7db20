"""Records: one small JSON file per finished cell. The tables are made from them alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from experiments.cells.cell import Cell, Metric
from mgk.files import read_json, read_lines, write_text
from mgk.train.config import check_same, from_dict, read, to_dict
from mgk.train.evaluate import flops

POINTS = 100  # at most, of a curve
REQUIRED = (
    "seed", "metric", "dev", "test", "steps", "parameters", "flops", "configuration", "curve", "seconds_per_step",
    "jobs", "peak_bytes", "gpu", "versions", "commit", "data",
)  # fmt: skip

C = TypeVar("C", bound=Cell)


@dataclass(frozen=True)
class Record(Generic[C]):
    """The result of a finished cell."""

    cell: C
    values: dict[str, Any]

    @property
    def row(self) -> Any:
        return self.cell.row

    @property
    def test(self) -> float:
        return float(self.values["test"])

    def curve(self, event: str, quantity: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a curve; `event` is "train" or "valid"."""
        lines = self.values["curve"].get(event, {})
        return lines.get("step", []), lines.get(quantity, [])


def path_of(results: Path, cell: Cell) -> Path:
    return results / f"{cell.name}.json"


def score(metric: Metric, numbers: dict[str, float]) -> float:
    """Convert a loss or an accuracy to the unit of the tables: percent, perplexity, or bits per token.

    A translation is scored by its perplexity here; BLEU is a further measurement.
    """
    if metric == "accuracy":
        return 100 * numbers["accuracy"]
    return numbers["loss"] / math.log(2) if metric == "bits" else math.exp(numbers["loss"])


def make(cell: Cell, run: Path, *, jobs: int, data_root: Path | None = None) -> dict[str, Any]:
    """Return the record of the finished run in the folder `run`, with the commit and GPU of each of its starts."""
    metric, config = cell.metric, read(run / "config.json")
    result = read_json(run / "result.json")
    starts = read_json(run / "run.json").get("starts")
    if not starts:
        raise ValueError(f"{run / 'run.json'}: expected the starts of the run, found none")
    log, last = read_lines(run / "log.jsonl"), starts[-1]
    if len({start["data"]["digest"] for start in starts}) > 1:
        raise ValueError(f"{run}: resumed with other data than it started with; remove it to train it again")
    gpus, commits = (list(dict.fromkeys(start[name] for start in starts)) for name in ("gpu", "commit"))
    record: dict[str, Any] = {
        **cell.identity, "metric": metric,
        "dev": score(metric, result["valid"]), "test": score(metric, result["test"]),
        "best_step": result["best_step"], "steps": result["step"], "parameters": result["parameters"],
        "flops": flops(config.model), "seconds_per_step": result["seconds_per_step"], "jobs": jobs,
        "peak_bytes": result["peak_bytes"], "gpu": ", ".join(map(str, gpus)) if any(gpus) else None,
        "versions": {"python": last["python"], **last["versions"]},
        "commit": ", ".join(commits), "data": last["data"], "starts": len(starts), "command": cell.command,
    }  # fmt: skip
    for name, measure in cell.measures(run, data_root, last["gpu"]).items():
        add(record, name, measure)
    record["curve"] = {event: curve([line for line in log if line["event"] == event]) for event in ("train", "valid")}
    record["configuration"] = to_dict(config)
    return record


def add(record: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
    """Add a further measurement. If it fails, the record keeps the score and says why."""
    try:
        record[name] = measure()
    except Exception as error:
        record |= {name: None, f"{name}_error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def curve(lines: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return at most POINTS lines of a log, including the last, rounded to five digits."""
    stride = max(1, -(-len(lines) // POINTS))
    kept = lines[::-1][::stride][::-1]
    names = [name for name in ("step", "loss", "accuracy") if kept and name in kept[0]]
    return {name: [float(f"{line[name]:.5g}") if name != "step" else line[name] for line in kept] for name in names}


def write(results: Path, cell: Cell, values: dict[str, Any]) -> Path:
    """Write a record atomically, with one line per field so that diffs are readable."""
    path = path_of(results, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def load(path: Path, results: Path, parse: Callable[[str], C]) -> Record[C]:
    """Read a record. Raise ValueError if it is damaged or belongs to another cell than its name says.

    Args:
        path: the file.
        results: folder of the records.
        parse: returns the cell with a name.
    """
    name = path.relative_to(results).with_suffix("").as_posix()
    try:
        cell = parse(name)
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a record ({error}); remove it, and it is computed again") from None
    missing = [field for field in (*cell.identity, *REQUIRED) if field not in values]
    if missing:
        raise ValueError(f"{path}: not a record (no {', '.join(missing)}); remove it, and it is computed again")
    said = {field: values[field] for field in cell.identity}
    if said != dict(cell.identity):
        found = ", ".join(f"{field} {value}" for field, value in said.items() if value != cell.identity[field])
        raise ValueError(f"{path}: holds the record of {found}; the name of the file must match its content")
    return Record(cell, values)


def wrong(results: Path, cell: Cell) -> str | None:
    """Return why the record of a cell does not match the grid; None if it does."""
    path = path_of(results, cell)
    try:
        complaints = stale([load(path, results, lambda _: cell)])
    except ValueError as error:
        return str(error)
    if not complaints:
        return None
    return f"{path}: of another configuration ({complaints[0]}); remove it, and it is computed again"


def read_all(results: Path, parse: Callable[[str], C]) -> list[Record[C]]:
    """Read all records, in the order of their names. Files that begin with a dot are incomplete."""
    paths = sorted(path for path in results.glob("*/*.json") if not path.name.startswith("."))
    return [load(path, results, parse) for path in paths]


def stale(records: Sequence[Record[Any]]) -> list[str]:
    """Return a complaint for each record whose configuration is not the grid's, or whose data is not its task's."""
    complaints = []
    digests: dict[str, Counter[str]] = {}
    for record in records:
        digests.setdefault(record.cell.task, Counter())[record.values["data"]["digest"]] += 1
    for record in records:
        where, digest = f"{record.cell.name}.json", record.values["data"]["digest"]
        usual = digests[record.cell.task].most_common(1)[0][0]
        if digest != usual:
            complaints.append(
                f"{where}: data: expected those of most records of the task, {usual[:12]}, got {digest[:12]}"
            )
        try:
            check_same(from_dict(record.values["configuration"]), record.cell.config, Path(where))
        except (ValueError, TypeError) as error:
            complaints.append(str(error))
    return complaints
