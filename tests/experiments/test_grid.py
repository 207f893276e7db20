"""The grid has the paper's rows, in an order in which a session that is cut short leaves the most useful table."""

from __future__ import annotations

import pytest

from experiments.reproduce import TARGETS, TASKS, Cell, cells
from experiments.reproduce.grid import LRA, OPTIONS, Row, rows
from experiments.reproduce.paper import published
from mgk.models import build
from mgk.train.config import flatten, replace


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_has_one_seed_before_any_has_two(target: str) -> None:
    found = cells(target, seeds=3)
    assert len(found) == len(set(found)) == 3 * len(cells(target, seeds=1))
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)


@pytest.mark.parametrize(("target", "baseline"), [("table1", "softmax"), ("table2", "linear")])
def test_rows_with_8_and_4_heads_come_first_on_every_task(target: str, baseline: str) -> None:
    found = cells(target, seeds=1)
    first = found[: 3 * len(LRA)]
    assert {cell.task for cell in first} == set(LRA)
    assert {cell.row.heads for cell in first if cell.row.attention == baseline} == {8}
    assert {cell.row.heads for cell in first if cell.row.attention != baseline} == {4}


def test_tables_1_2_and_4_have_the_papers_rows() -> None:
    assert [len(rows(table)) for table in ("table1", "table2", "table4")] == [10, 10, 6]
    for table in ("table1", "table2", "table4"):
        for task in ("listops", "text", "retrieval-rebuilt"):
            assert None not in [published(task, row) for row in rows(table)]
    assert {row for row in rows("table3") if published("enwiki", row)} >= {
        Row("softmax", 8),
        Row("mgk", 4),
        Row("mlk", 8),
    }
    assert published("listops", Row("softmax", 8)) == 37.03
    assert published("retrieval-rebuilt", Row("mgk", 1, "em")) == 80.73
    assert published("enwiki", Row("mlk", 4)) == 39.46
    assert published("enwik8", Row("softmax", 8)) is None


def test_a_cell_is_parsed_from_its_name() -> None:
    for cell in cells("all"):
        assert Cell.parse(cell.name) == cell
    assert Cell("listops", Row("smgk", 4, "hard"), 2).name == "listops/smgk-h4-hard-s2"
    for wrong in ("listops/smgk-4-s0", "listops/smgk-h4-soft-s0", "nothing/smgk-h4-s0", "listops/other-h4-s0"):
        with pytest.raises(ValueError, match="expected"):
            Cell.parse(wrong)


def test_cells_of_a_task_differ_only_in_what_their_names_say() -> None:
    """All models have the same data, the same number of steps and tokens and the same optimiser."""
    named = {"model.attention", "model.heads", "seed"}
    fields = {f"model.{name.removeprefix('model__')}" for option in OPTIONS.values() for name in option}
    for cell in cells("all", seeds=2):
        base, own = flatten(TASKS[cell.task].config), flatten(cell.config)
        changed = {name for name in own if own[name] != base[name]}
        assert changed <= (named | fields if cell.row.option else named), cell.name
        assert (own["model.attention"], own["model.heads"], own["seed"]) == (
            cell.row.attention,
            cell.row.heads,
            cell.seed,
        )
    assert cells("ablations")[0].config.model.components == 2
    assert Cell.parse("enwik8-short/smgk-h4-positions-s0").config.model.prior_positions == 256
    assert Cell.parse("enwik8-short/mgk-h4-m3-s0").config.model.components == 3
    assert Cell.parse("enwik8-short/smgk-h4-means-s0").config.model.means == "em"
    assert Cell.parse("enwik8-short/mlk-h4-keys-s0").config.model.mixing == "keys"


def test_every_ablation_can_be_built() -> None:
    """The module raises an error for an option that its attention does not have."""
    for row in rows("ablations"):
        build(replace(Cell("enwik8-short", row, 0).config, model__width=8, model__layers=1).model)
    assert {row.option for row in rows("ablations")} == {"", *OPTIONS}


def test_text_follows_the_paper_and_text_sound_has_a_dev_set() -> None:
    papers, sound = (TASKS[name].config for name in ("text", "text-sound"))
    assert (papers.data.train, papers.data.valid, papers.data.test) == ("train+dev", "test", "test")
    assert (sound.data.train, sound.data.valid, sound.data.test) == ("train", "dev", "test")
    differ = {name for name, value in flatten(papers).items() if flatten(sound)[name] != value}
    assert differ == {"data.train", "data.valid"}


def test_a_selection_narrows_the_grid_and_a_wrong_one_is_an_error() -> None:
    found = cells("table1", seeds=1, tasks=["text", "listops"], heads=[8])
    assert [cell.name for cell in found] == [
        f"{task}/{row}-s0" for task in ("text", "listops") for row in ("softmax-h8", "smgk-h4", "mgk-h4")
    ]
    with pytest.raises(ValueError, match="recipes: expected some of listops"):
        cells("table1", tasks=["imdb"])
    with pytest.raises(ValueError, match="what: expected one of table1"):
        cells("table5")
    with pytest.raises(ValueError, match=r"recipes, heads: expected .* heads of 8, 4, 2, 1, got all and 3$"):
        cells("table1", heads=[3])
    with pytest.raises(ValueError, match=r"recipes of listops, text, .*got enwik8 and all$"):
        cells("table1", tasks=["enwik8"])
