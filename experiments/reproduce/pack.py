"""Pack data and unfinished runs into one file each, for a GPU machine without network.

    python -m experiments.reproduce.pack data imdb aan-rebuilt --to data.tar.xz     prepared data sets, compressed
    python -m experiments.reproduce.pack runs --to runs.tar --limit 60              the runs closest to their end
    python -m experiments.reproduce.pack unpack data.tar.xz --to FOLDER             unpacks either file

ListOps need not be packed: a session generates it from its seed in seconds.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import mgk.data
from experiments.reproduce import RESULTS, RUNS
from mgk.train import checkpoint, config


def pack_data(names: Sequence[str], to: Path, data_root: Path | None = None) -> int:
    """Pack prepared data sets by the names of their folders. Return the size of the file."""
    root = data_root or mgk.data.root()
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w:xz") as archive:
        for name in names:
            if not (root / name / "manifest.json").exists():
                raise ValueError(f"names: expected prepared sets in {root}, got {name!r}")
            archive.add(root / name, name)
    return to.stat().st_size


def pack_runs(
    to: Path, runs: Path = RUNS, limit: float = 60.0, cells: Sequence[str] = (), results: Path = RESULTS
) -> list[str]:
    """Pack unfinished runs up to `limit` MiB, or the runs of these cells, finished or not. Return their names."""
    chosen = [runs / name for name in cells] or unfinished(runs, results)
    taken, capacity = [], limit * 2**20
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w") as archive:  # weights do not compress; tar keeps links between checkpoints
        for run in chosen:
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and not path.is_symlink())
            if size <= capacity:
                capacity -= size
                archive.add(run, run.relative_to(runs).as_posix())
                taken.append(run.relative_to(runs).as_posix())
    return taken


def unfinished(runs: Path, results: Path) -> list[Path]:
    """Return the runs with a checkpoint and no record, those closest to their end first."""

    def share(run: Path) -> float:
        return float(checkpoint.read_facts(run / "last")["step"]) / config.read(run / "config.json").steps

    found = [path.parent for path in runs.glob("*/*/last")]
    found = [run for run in found if not results.joinpath(f"{run.relative_to(runs).as_posix()}.json").exists()]
    return sorted(found, key=lambda run: (-share(run), run))


def unpack(file: Path, to: Path) -> None:
    """Unpack a file of data or runs."""
    to.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        archive.extractall(to, filter="data")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.reproduce.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="pack prepared data sets")
    data.add_argument("names", nargs="+", help="folders of the data sets, e.g. imdb")
    data.add_argument("--data-root", type=Path, help="folder of prepared data sets")
    runs = commands.add_parser("runs", help="pack unfinished runs")
    runs.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    runs.add_argument("--results", type=Path, default=RESULTS, help="folder of the records; runs with one are finished")
    runs.add_argument("--limit", type=float, default=60.0, help="largest size of the file in MiB")
    runs.add_argument("--cells", nargs="+", default=(), help="pack the runs of these cells, finished or not")
    out = commands.add_parser("unpack", help="unpack a file of data or runs")
    out.add_argument("file", type=Path)
    for each in (data, runs, out):
        each.add_argument("--to", type=Path, required=True, help="file to write; for unpack, the folder")
    chosen = parser.parse_args(arguments)
    if chosen.command == "data":
        print(f"{chosen.to}: {pack_data(chosen.names, chosen.to, chosen.data_root) / 2**20:.1f} MiB")
    elif chosen.command == "runs":
        print(json.dumps(pack_runs(chosen.to, chosen.runs, chosen.limit, chosen.cells, chosen.results)))
    else:
        unpack(chosen.file, chosen.to)


if __name__ == "__main__":
    main()
