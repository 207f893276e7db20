"""Data and unfinished runs in one file each, for a GPU that has no network: `python -m experiments.reproduce.pack`.

    python -m experiments.reproduce.pack data imdb aan-rebuilt --to data.tar.xz     prepared sets, compressed
    python -m experiments.reproduce.pack runs --to runs.tar --limit 60              the runs that have come furthest
    python -m experiments.reproduce.pack unpack data.tar.xz --to FOLDER             either of them

ListOps is not worth packing: a session generates it from its seed where it is missing, in seconds.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import mgk.data
from experiments.reproduce.runner import RESULTS, RUNS
from mgk.train import checkpoint, config


def pack_data(names: Sequence[str], to: Path, data_root: Path | None = None) -> int:
    """Prepared sets by their folders' names; the size of the file."""
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
    """Runs with a checkpoint and no record, the furthest first, up to `limit` MiB; or these cells, finished or not."""
    chosen = [runs / name for name in cells] or unfinished(runs, results)
    taken, room = [], limit * 2**20
    to.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(to, "w") as archive:  # weights do not compress; a tar keeps the links between checkpoints
        for run in chosen:
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and not path.is_symlink())
            if size <= room:
                room -= size
                archive.add(run, run.relative_to(runs).as_posix())
                taken.append(run.relative_to(runs).as_posix())
    return taken


def unfinished(runs: Path, results: Path) -> list[Path]:
    """Runs that were stopped, the furthest first; one that was trained and not yet recorded is the furthest."""

    def share(run: Path) -> float:
        return float(checkpoint.read_facts(run / "last")["step"]) / config.read(run / "config.json").steps

    found = [path.parent for path in runs.glob("*/*/last")]
    found = [run for run in found if not results.joinpath(f"{run.relative_to(runs).as_posix()}.json").exists()]
    return sorted(found, key=lambda run: (-share(run), run))


def unpack(file: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        archive.extractall(to, filter="data")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.reproduce.pack", description="Data and runs in one file each."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data, runs, out = (commands.add_parser(name) for name in ("data", "runs", "unpack"))
    data.add_argument("names", nargs="+")
    data.add_argument("--data-root", type=Path)
    runs.add_argument("--runs", type=Path, default=RUNS)
    runs.add_argument("--results", type=Path, default=RESULTS)
    runs.add_argument("--limit", type=float, default=60.0, help="MiB")
    runs.add_argument("--cells", nargs="+", default=())
    out.add_argument("file", type=Path)
    for each in (data, runs, out):
        each.add_argument("--to", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if chosen.command == "data":
        print(f"{chosen.to}: {pack_data(chosen.names, chosen.to, chosen.data_root) / 2**20:.1f} MiB")
    elif chosen.command == "runs":
        print(json.dumps(pack_runs(chosen.to, chosen.runs, chosen.limit, chosen.cells, chosen.results)))
    else:
        unpack(chosen.file, chosen.to)


if __name__ == "__main__":
    main()
