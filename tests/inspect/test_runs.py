"""Figures and pages of run folders, and the inputs that runs create."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mgk.cli import inspect as commands
from mgk.cli.parsing import read_options
from mgk.data.splits import Documents, Pairs, Sequences, Stream
from mgk.files import read_json, write_json
from mgk.inspect import rank
from mgk.inspect.report import comparison_page, rank_table
from mgk.inspect.runs import Input, Run
from mgk.models import ClassifierConfig, LanguageModelConfig, MatcherConfig, build
from mgk.recipes import compare
from mgk.train import Config, DataConfig
from tests.inspect.common import embedded
from tests.train.common import prepare, tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def grid(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    compare(tiny(steps=4), ["softmax:2", "smgk:1"], seeds=2, out=folder, data_root=root)
    return folder


def open_run(grid: Path, root: Path, name: str = "smgk-1") -> Run:
    return Run.open(grid / name / "seed-0", data_root=root)


def untrained(model: Any, data: str) -> Run:
    return Run(Path("none"), Config("test", model, DataConfig(data)))


def test_a_run_knows_its_name_and_curves(grid: Path, root: Path) -> None:
    run = open_run(grid, root)
    assert run.name == "sMGK, 1 head"
    steps, losses = run.curve("train", "loss")
    assert steps == [2, 4]
    assert len(losses) == 2
    assert run.parameters == sum(p.numel() for p in run.model.parameters())


def test_curves_leave_out_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """JSON on the page allows neither NaN nor infinity."""
    lines = [("NaN", "1.5"), ("2.0", "Infinity"), ("1.5", "4.5")]
    text = "".join(
        f'{{"event": "valid", "step": {step}, "loss": {a}, "perplexity": {b}}}\n' for step, (a, b) in enumerate(lines)
    )
    (tmp_path / "log.jsonl").write_text(text)
    run = Run(tmp_path, tiny())
    assert run.curve("valid", "loss") == ([1, 2], [2.0, 1.5])
    assert run.curve("valid", "perplexity") == ([0, 2], [1.5, 4.5])


def test_a_log_is_read_once_and_a_broken_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"event": "train", "step": 1, "loss": 2.0}\n'
    path = tmp_path / "log.jsonl"
    path.write_text(line + line.replace("1", "2") + '{"event": "tra')  # cut by a crash
    run = Run(tmp_path, tiny())
    read: list[Path] = []
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **options: read.append(self) or real(self, **options))  # type: ignore[func-returns-value]
    for metric in ("loss", "norm"):
        run.curve("train", metric)
    assert read == [path]
    assert run.curve("train", "loss") == ([1, 2], [2.0, 2.0])
    path.write_text(line + line.replace("2.0", '"<b>"') + line.replace("2.0", "[1]"))
    assert Run(tmp_path, tiny()).curve("train", "loss") == ([1], [2.0])
    for broken in (
        "nonsense",
        "[1]",
        '{"event": "train"}',
        '{"event": [1], "step": 1}',
        line[:-2].replace("1", "[1]") + "}",
        "[" * 100_000,
    ):
        path.write_text(f"{line}{broken}\n{line}")
        with pytest.raises(ValueError, match=r"log.jsonl, line 2: expected a JSON object with event and step"):
            Run(tmp_path, tiny()).curve("train", "loss")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"rows": []}'])
def test_a_damaged_comparison_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(ValueError, match=r"comparison.json: (expected|cannot be read)"):
        comparison_page(tmp_path)


def test_figures_and_tables(grid: Path, root: Path, tmp_path: Path) -> None:
    commands.figures((grid / "softmax-2" / "seed-0", grid / "smgk-1" / "seed-0"), tmp_path, matrices=6, data_root=root)
    names = {path.name for path in tmp_path.iterdir()}
    drawn = {
        f"{name}.{ending}" for name in ("curves", "maps", "ranks", "costs", "techniques") for ending in ("svg", "png")
    }
    assert names == drawn | {f"{name}.{ending}" for name in ("heads", "results") for ending in ("md", "tex")}
    assert "softmax, 2 heads" in (tmp_path / "results.md").read_text()


def test_rank_table_takes_heads_in_order(grid: Path, root: Path) -> None:
    run = open_run(grid, root, "softmax-2")
    table = rank_table(run, matrices=5)
    heads = [head for index in range(3) for head in run.layers(run.example(index))[0].heads()]
    assert table.tolist() == [[rank(head.rows().weights) for head in heads[:5]]]


def test_explore_writes_a_page(grid: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    runs = (grid / "softmax-2" / "seed-0", grid / "smgk-1" / "seed-0")
    commands.explore(runs, text="[MAX 1 2 [MIN 3 4 ] ]", out=page, data_root=root)
    assert str(page) in capsys.readouterr().out
    data = embedded(page.read_text(encoding="utf-8"))
    assert [model["name"] for model in data["models"]] == ["softmax, 2 heads", "sMGK, 1 head"]
    assert "".join(data["models"][0]["tokens"]) == "[MAX 1 2 [MIN 3 4 ] ] "


def test_a_comparison_becomes_a_report(grid: Path, root: Path, tmp_path: Path) -> None:
    data = embedded(comparison_page(grid, data_root=root).html)
    kinds = [block["kind"] for block in data["report"]]
    assert kinds == ["bars"] * 5 + ["chart"] * 2
    found = {block["title"]: block for block in data["report"]}
    rows = read_json(grid / "comparison.json")["rows"]
    names = ["softmax, 2 heads", "sMGK, 1 head"]
    for row, name, score, size, time in zip(
        rows, names, *(found[title]["bars"] for title in ("Test accuracy", "Parameters", "Time per step")), strict=True
    ):
        assert score["name"] == size["name"] == name
        assert score["value"] == row["mean"]
        assert score["text"] == f"{row['mean']:.2f} ± {row['interval']:.2f} %"
        assert score["high"] == row["mean"] + row["interval"]
        assert size["text"] == f"{row['parameters']:,}"
        assert size["low"] is None
        assert time["low"] <= time["value"] <= time["high"]
    loss = found["Training loss"]["series"][0]
    assert loss["low"][0] <= loss["y"][0] <= loss["high"][0]
    assert len(data["models"]) == 2
    commands.explore((grid,), out=tmp_path / "report.html", data_root=root)
    assert (tmp_path / "report.html").exists()


def test_one_seed_has_no_interval(grid: Path, root: Path, tmp_path: Path) -> None:
    found = read_json(grid / "comparison.json")
    for row in found["rows"]:
        row |= {"scores": row["scores"][:1], "interval": None}
        name = row["attention"].replace(":", "-")
        shutil.copytree(grid / name / "seed-0", tmp_path / name / "seed-0")
    write_json(tmp_path / "comparison.json", found)
    score, *_, chart = embedded(comparison_page(tmp_path, data_root=root).html)["report"]
    assert "One seed" in score["note"]
    assert [bar["low"] for bar in score["bars"]] == [None, None]
    assert chart["series"][0]["low"] is None


def test_a_run_predicts_and_knows_the_truth(grid: Path, root: Path) -> None:
    """The most probable classes of the model for an example, and the label of the data."""
    run = open_run(grid, root)
    given = run.example(3)
    found = run.answer(given)
    assert found is not None
    probabilities = run.model(*given.arguments)[0].softmax(-1)
    assert [int(name) for name, _ in found.options] == probabilities.topk(3).indices.tolist()
    assert [p for _, p in found.options] == pytest.approx(probabilities.topk(3).values.tolist())
    assert found.truth == str(run.prepared.split("test").labels[3])  # type: ignore[union-attr]
    text = run.answer(run.encode("[MAX 1 2 ]"))
    assert text is not None
    assert text.truth is None


def test_a_language_model_predicts_the_next_token() -> None:
    """The truth is the first token that it did not read."""
    run = untrained(LanguageModelConfig(vocabulary=256, max_length=3, width=16, heads=2, layers=1), "enwik8")
    run.__dict__["model"] = build(run.config.model).eval()  # a cached property
    run.__dict__["prepared"] = Tokens(Stream(np.frombuffer(b"abcdef", np.uint8)))
    for given in (run.encode("abcd"), run.example(0)):
        found = run.answer(given)
        assert found is not None
        assert found.truth == "d"
        best = run.model(given.arguments[0])[0, -1].softmax(-1).max().detach()
        assert found.options[0][1] == pytest.approx(float(best))
    complete = run.answer(run.encode("ab"))
    assert complete is not None
    assert complete.truth is None


def test_a_matcher_predicts_nothing_for_one_document() -> None:
    assert untrained(MatcherConfig(max_length=6), "aan").answer(Input((), [])) is None


def test_the_default_example_is_the_longest_that_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    run = untrained(ClassifierConfig(max_length=900), "imdb")
    for lengths, chosen in (([8, 500, 30, 600], 500), ([700, 600, 800], 600)):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        examples = Sequences(np.zeros(sum(lengths), np.uint8), offsets, 1, labels=np.zeros(len(lengths)))
        monkeypatch.setattr(Run, "prepared", Tokens(examples))
        assert len(run.example().tokens) == chosen


def test_bytes_are_read_as_the_models_read_them() -> None:
    """A classifier reads byte + 1, as 0 is padding; a text is not cut inside a character."""
    given = untrained(ClassifierConfig(max_length=6), "imdb").encode("añb😀c")
    assert given.arguments[0].tolist() == [[byte + 1 for byte in "añb".encode()]]
    assert list(given.tokens) == ["a", "ñ", "", "b"]
    assert given.unseen == "😀c"


def test_a_matcher_reads_the_text_twice() -> None:
    given = untrained(MatcherConfig(max_length=6), "aan").encode("ab")
    assert given.arguments[0].shape == (1, 2, 2)


class Words:
    words = ("<eos>", "<unk>", "the", "cat")
    manifest = {"facts": {"level": "words"}}  # noqa: RUF012


def test_words_unknown_to_the_model_are_shown_and_read_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "prepared", Words())
    given = untrained(LanguageModelConfig(vocabulary=4), "wikitext-2").encode("the dog\ncat")
    assert given.arguments[0].tolist() == [[2, 1, 0, 3, 0]]
    assert list(given.tokens) == ["the ", "dog ", "<eos> ", "cat ", "<eos> "]


def test_words_are_split_as_those_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain articles: punctuation marks are tokens, and empty lines are skipped."""
    monkeypatch.setattr(Run, "prepared", Words())
    given = untrained(LanguageModelConfig(vocabulary=4), "enwiki").encode("the cat, the\n\ncat's")
    assert list(given.tokens) == ["the ", "cat ", ", ", "the ", "<eos> ", "cat's ", "<eos> "]
    assert given.arguments[0].tolist() == [[2, 3, 1, 2, 0, 1, 0]]


class Tokens:
    def __init__(self, examples: Any) -> None:
        self.examples = examples
        self.manifest: dict[str, Any] = {"facts": {}}

    def split(self, _: str) -> Any:
        return self.examples


def test_examples_are_counted_as_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full windows of a stream; the documents of a matcher, not its pairs."""
    run = untrained(LanguageModelConfig(max_length=6), "enwik8")
    monkeypatch.setattr(Run, "prepared", Tokens(Stream(np.arange(14))))
    assert [given.arguments[0].tolist()[0][0] for given in run.examples(length=100)] == [0, 6]
    assert [len(given.tokens) for given in run.examples(length=4)] == [4, 4, 4]
    for index in (2, -1):
        with pytest.raises(ValueError, match=f"--index: expected 0 to 1, got {index}"):
            run.example(index)
    documents = Documents(np.arange(5), np.array([0, 2, 5]), 1)
    pairs = np.array([[0, 1], [1, 0], [0, 0]])
    monkeypatch.setattr(Run, "prepared", Tokens(Pairs(documents, pairs, np.zeros(3))))
    assert len(list(untrained(MatcherConfig(max_length=6), "aan").examples())) == 2


def test_errors_say_what_to_do(grid: Path, root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the folder of a run"):
        Run.open(tmp_path)
    with pytest.raises(ValueError, match="RUNS: expected at least one folder"):
        commands.explore(())
    with pytest.raises(ValueError, match="--text, --input: expected one of them, got both"):
        commands.explore((tmp_path,), text="a", input=tmp_path / "b")
    with pytest.raises(ValueError, match="expected symbols of ListOps"):
        open_run(grid, root).encode("[MAX hello ]")
    with pytest.raises(ValueError, match="expected at least one token"):
        open_run(grid, root).encode("")
    with pytest.raises(ValueError, match="expected the folder of a comparison"):
        comparison_page(tmp_path)
    with pytest.raises(ValueError, match="--matrices: expected at least 0"):
        commands.figures((grid,), tmp_path, matrices=-1)
    for index in (100_000, -1):
        with pytest.raises(ValueError, match=f"--index: expected 0 to 39, got {index}"):
            open_run(grid, root).example(index)
    for length in (0, -3):
        with pytest.raises(ValueError, match=f"--length: expected at least 1, got {length}"):
            open_run(grid, root).example(length=length)
        with pytest.raises(ValueError, match=f"--length: expected at least 1, got {length}"):
            open_run(grid, root).encode("[MAX 1 2 ]", length)
    with pytest.raises(ValueError, match="--length: expected enough for the bytes of 'é', got 1"):
        untrained(ClassifierConfig(max_length=6), "imdb").encode("é", 1)


def test_torch_state_is_left_alone(grid: Path, root: Path) -> None:
    """Collecting layers draws no random numbers."""
    run = open_run(grid, root)
    assert run.model is run.model
    state = torch.get_rng_state()
    run.layers(run.example(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_commands_parse() -> None:
    """The command line is generated from their signatures and docstrings."""
    called: list[tuple[object, ...]] = []

    def with_name(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def record(*args: object, **kwargs: object) -> None:
            called.append((function.__name__, args, kwargs))

        return record

    for function, words in (
        (commands.explore, ["a", "b", "--text", "x", "--length", "9"]),
        (commands.figures, ["a", "--matrices", "5"]),
    ):
        read_options(with_name(function), function.__name__, words)()
    assert [name for name, *_ in called] == ["explore", "figures"]
    assert "(PosixPath('a'), PosixPath('b'))" in repr(called[0])
