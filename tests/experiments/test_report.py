"""The report is a function of the records. After an intended change, write golden.md again:
python -m tests.experiments.test_report
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.reproduce import report
from experiments.reproduce.grid import Record, Row
from experiments.reproduce.main import main
from tests.experiments.common import made_up, seeds, with_maps, written

GOLDEN = Path(__file__).parent / "golden.md"
TIMING = {"shape": [32, 8, 4096, 32, False], "method": "smgk soft", "speedup": {"forward": 1.681}}
STEPS = {"listops": {"environment": {"gpu": "GPU 1"}, "rows": {"softmax-h8": 0.008, "smgk-h4": 0.004, "mgk-h4": 0.005}}}

OFTEN = {
    "train": {"step": [500, 2500], "loss": [0.7, 0.6]},
    "valid": {"step": [1500, 2000, 2500], "loss": [0.7, 0.6, 0.6], "accuracy": [0.6575, 0.6525, 0.6]},
}


def records() -> list[Record]:
    return [
        *seeds("listops", Row("softmax", 8), [37.0, 17.2, 36.4]),
        *seeds("listops", Row("smgk", 4), [36.9, 37.4, 37.1]),
        *seeds("listops", Row("mgk", 4), [17.0]),
        *seeds("listops", Row("mgk", 1, "em"), [33.1, 34.0], jobs=4),
        *seeds("text", Row("softmax", 8), [65.1, 65.6]),
        *seeds("text", Row("linear", 8), [65.9, 65.8]),
        *seeds("text-often", Row("linear", 8), [65.75], curve=OFTEN),
        *seeds("listops-often", Row("linear", 2), [17.5, 18.5]),
        *seeds("wikitext2", Row("softmax", 8), [61.25], test_sliding=52.5),
        *seeds("enwiki", Row("softmax", 8), [61.25], inside=with_maps(8)),
        *seeds("enwiki", Row("mlk", 4), [63.5], inside=with_maps(4)),
        *seeds("enwik8-short", Row("smgk", 4, "m3"), [1.7512, 1.7498]),
    ]


def test_the_report_is_golden() -> None:
    assert report(records(), [TIMING], STEPS) == GOLDEN.read_text(encoding="utf-8")


def test_tables_do_not_depend_on_the_order_of_records() -> None:
    first, second = (report(found).split("## The paper's claims")[1] for found in (records(), records()[::-1]))
    assert first == second


def test_a_report_is_verified_against_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = written(tmp_path / "cells", records())
    options = ["--results", str(results), "--out", str(tmp_path / "docs" / "results.md")]
    assert main(["--check", *options]) == 1
    assert "run: python -m experiments.reproduce figures" in capsys.readouterr().err
    assert main(["figures", *options]) == 0
    for name in ("table1-listops", "table2-text", "table3-enwiki", "maps-enwiki-linear", "costs-softmax"):
        assert (tmp_path / "docs" / "figures" / f"{name}.svg").exists()
    assert main(["--check", *options]) == 0
    picture = tmp_path / "docs" / "figures" / "table3-enwiki.svg"
    moved = picture.rename(tmp_path / "elsewhere.svg")
    capsys.readouterr()
    assert main(["--check", *options]) == 1
    assert "1 of its figures are missing: figures/table3-enwiki.svg; run: python -m" in capsys.readouterr().err
    moved.rename(picture)
    written(results, [made_up("listops", Row("mgk", 4), 1, 36.5)])
    assert main(["--check", *options]) == 1
    capsys.readouterr()
    written(
        results,
        [
            made_up(
                "listops",
                Row("mgk", 4),
                1,
                36.5,
                configuration=made_up("text", Row("mgk", 4), 1, 36.5).values["configuration"],
            )
        ],
    )
    assert main(["--check", *options]) == 1
    assert "records do not match the grid: recipe: the run in listops/mgk-h4-s1.json" in capsys.readouterr().err
    other = {"name": "listops", "digest": "f" * 16, "options": {}}
    written(results, [made_up("listops", Row("mgk", 4), 1, 36.5, data=other)])
    assert main(["--check", *options]) == 1
    assert "listops/mgk-h4-s1.json: data: expected those of most records of the task" in capsys.readouterr().err


def test_the_report_of_this_repository_follows_from_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the README."""
    monkeypatch.chdir(GOLDEN.parents[2])
    assert main(["--check"]) == 0


@pytest.mark.parametrize("words", [["figures"], ["--check"]])
def test_a_folder_without_records_is_an_error_and_the_report_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    out = tmp_path / "results.md"
    out.write_text("unchanged")
    assert main([*words, "--results", str(tmp_path / "reslts"), "--out", str(out)]) == 1
    assert capsys.readouterr().err.startswith("error: results: expected a folder with records")
    assert out.read_text() == "unchanged"


def test_every_figure_of_the_report_is_drawn(tmp_path: Path) -> None:
    from experiments.reproduce.figures import draw

    names = {path.name for path in draw(records(), tmp_path)}
    shown = [part.split(")")[0] for part in report(records()).split("](figures/")[1:]]
    assert shown
    assert set(shown) <= names


def test_figures_show_every_seed_and_skip_records_without_ranks() -> None:
    from experiments.reproduce.figures import by_layer, every_seed

    first, second = seeds("listops", Row("smgk", 4), [37.0, 17.0])
    steps, values = every_seed([first, second], "valid", "accuracy")
    gaps = [math.isnan(value) for value in values]
    assert gaps == [math.isnan(step) for step in steps] == [False] * 3 + [True] + [False] * 3 + [True]
    assert values[:3] == first.curve("valid", "accuracy")[1]
    assert values[4:7] == second.curve("valid", "accuracy")[1]
    assert steps[:3] == [1.0, 2.0, 5.0]
    blind = made_up("listops", Row("smgk", 4), 2, 37.0, inside=None)
    assert by_layer([first, second, blind], "rank") == ([1, 2], [300.5, 200.0])
    assert by_layer([first], "effective_heads", 4) == ([1, 2], [0.375, 0.25])
    assert "## Inside the attention" in report([first])
    assert "## Inside the attention" not in report([blind])


def test_rich_and_matplotlib_are_not_needed(tmp_path: Path) -> None:
    results = written(tmp_path / "cells", records())
    program = (
        "import sys\n"
        "absent = 'rich', 'matplotlib', 'transformers', 'tokenizers', 'sacrebleu', 'PIL'\n"
        "for name in absent: sys.modules[name] = None\n"
        "import experiments.cells.runner, experiments.cells.inside, experiments.reproduce.pack, experiments.lm.main\n"
        "from experiments.reproduce.main import main\n"
        "raise SystemExit(main(['figures', '--results', sys.argv[1], '--out', sys.argv[2]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, results, tmp_path / "results.md"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no figures: figures need matplotlib" in done.stdout
    assert (tmp_path / "results.md").read_text() == report(sorted(records(), key=lambda record: record.cell.name))


if __name__ == "__main__":
    GOLDEN.write_text(report(records(), [TIMING], STEPS), encoding="utf-8")
